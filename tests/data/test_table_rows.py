"""Tests that rows from Parquet and Arrow files equal rows from JSON, for any row-group size, and that errors name the row."""

import datetime
import decimal
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy_data import ROWS, USER, make, parsed, read_rows, write

from pipeline.data import chunks, files
from pipeline.data.formats import kind_of
from pipeline.data.values import RowError
from pipeline.errors import InputError

DATE = datetime.datetime(2024, 5, 1)


def arrow(path, table, kind):
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


@pytest.mark.parametrize("format", ["groups", "one group", "file", "stream"])
@pytest.mark.parametrize("chunk_bytes", [1, 300, 1 << 20])
def test_tables_yield_each_row_once_with_its_number(tmp_path, format, chunk_bytes):
    table = pa.Table.from_pylist(ROWS)
    if "group" in format:
        path = tmp_path / "rows.parquet"
        pq.write_table(table, path, row_group_size=7 if format == "groups" else 1000)
    else:
        path = arrow(tmp_path / "rows.arrow", table, format)
    assert read_rows(path, chunk_bytes) == list(enumerate(ROWS, 1))
    planned = chunks.plan_chunks(*files.find_files(str(path), "data.train"), "train", kind_of("sft"), 1)
    assert len(planned) == 1 if format == "one group" else len(planned) > 3


def test_nested_columns_equal_json(tmp_path):
    """In Arrow, all structs of a column have the same keys. Keys with null are dropped, because the original rows lacked them."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "here"}}}
    called = {"role": "assistant", "tool_calls": [call]}
    asked = {**USER, "tool_calls": [{"function": {"name": "g", "arguments": {"n": 1.0}}}]}
    rows = [
        {"messages": [USER, {"role": "assistant", "content": "yo"}], "margin": 1.5, "score": 2.0},
        {"messages": [USER, called, {"role": "tool", "content": "3", "weight": 0}]},
        {"messages": [asked], "margin": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = [row for _, row in read_rows(tmp_path / "rows.parquet")]
    assert [row["messages"] for row in read] == [row["messages"] for row in rows]
    assert [row["margin"] for row in read] == [1.5, None, None]
    datasets.Dataset.from_list(rows[:2]).to_parquet(tmp_path / "hub.parquet")
    read = [row for _, row in read_rows(tmp_path / "hub.parquet")]
    assert [row["messages"] for row in read] == [row["messages"] for row in rows[:2]]


def test_values_of_other_types(tmp_path):
    table = pa.table({
        "nan": pa.array([float("nan"), 1.0]),
        "category": pa.array(["a", "b"]).dictionary_encode(),
        "map": pa.array([[("k", 1.0)], None], pa.map_(pa.string(), pa.float64())),
        "json": pa.array(['{"a": null}', None], pa.json_()),
        "many": pa.array([[{"a": None, "b": 1}], []]),
        "view": pa.array(["x", None], pa.string_view()),
        "fixed": pa.array([[1.0, float("nan")], None], pa.list_(pa.float32(), 2)),
    })  # fmt: skip
    arrow(tmp_path / "rows.arrow", table, "stream")
    assert [row for _, row in read_rows(tmp_path / "rows.arrow")] == [
        {"nan": None, "category": "a", "map": {"k": 1.0}, "json": {"a": None}, "many": [{"b": 1}], "view": "x", "fixed": [1.0, None]},
        {"nan": 1.0, "category": "b", "map": None, "json": None, "many": [], "view": None, "fixed": None},
    ]  # fmt: skip


def test_values_that_json_cannot_express_are_text_for_rewards_and_rejected_in_fields(tmp_path):
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "image": {"bytes": b"\x89PNG", "path": None}, "on": DATE,
           "price": decimal.Decimal("1.50")}  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    ((_, read),) = read_rows(tmp_path / "rows.parquet")
    given = json.loads(parsed(read, "ppo").row)
    assert given["image"] == {"bytes": "<4 bytes>"} and given["on"] == "2024-05-01 00:00:00"
    assert given["price"] == "1.50"
    for key, value, shown in [
        ("chosen", DATE, 'datetime "2024-05-01 00:00:00"'),
        ("rejected", b"no", "bytes"),
        ("margin", decimal.Decimal("0.5"), '"0.5"'),
    ]:
        with pytest.raises(RowError) as caught:
            parsed({**read, key: value}, "rm")
        assert caught.value.field == key and shown in caught.value.found


@pytest.mark.parametrize("name", ["rows.parquet", "file.arrow", "stream.arrow"])
def test_truncated_files(tmp_path, name):
    table, path = pa.Table.from_pylist(ROWS), tmp_path / name
    if name == "rows.parquet":
        pq.write_table(table, path)
    else:
        arrow(path, table, name.removesuffix(".arrow"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    ends = "that is truncated or damaged here"
    with pytest.raises(InputError, match=rf"{name}:\d+: found an? (Parquet|Arrow) file {ends}"):
        make(tmp_path, train=str(path))
    if name == "stream.arrow":  # the rows before the damaged position can be read
        report = make(tmp_path, train=str(path), on_error="skip").report
        split = report.splits["train"]
        assert split.kept % 7 == 0 < split.kept < 50 and split.dropped == {"damaged": 1}
        assert "not read: all later rows" in report.notes[0]
    elif name == "rows.parquet":  # Parquet stores its schema at the end, so no row is readable
        good = write(tmp_path / "good.jsonl", ROWS)
        lost = (
            r"rows\.parquet:1: .*not read: all later rows; no row of this file can be read; repair the file"
        )
        with pytest.raises(InputError, match=lost):
            make(tmp_path, train=[good, str(path)], on_error="skip")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_columns_that_differ_from_json(tmp_path, format):
    words = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    path = tmp_path / f"rows.{format}"
    if format == "parquet":
        pq.write_table(pa.table({"prompt": words}), path)
    else:
        arrow(path, pa.table({"prompt": words}), "file")
        twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
        ((_, error),) = read_rows(arrow(tmp_path / "twice.arrow", twice, "stream"))
        assert 'two columns with the name "prompt"' in error.found
    (_, first), (number, error), (_, last) = read_rows(path)
    assert (first, last, number) == ({"prompt": "a"}, {"prompt": "c"}, 2)
    assert (error.kind, error.field) == ("not_utf8", "prompt") and "byte 0xff" in error.found
