"""Which sets are refused before training, and what the message says."""

import json

import pytest
from toy_data import ROWS, make, write

from pipeline.data import read
from pipeline.errors import InputError


def test_bad_rows_are_named_by_line_in_all_chunks(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(read, "plan", lambda *args, plan=read.plan: plan(*args, 200))
    rows = [*ROWS]
    rows[17] = {"prompt": "x", "completion": ""}
    rows[30] = '{"prompt": '
    rows[41] = {"instruction": "x", "output": "y"}
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    message = str(caught.value)
    assert f"{path}:18: `completion`" in message and f"{path}:31: found" in message
    assert (
        f"{path}:42: found a row of shape instruction+output; expected shape prompt+completion, as in row 1"
        in message
    )
    assert "3 of 50 rows" in message and "data.on_error=skip" in message
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    made = make(tmp_path, train=path, on_error="skip")
    split = made.report.splits["train"]
    assert (split.read, split.kept) == (50, 47)
    assert split.dropped == {"empty_completion": 1, "not_json": 1, "mixed_shapes": 1}
    assert made.report.skipped[0].startswith(f"{path}:18")


def test_elements_of_an_array_are_named_as_such(tmp_path, embedded_ray):
    (tmp_path / "rows.json").write_text(json.dumps([ROWS[0], {"prompt": 7, "completion": "x"}]))
    with pytest.raises(InputError, match=r"rows.json: element 2: `prompt`: found number 7"):
        make(tmp_path, train=str(tmp_path / "rows.json"))


@pytest.mark.parametrize(
    "options,expected",
    [
        ({"max_length": 500}, "context of 400"),
        ({"max_length": 8}, "data.too_long=truncate"),
        ({"max_length": 8, "too_long": "drop"}, "no row is left of 50"),
        ({"eval_fraction": 1e-9}, "leaves none for `eval`"),
        ({"eval": "nowhere.jsonl"}, "data.eval: there is no file"),
        ({"train": None}, "needs rows"),
        ({"train": "empty.jsonl"}, "empty file"),
        ({"train": "empty.jsonl", "on_error": "skip"}, "no row is left of 0"),
    ],
)
def test_refused_before_training(tmp_path, embedded_ray, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match=expected):
        make(tmp_path, **{"train": "rows.jsonl", **options})


def test_truncation_is_not_advised_to_those_who_truncate(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p" * 50, "chosen": "a", "rejected": "b"}])
    for too_long, expected in (
        ("truncate", "their prompts alone fill the 20 tokens"),
        ("drop", "data.too_long=truncate"),
    ):
        with pytest.raises(InputError, match=r"no row is left of 1 read \(1 too long\)") as caught:
            make(tmp_path, "dpo", train=path, max_length=20, too_long=too_long)
        assert expected in str(caught.value) and ("data.too_long=truncate" in expected) == (
            "too_long=" in str(caught.value)
        )


def test_rows_that_are_all_wrong_in_the_same_way_are_one_line(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(read, "plan", lambda *args, plan=read.plan: plan(*args, 300))  # several chunks
    path = write(
        tmp_path / "pairs.jsonl", [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(40)]
    )
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    first, alike, advice = caught.value.message.splitlines()
    assert first == "40 of 40 rows cannot be used (40 wrong or missing field):"
    assert alike.startswith(
        f"  rows 1-40, all in the same way: {path}:1: `completion`: found fields prompt, chosen"
    )
    assert alike.endswith("(stage sft)") and "is it another stage's file?" in advice
    path = write(
        tmp_path / "mixed.jsonl", [{"prompt": 1, "completion": "a"}, {"prompt": "a", "completion": 1}]
    )
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    assert len(caught.value.message.splitlines()) == 4, "two ways, a line each"
