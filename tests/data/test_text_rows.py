"""Tests that each row of JSON Lines, JSON array, CSV and TSV files is read once with its number, and errors name the line."""

import bz2
import csv
import gzip
import json
import lzma
import pickle

import pytest
from toy_data import ROWS, make, read_rows, rows_of

from pipeline.data import text_rows
from pipeline.data.values import RowError
from pipeline.errors import InputError


def write(path, content, zipped=False):
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if zipped else data)
    return path


@pytest.mark.parametrize("chunk_bytes", [1, 3, 17, 64, 1 << 20])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_byte_ranges_yield_each_line_once_with_its_number(tmp_path, chunk_bytes, end):
    lines = [json.dumps("x" * (i * 7 % 23)) for i in range(20)]
    lines.insert(5, "")
    path = write(tmp_path / "rows.jsonl", "\n".join(lines) + end)
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line]
    assert read_rows(path, chunk_bytes) == expected


def test_arrays_gzip_and_byte_order_marks(tmp_path, monkeypatch):
    rows = [{"prompt": "é" * i, "completion": "[,]"} for i in range(300)]
    texts = {
        "a.json": json.dumps(rows),
        "b.json": json.dumps(rows, indent=2, ensure_ascii=False),
        "c.json": " [ ] ",
    }
    texts["c.jsonl"] = "\ufeff" + "\r\n".join(json.dumps(row) for row in rows)
    for block in (64, text_rows.BLOCK):  # the arrays are longer than 64 bytes and shorter than BLOCK
        monkeypatch.setattr(text_rows, "BLOCK", block)
        for name, text in texts.items():
            for zipped in (False, True):
                path = write(tmp_path / (name + ".gz" * zipped), text, zipped)
                assert read_rows(path) == ([] if name == "c.json" else list(enumerate(rows, 1))), path


LINES, TABLE = b'{"a": 1}\n' * 9, b"a,b\n" + b"1,2\n" * 9


@pytest.mark.parametrize(
    ("name", "content", "kind", "line", "found"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "not_json", 2, "column"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xff"}\n', "not_utf8", 3, "byte 0xff"),
        ("a.json", b'[{"a": 1}, {"a": 2}, {"a"', "not_json", 3, "the end of the file"),
        ("a.json", b'[{"a": 1}, {"a": "\xff"}]', "not_utf8", 1, "byte 0xff"),
        ("a.json", b"[{},,{}]", "not_json", 2, ",{}]"),
        ("a.json", b"[{}] x", "not_json", 2, "after the closing bracket"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-12], "truncated_gzip", None, ""),
        ("a.csv.gz", gzip.compress(TABLE, mtime=0)[:-12], "truncated_gzip", None, ""),
        ("a.jsonl.gz", LINES, "truncated_gzip", 1, "a truncated gzip file"),
        ("a.csv", b'a,b\n"1\n2",2\n3,4,5\n', "ragged", 4, "3 values"),
        ("a.csv", b'a,b\n1,2\n"3,4\n5,6\n', "not_csv", 3, "a quote that is not closed"),
        ("a.csv", b'a,b\n1,2\n"x"y,4\n5,6\n', "not_csv", 3, "expected after"),
        ("a.csv", b"a,b\n1,2\n3,\xe9\n5,6\n", "not_utf8", 3, "byte 0xe9"),
        ("a.csv", b"a,b,a\n1,2,3\n", "repeated_key", 1, 'two columns with the name "a"'),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path, name, content, kind, line, found):
    rows = read_rows(write(tmp_path / name, content))
    ((number, error),) = [(number, row) for number, row in rows if isinstance(row, RowError)]
    assert error.kind == kind and found in error.found and line in (number, None)


def test_numbers_of_any_length(tmp_path):
    row = f'{{"x": -{"9" * 5000}}}'
    for text in (row, f"[{row}]"):
        ((_, first),) = read_rows(write(tmp_path / "rows.json", text))
        assert first == {"x": float("-inf")}


# ---- CSV -------------------------------------------------------------------------------------------------------------

QUIRKS = 'prompt,completion\r\n"a ""b"", c",\'d\'\r\n\r\n"two\r\nlines",é\r\n42,"[1]"\r\n'
EXPECTED = [
    (2, {"prompt": 'a "b", c', "completion": "'d'"}),
    (4, {"prompt": "two\r\nlines", "completion": "é"}),
    (6, {"prompt": "42", "completion": "[1]"}),
]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv", "semicolons.csv", "tabs.csv"])
def test_quotes_line_ends_byte_order_marks_and_delimiters(tmp_path, name, mark):
    text = mark + QUIRKS
    if not name.startswith("a.csv"):
        sign = ";" if "semi" in name else "\t"
        text = text.replace(",", sign).replace(f'"{sign} c', '", c')
    assert read_rows(write(tmp_path / name, text, name.endswith("gz"))) == EXPECTED


def test_rows_follow_a_bad_one_and_values_may_be_large(tmp_path):
    rows = read_rows(write(tmp_path / "a.csv", b'a,b\n1\n2,\xff\n"x"y,3\n4,5\n'))
    assert [number for number, _ in rows] == [2, 3, 4, 5] and rows[-1][1] == {"a": "4", "b": "5"}
    large = "x" * 200_000  # pandas writes its index as a column without a name
    assert read_rows(write(tmp_path / "a.csv", f",a\n0,{large}\n")) == [(2, {"Unnamed: 0": "0", "a": large})]


def test_csv_trains_and_its_errors_name_the_line(tmp_path):
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["prompt", "chosen", "rejected", "margin"])
        table.writerows(["42", "7", f"no\n{i}", i or ""] for i in range(3))
    made = make(tmp_path, "rm", train=str(path))
    assert [row["margin"] for row in rows_of(made.train)] == [0.0, 1.0, 2.0]
    with open(path, "a") as file:
        file.write("1,2\n42,7,no,much\n")
    with pytest.raises(InputError) as caught:
        make(tmp_path, "rm", train=str(path))
    message = str(caught.value)
    assert "rows.csv:8: found 2 values; expected 4, because the header has columns prompt, chosen" in message
    assert 'rows.csv:9: `margin`: found "much"; expected a number' in message
    assert make(tmp_path, "rm", train=str(path), on_error="skip").report.splits["train"].kept == 3
    for content in ("", "prompt,completion\n", ROWS[0]["prompt"]):
        path.write_text(content)
        with pytest.raises(InputError, match=r"rows.csv:1: found no rows; expected at least one row"):
            make(tmp_path, train=str(path))


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("a|b\n1|2\n", {"a": "1", "b": "2"}),
        ("a (x|y|z),b\n1,2\n", {"a (x|y|z)": "1", "b": "2"}),
        ("\ufeffsep=;\r\na;b\r\n1,5;2\r\n", {"a": "1,5", "b": "2"}),
        ("sep=,\na,b\n1,2\n", {"a": "1", "b": "2"}),
    ],
)
def test_other_delimiters_and_excels_sep_line(tmp_path, text, row):
    for name in ("a.csv", *(["a.tsv"] if "|" in text and "," not in text else [])):
        assert [found for _, found in read_rows(write(tmp_path / name, text))] == [row]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "UTF-16 text; run iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", "\ufeff{}\n".encode("utf-16-be"), "UTF-16 text; run iconv"),
        ("a.xlsx", b"PK\x03\x04\x14", "an Excel workbook .*; save its sheet as CSV UTF-8"),
        ("a.ZST", b"(\xb5/\xfd\x24", "compressed in an unsupported format; unpack it"),
        ("a.jsonl.xz", lzma.compress(b"{}"), "compressed in an unsupported format"),
        ("a.jsonl", bz2.compress(b"{}"), "compressed in an unsupported format"),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1", "an Excel workbook in the old"),
        ("a.pkl", pickle.dumps([{"a": 1}]), "a pickle; save its rows as JSON Lines or Parquet"),
        (
            "a.json",
            json.dumps({"data": [{"a": 1}]}, indent=2),
            r"objects that span several lines; run jq -c \. FILE",
        ),
        ("a.json", '\ufeff\n{\r\n"a": 1\r\n}', "objects that span several lines"),
    ],
)
def test_a_file_of_another_format_is_recognized_by_its_first_bytes(tmp_path, name, content, says):
    for zipped in (False, True):
        path = write(tmp_path / (name + ".gz" * zipped), content, zipped)
        with pytest.raises(InputError, match=f"{name}.* is .*{says}"):
            read_rows(path)
