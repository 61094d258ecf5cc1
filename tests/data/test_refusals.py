"""Which sets are refused before training, and what the message says."""

import json

import pytest
from toy_data import ROWS, make, write

from pipeline.data import read
from pipeline.data.files import find
from pipeline.errors import InputError


def test_bad_rows_are_named_by_line_in_all_chunks(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(read, "plan", lambda *args, plan=read.plan: plan(*args, 200))
    rows = [*ROWS]
    rows[17] = {"prompt": "x", "completion": ""}
    rows[30] = '{"prompt": '
    rows[41] = {"instruction": "x", "output": "y"}  # another format is read as what it is
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    message = str(caught.value)
    assert f"{path}:18: `completion`" in message and f"{path}:31: found" in message
    assert "2 of 50 rows" in message and "data.on_error=skip" in message
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    made = make(tmp_path, train=path, on_error="skip")
    split = made.report.splits["train"]
    assert (split.read, split.kept) == (50, 48)
    assert split.dropped == {"empty_completion": 1, "not_json": 1}
    assert made.report.skipped[0].startswith(f"{path}:18")


def test_elements_of_an_array_are_named_as_such(tmp_path, embedded_ray):
    (tmp_path / "rows.json").write_text(json.dumps([ROWS[0], {"prompt": 7, "completion": "x"}]))
    with pytest.raises(InputError, match=r"rows.json: element 2: `prompt`: found number 7"):
        make(tmp_path, train=str(tmp_path / "rows.json"))


@pytest.mark.parametrize(
    "options,expected",
    [
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
    for too_long, why, expected in (
        ("truncate", "1 whose prompt alone is too long", "their prompts alone fill the 20 tokens"),
        ("drop", "1 too long", "data.too_long=truncate"),
    ):
        with pytest.raises(InputError, match="no row is left of 1 read") as caught:
            make(tmp_path, "dpo", train=path, max_length=20, too_long=too_long)
        assert why in str(caught.value) and expected in str(caught.value)
        assert ("data.too_long=truncate" in str(caught.value)) == (too_long == "drop")


def test_rows_that_are_all_wrong_in_the_same_way_are_one_line(tmp_path, embedded_ray, monkeypatch):
    monkeypatch.setattr(read, "plan", lambda *args, plan=read.plan: plan(*args, 300))  # several chunks
    path = write(tmp_path / "empty.jsonl", [{"prompt": f"q{i}", "completion": ""} for i in range(40)])
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    first, alike, advice = caught.value.message.splitlines()
    assert first == "40 of 40 rows cannot be used (40 empty completion):"
    assert alike.startswith(f"  rows 1-40, all in the same way: {path}:1: `completion`: found")
    assert "data.on_error=skip" in advice
    path = write(
        tmp_path / "mixed.jsonl", [{"prompt": 1, "completion": "a"}, {"prompt": "a", "completion": 1}]
    )
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    assert len(caught.value.message.splitlines()) == 4, "two ways, a line each"


def test_rows_that_are_wrong_in_the_same_way_share_a_line_and_the_good_ones_are_counted(
    tmp_path, embedded_ray
):
    rows = [{"prompt": f"q{i}", "completion": "" if i % 3 == 0 else " a"} for i in range(60)]
    rows[1] = {"prompt": "q" * 500, "completion": "a"}
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    first, empty, long, usable, _ = caught.value.message.splitlines()
    assert first == "21 of 60 rows cannot be used (20 empty completion, 1 too long):"
    assert (
        empty.startswith(f"  {path}:1: `completion`: found")
        and "(and 19 more in the same way: line 4, 7, 10, " in empty
    )
    assert long.startswith(f"  {path}:2: found 503 tokens") and "more" not in long
    assert (
        usable
        == "  39 rows can be used: 268 tokens; prompt tokens p50 4, max 4; completion tokens p50 3, max 3"
    )
    made = make(tmp_path, train=path, on_error="skip")
    assert [line.split(": ")[0] for line in made.report.skipped] == [f"{path}:1", f"{path}:2"]
    turns = [{"role": "user", "content": "a"}] * 3
    wrong = [{"messages": [*turns[: i % 3], {"role": "robot", "content": "b"}]} for i in range(9)]
    path = write(
        tmp_path / "turns.jsonl", [*wrong, {"messages": [*turns, {"role": "assistant", "content": "b"}]}]
    )
    with pytest.raises(InputError) as caught:
        make(tmp_path, train=path)
    assert (
        f"{path}:1: `messages[0].role`" in caught.value.message and "(and 8 more in" in caught.value.message
    )


def test_packed_files_are_told_how_to_unpack_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl.zst").write_text("x")
    with pytest.raises(InputError, match=r"; type zstd -d rows.jsonl.zst"):
        find("rows.jsonl.zst", "data.train")


def test_the_report_says_so_where_most_rows_are_too_long(tmp_path, embedded_ray):
    rows = [{"prompt": "p" * (50 if i else 5), "completion": f" {i}"} for i in range(4)]
    path = write(tmp_path / "rows.jsonl", [*rows, rows[0]])
    text = make(tmp_path, train=path, max_length=20, too_long="truncate").report.render()
    assert "dropped     3 whose prompt alone is too long" in text
    assert "most rows (3 of 5) are left out as longer than 20 tokens" in text
    assert "\n\nduplicates    1 row repeats" in text, "of all sets, not of the last one"
