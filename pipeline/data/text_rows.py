"""Reads the rows of JSON Lines, JSON array, CSV and TSV files, which may be gzipped, one row at a time.

The readers yield a RowError in place of an unreadable row.

The module does not use ijson, because version 3.6.0 was no faster. In addition, ijson stops at a NaN or an integer over 64 bits
without naming the row, replaces lone surrogates (half of a UTF-16 pair), and does not return a row's bytes, which identify
duplicates. The module does not use pyarrow's CSV reader, because it guesses types (a prompt `42` becomes a number in some
blocks), and its line numbers are wrong after a row of several lines.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

from pipeline.data.files import open_bytes
from pipeline.data.values import RowError, fields_of, read_json, read_value, show_json

BLOCK = 1 << 20  # bytes to read at a time
ROW = 64 << 20  # maximum characters of a CSV field
# separator of array elements: white space, perhaps a bracket or comma, and white space
NEXT = re.compile(r"[ \t\r\n]*([\[,\]]?)[ \t\r\n]*")
DELIMITERS = {"csv": ",;\t|", "tsv": "\t|"}  # delimiters of each format, the most likely first
REST = "all later rows"

Row = tuple[int, Any, bytes]  # (number from 1, decoded row or RowError, bytes of the row)


def text_rows(path: str, format: str, zipped: bool, start: int, stop: int) -> Iterator[Row]:
    """Yields the rows of a file in the format lines, array, csv or tsv. [start, stop) is a byte range of uncompressed lines."""
    number = int(format in DELIMITERS)  # the header is line 1, but is not a row
    with open_bytes(path) as file:
        stream: Any = gzip.GzipFile(fileobj=file) if zipped else io.BufferedReader(file, BLOCK)
        if format in DELIMITERS:
            rows = delimited_rows(stream, DELIMITERS[format])
        else:
            rows = array_rows(stream) if format == "array" else json_rows(stream, start, stop)
        try:
            for number, row, data in rows:
                yield number, row, data
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            found = f"a truncated gzip file ({error})"
            problem = RowError("truncated_gzip", "", found, "a complete .gz file", rest=REST)
            yield number + 1, problem, b""


def json_rows(stream: Any, start: int, stop: int) -> Iterator[Row]:
    """Yields the decoded rows of JSON Lines. Empty lines are skipped, but count in the row numbers."""
    position, number = start, 0
    if start:  # a line that crosses `start` belongs to the previous range
        stream.seek(start - 1)
        position += len(stream.readline(stop - start + 1)) - 1
    while (position < stop or stop < 0) and (line := stream.readline()):
        position, number = position + len(line), number + 1
        if line := line.removeprefix(codecs.BOM_UTF8).strip():
            yield number, decode_line(line), line


def decode_line(line: bytes) -> Any:
    """Decodes the row in a line. Returns a RowError if the line is invalid."""
    try:
        return read_json(line.decode())
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
        return RowError("not_utf8", "", found, "UTF-8 text")
    except json.JSONDecodeError as error:
        found = f"{show_json(error.doc[:40])} ({error.msg.removesuffix(' at')} at column {error.colno})"
        return RowError("not_json", "", found, "one JSON object on each line, or one JSON array in the file")


# ---- a JSON array ----------------------------------------------------------------------------------------------------


def array_rows(stream: Any) -> Iterator[Row]:
    """Yields the elements of a JSON array, up to the first invalid element."""
    number = 0
    try:
        for number, (value, raw) in enumerate(array_elements(stream), 1):
            yield number, value, raw
        return
    except UnicodeDecodeError as caught:
        error = RowError("not_utf8", "", f"byte 0x{caught.object[caught.start]:02x}", "UTF-8 text")
    except json.JSONDecodeError as caught:
        text = caught.doc[caught.pos :][:40]
        found = f"{show_json(text) if text else 'the end of the file'} ({caught.msg.removesuffix(' at')})"
        error = RowError("not_json", "", found, "one JSON array of objects, with a comma between them")
    error.rest = REST
    yield number + 1, error, b""


def array_elements(stream: Any) -> Iterator[tuple[Any, bytes]]:
    """Yields (value, bytes of the value) for each element. Raises JSONDecodeError and UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, position, block, final = "", 0, BLOCK, False
    due = "["  # the bracket or comma before the next element
    while True:
        match = NEXT.match(text, position)
        sign, begin = match[1], match.end()  # type: ignore[union-attr, index]
        if sign == "]" or (due == sign == "[" and text[begin : begin + 1] == "]"):
            extra = text[begin + (sign == "[") :].strip()
            while not extra and (data := stream.read(BLOCK)):  # gzip verifies the checksum at the end
                extra = data.decode("utf-8", "replace").strip()
            if extra:
                raise json.JSONDecodeError("text after the closing bracket", extra, 0)
            return
        if sign != due and begin < len(text):
            raise json.JSONDecodeError("missing comma before it", text, begin)
        try:
            value, end = read_value(text, begin)
        except json.JSONDecodeError as error:
            # An error far from the end of the buffer means invalid JSON. An error near the end may mean an incomplete element.
            if final or (error.pos < len(text) - 4096 and not error.msg.startswith("Unterminated")):
                raise
            data = stream.read1(block)
            final, block = not data, min(block * 2, ROW)
            text, position = text[position:] + decoder.decode(data, final=final), 0
            continue
        yield value, text[begin:end].encode("utf-8", "surrogatepass")
        position, due, block = end, ",", BLOCK


# ---- CSV and TSV: the first line names the columns, and every value is text ------------------------------------------


def delimited_rows(stream: Any, delimiters: str) -> Iterator[Row]:
    """Yields the rows below the header as {column: text}, each with the number of its first line.

    Blank lines are skipped, but count in the line numbers. If the header is unusable, yields only a RowError.
    """
    csv.field_size_limit(ROW)  # this limit applies to the whole process; the default is 128 KiB
    head = stream.peek(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n").partition(b"\n")[0]
    text = head.decode(errors="replace")
    # Column names may contain `|`, so `|` is a delimiter only if the header has no other delimiter.
    likely = max(delimiters, key=lambda sign: (sign in text and sign != "|", text.count(sign)))
    from_excel = re.fullmatch(r"sep=([,;|\t])\r?", text)  # Excel's first line
    delimiter = from_excel[1] if from_excel else likely
    lines = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        number, in_header = reader.line_num + 1, not names
        fault, raw, fields = None, b"", list[str]()
        try:
            fields = next(reader)
            raw = "\x1f".join([*names, *fields]).encode()
        except StopIteration:
            return
        except csv.Error as error:
            unclosed = "unexpected end" in str(error)
            found = "a quote that is not closed" if unclosed else str(error)
            expected = '"..." around values with a delimiter, quote or line end, and "" for a quote'
            rest = "all later lines" if unclosed else ""
            fault = RowError("not_csv", "", found, expected, rest=rest)
        except UnicodeEncodeError as error:  # the row has a byte that is not UTF-8, kept by `surrogateescape`
            expected = "UTF-8 text: run iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
            fault = RowError("not_utf8", "", f"byte 0x{ord(error.object[error.start]) & 0xFF:02x}", expected)
        else:
            if not fields or (in_header and from_excel and fields == ["sep=", ""]):
                continue
            if in_header:  # pandas writes an index column without a name
                names = [name or f"Unnamed: {index}" for index, name in enumerate(fields)]
                fault = repeated_column(names)
            elif len(fields) != len(names):
                columns = fields_of(names).replace("fields", "columns")
                expected = f"{len(names)}, because the header has {columns}"
                fault = RowError("ragged", "", f"{len(fields)} values", expected)
        if fault:
            yield number, fault, b""
            if in_header:
                return
        elif not in_header:
            yield number, dict(zip(names, fields, strict=True)), raw


def repeated_column(names: list[str]) -> RowError | None:
    if len(names) == len(set(names)):
        return None
    repeated = next(name for name in names if names.count(name) > 1)
    found = f"two columns with the name {show_json(repeated)}"
    return RowError("repeated_key", "", found, "unique column names in the header")
