"""CSV and TSV: every value is text, and every bad row is known by its line."""

import csv
import gzip

import pytest
from toy_data import ROWS, make, read_rows, rows_of

from pipeline.data.formats import delimited, lines
from pipeline.data.shapes import as_json, kind_of
from pipeline.errors import InputError

QUIRKS = 'prompt,completion\r\n"a ""b"", c",\'d\'\r\n\r\n"two\r\nlines",é\r\n42,"[1]"\r\n'
EXPECTED = [
    (2, {"prompt": 'a "b", c', "completion": "'d'"}),
    (4, {"prompt": "two\r\nlines", "completion": "é"}),
    (6, {"prompt": "42", "completion": "[1]"}),
]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz", "semicolons.csv", "tabs.csv"])
def test_quotes_line_ends_marks_and_delimiters(tmp_path, name, mark):
    text = mark + QUIRKS
    if name != "a.csv" and name != "a.csv.gz":
        sign = ";" if "semi" in name else "\t"
        text = text.replace(",", sign).replace(f'"{sign} c', '", c')
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read_rows(tmp_path / name) == EXPECTED


@pytest.mark.parametrize(
    "content,number,kind,found",
    [
        (b"a,b\n1,2\n3\n4,5\n", 3, "ragged", "1 value"),
        (b"a,b\n1,2\n3,4,5\n", 3, "ragged", "3 values"),
        (b'a,b\n"1\n2",2\n3,4,5\n', 4, "ragged", "3 values"),
        (b'a,b\n1,2\n"3,4\n5,6\n', 3, "not_csv", "a quote that is not closed"),
        (b'a,b\n1,2\n"x"y,4\n5,6\n', 3, "not_csv", "expected after"),
        (b"a,b\n1,2\n3,\xe9\n5,6\n", 3, "not_utf8", "byte 0xe9 at position 3 of line 3"),
        (b"\xffa,b", 1, "not_utf8", "byte 0xff"),
        (b"a,b,a\n1,2,3\n", 1, "repeated_key", 'two columns of the name "a"'),
    ],
)
def test_bad_rows_and_headers(tmp_path, content, number, kind, found):
    (tmp_path / "a.csv").write_bytes(content)
    errors = [(number, row) for number, row in read_rows(tmp_path / "a.csv") if not isinstance(row, dict)]
    ((at, error),) = errors
    assert (at, error.kind) == (number, kind) and found in error.found


def test_rows_go_on_behind_a_bad_one(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'a,b\n1\n2,\xff\n"x"y,3\n4,5\n')
    assert [number for number, _ in read_rows(tmp_path / "a.csv")] == [2, 3, 4, 5]
    assert read_rows(tmp_path / "a.csv")[-1] == (5, {"a": "4", "b": "5"})


def test_a_damaged_gzip_stream(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 9, mtime=0)[:-12])
    assert read_rows(tmp_path / "a.csv.gz")[-1][1].kind == "truncated_gzip"


def test_rows_without_end_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "ROW", 1000)
    monkeypatch.setattr(lines, "ROW", 1000)
    (tmp_path / "a.csv").write_text(f"a,b\n1,{'x' * 5000}\n3,4\n")
    (_, error), last = read_rows(tmp_path / "a.csv")
    assert error.kind == "too_large" and last == (3, {"a": "3", "b": "4"})


def test_an_index_without_a_name_and_large_values(tmp_path):
    (tmp_path / "a.csv").write_text(f",prompt\n0,{'x' * 200_000}\n")
    assert read_rows(tmp_path / "a.csv") == [(2, {"Unnamed: 0": "0", "prompt": "x" * 200_000})]


def test_lists_in_csv_are_json():
    row = {
        "messages": '[{"role": "user", "content": "1"}]',
        "margin": " ",
        "prompt": "42",
        "conversations": "[{'from'",
    }
    assert as_json(row, kind_of("sft"), "csv") == row | {
        "messages": [{"role": "user", "content": "1"}],
        "margin": None,
    }


def test_csv_trains_and_its_errors_name_the_line(tmp_path):
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, ["prompt", "chosen", "rejected", "margin"])
        table.writeheader()
        table.writerows(
            {"prompt": "42", "chosen": "7", "rejected": f"no\n{i}", "margin": i if i else ""}
            for i in range(3)
        )
    made = make(tmp_path, "rm", train=str(path))
    assert [row["margin"] for row in rows_of(made.train)] == [0.0, 1.0, 2.0]
    with open(path, "a") as file:
        file.write("1,2\n42,7,no,much\n")
    with pytest.raises(InputError) as caught:
        make(tmp_path, "rm", train=str(path))
    assert "rows.csv:8: found 2 values; expected 4, as the header has columns prompt, chosen" in str(
        caught.value
    )
    assert 'rows.csv:9: `margin`: found "much"; expected a number' in str(caught.value)
    assert make(tmp_path, "rm", train=str(path), on_error="skip").report.splits["train"].kept == 3
    for content in ("", "prompt,completion\n", ROWS[0]["prompt"]):
        path.write_text(content)
        with pytest.raises(InputError, match=r"rows.csv:1: found no rows; expected at least one row"):
            make(tmp_path, train=str(path))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("sign", [";", ",", "|"])
def test_the_line_that_tells_excel_the_delimiter_is_no_header(tmp_path, sign, mark):
    text = (
        f"sep={sign}\r\na{sign}b\r\n1,5{sign}2;3\r\n"
        if sign == "|"
        else f"sep={sign}\r\na{sign}b\r\n1{sign}2\r\n"
    )
    (tmp_path / "a.csv").write_bytes(mark + text.encode())
    values = {"a": "1,5", "b": "2;3"} if sign == "|" else {"a": "1", "b": "2"}
    assert read_rows(tmp_path / "a.csv") == [(3, values)]


@pytest.mark.parametrize(("name", "text"), [("a.csv", "a,b\n1,2\n"), ("a.jsonl", '{"a": 1}\n')])
@pytest.mark.parametrize("coding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_named_with_what_makes_utf8_of_it(tmp_path, name, text, coding):
    (tmp_path / name).write_bytes(("\ufeff" + text).encode(coding))
    with pytest.raises(
        InputError, match=r"found UTF-16 text; expected UTF-8: type iconv -f UTF-16 -t UTF-8 .*> utf8\."
    ):
        read_rows(tmp_path / name)
