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
    said = str(caught.value)
    assert f"{path}:18: `completion`" in said and f"{path}:31: found" in said
    assert (
        f"{path}:42: found a row of shape instruction+output; expected shape prompt+completion, as in row 1"
        in said
    )
    assert "3 of 50 rows" in said and "data.on_error=skip" in said
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
    "options,said",
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
def test_refused_before_training(tmp_path, embedded_ray, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match=said):
        make(tmp_path, **{"train": "rows.jsonl", **options})


def test_truncation_is_not_advised_to_those_who_truncate(tmp_path, embedded_ray):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p" * 50, "chosen": "a", "rejected": "b"}])
    for too_long, said in (
        ("truncate", "their prompts alone fill the 20 tokens"),
        ("drop", "data.too_long=truncate"),
    ):
        with pytest.raises(InputError, match=r"no row is left of 1 read \(1 too long\)") as caught:
            make(tmp_path, "dpo", train=path, max_length=20, too_long=too_long)
        assert said in str(caught.value) and ("data.too_long=truncate" in said) == (
            "too_long=" in str(caught.value)
        )
