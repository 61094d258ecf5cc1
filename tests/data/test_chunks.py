"""Files as rows with their numbers, whatever the format and the size of the chunks."""

import gzip
import json

import pytest
from toy_data import (
    read_rows,
)

from pipeline.data.formats import array, lines
from pipeline.data.values import RowError


@pytest.mark.parametrize("chunk_bytes", [1, 3, 17, 64, 1 << 20])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_byte_ranges_hold_each_line_once_with_its_number(tmp_path, chunk_bytes, end):
    values = ["x" * (i * 7 % 23) for i in range(20)]
    lines = [json.dumps(value) for value in values]
    lines.insert(5, "")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + end)
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line]
    assert read_rows(path, chunk_bytes) == expected


def test_arrays_gzip_and_byte_order_marks(tmp_path):
    rows = [{"prompt": "é" * i, "completion": "[,]"} for i in range(300)]
    texts = {"a.json": json.dumps(rows), "b.json": json.dumps(rows, indent=2, ensure_ascii=False)}
    texts["c.jsonl"] = "\ufeff" + "\r\n".join(json.dumps(row) for row in rows)
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / (name + ".gz")).write_bytes(gzip.compress(text.encode()))
        for path in (tmp_path / name, tmp_path / (name + ".gz")):
            assert read_rows(path) == list(enumerate(rows, 1)), path


@pytest.mark.parametrize(
    "name,content,kind,line",
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "not_json", 2),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xff"}\n', "not_utf8", 3),
        ("a.json", b'[{"a": 1}, {"a": 2}, {"a"', "not_json", 3),
        ("a.json", b'[{"a": 1}, {"a": 2}', "not_json", 3),
        ("a.json", b'[{"a": 1}, {"a": "\xff"}]', "not_utf8", 1),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12], "truncated_gzip", None),
        ("a.json.gz", gzip.compress(b'[{"a": 1}]', mtime=0)[:-9], "truncated_gzip", None),
        ("a.jsonl.gz", b'{"a": 1}\n', "truncated_gzip", 1),
    ],
)
def test_damaged_files(tmp_path, name, content, kind, line):
    (tmp_path / name).write_bytes(content)
    number, error = read_rows(tmp_path / name)[-1]
    assert isinstance(error, RowError) and error.kind == kind
    assert line in (number, None)


def test_a_row_without_end_is_passed_over(tmp_path, monkeypatch):
    for module in (lines, array):
        monkeypatch.setattr(module, "ROW", 1000)
        monkeypatch.setattr(module, "BLOCK", 512)
    good, large = '{"a": 1}', '{"a": "' + "x" * 5000 + '"}'
    text = f"{good}\n{large}\n{good}\n"
    for name, data in (("a.jsonl", text.encode()), ("a.jsonl.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        for size in (100, 3000, 1 << 20):
            numbered = read_rows(tmp_path / name, size)
            assert [row for _, row in numbered[::2]] == [{"a": 1}] * 2
            assert [number for number, _ in numbered] == [1, 2, 3]
            assert numbered[1][1].kind == "too_large"
    (tmp_path / "a.json").write_text(f"[{good}, {large}, {good}]")
    numbered = read_rows(tmp_path / "a.json")
    assert [n for n, _ in numbered] == [1, 2] and numbered[1][1].kind == "too_large"
    place = len(f"[{good}, ") + 1
    assert str(numbered[1][1]).endswith(f"; not read: all from byte {place:,} on")
