"""data.transform: rows of rows by a Python function; what is wrong with it ends the run before it starts."""

import importlib
import sys

import pytest
from toy_data import make, rows_of, tokenizer, write

from pipeline.config import Data
from pipeline.data.files import find
from pipeline.data.read import cache_key, options_of
from pipeline.data.reshape import Preprocess
from pipeline.data.shapes import kind_of
from pipeline.data.values import Dropped, RowError
from pipeline.errors import InputError
from pipeline.runtime.inputs import check_transform

ROW = {"q": "a", "a": "b", "id": 1}
ROWS = [{"q": f"question {i}", "a": f"answer {i}", "id": i} for i in range(40)]


def made(name, row=ROW):
    return list(kind_of("sft", Preprocess(transform=f"python:transforms:{name}")).rows(row))


def test_a_row_becomes_one_several_or_none():
    two = [{"prompt": "a", "completion": end} for end in ("b!", "b?")]
    assert made("twice") == made("yields") == two
    assert made("some") == [{"prompt": "a", "completion": "b"}]
    assert made("some", {**ROW, "id": 2}) == [Dropped("left_out")]
    bad = RowError("not_json", "", "x", "y")
    assert made("twice", bad) == [bad]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("raises", r"KeyError: 'missing' at .*transforms\.py:\d+"),
        ("text", r'text "a" returned by python:transforms:text'),
        ("not_json", r"a row that is not JSON \(TypeError: Object of type set"),
    ],
)
def test_what_raises_or_returns_no_row_is_a_bad_row(name, found):
    (error,) = made(name)
    assert isinstance(error, RowError) and error.kind == "transform"
    with pytest.raises(RowError, match=found):
        raise error


def test_columns_come_after_the_transform():
    kind = kind_of(
        "rm", Preprocess({"chosen": "completion", "rejected": "other"}, transform="python:transforms:some")
    )
    (error,) = kind.rows(ROW)
    assert error.field == "other" and "prompt, completion" in error.found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("python:nowhere:f", "No module named 'nowhere'"),
        ("python:transforms:nothing", "has no attribute 'nothing'"),
        ("python:transforms:COUNT", "is no function"),
        ("python:transforms:two_arguments", r"takes \(row, tokenizer\), expected one argument, the row"),
    ],
)
def test_a_function_that_cannot_be_called_with_a_row_is_refused(source, expected):
    with pytest.raises(InputError, match=expected):
        check_transform(source)
    check_transform("python:transforms:twice")


def test_rows_keep_their_order_and_stay_together(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    prepared = make(tmp_path, train=path, transform="python:transforms:twice", eval_fraction=0.5)
    sets = {
        name: [row["input_ids"] for row in rows_of(getattr(prepared, name))] for name in ("train", "eval")
    }
    split = prepared.report.splits
    assert split["train"].kept + split["eval"].kept == 80
    for rows in sets.values():  # the two completions of one prompt, next to each other
        assert rows and all(rows[i][:-3] == rows[i + 1][:-3] for i in range(0, len(rows), 2))


def test_a_transform_that_raises_stops_the_run_or_drops_the_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    source = "python:transforms:raises_sometimes"
    with pytest.raises(InputError, match=rf"{path}:4: found KeyError: 'missing' at .*transforms.py"):
        make(tmp_path, train=path, transform=source)
    split = make(tmp_path, train=path, transform=source, on_error="skip").report.splits["train"]
    assert (split.read, split.kept, split.dropped) == (40, 39, {"transform": 1})


def test_another_source_is_another_cache(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {"train": find(write(tmp_path / "rows.jsonl", ROWS), "data.train")}
    keys = []
    for end in ("", "", "!"):
        (tmp_path / "mine.py").write_text(f"def f(row):\n    return {{**row, 'a': row['a'] + '{end}'}}\n")
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()
        options = options_of(
            "sft", Data(train="rows.jsonl", transform="python:mine:f"), tokenizer(), 400, False
        )
        keys.append(cache_key(files, tokenizer(), options))
    assert keys[0] == keys[1] != keys[2]
