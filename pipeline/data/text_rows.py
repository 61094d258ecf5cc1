"""The rows of JSON Lines, of a JSON array, and of CSV or TSV, gzipped or not. Memory holds one row, not the file.

A RowError replaces a row that cannot be read.

Not ijson (3.6.0 tried, no faster): a NaN or an integer over 64 bits ends the file without naming its row, half surrogate
pairs are replaced, and the bytes of a row, by which duplicates are counted, are gone. Not pyarrow's CSV reader: it guesses
types (a prompt `42` becomes a number in some blocks), and its line numbers are wrong behind a row of several lines.
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

from pipeline.data.values import RowError, fields_of, read_value, show, some, too_deep

BLOCK = 1 << 20  # bytes that are read at a time
ROW = 64 << 20  # bytes of the largest row
BLANKS = " \t\r\n"  # JSON's white space
BLANK = re.compile(f"[{BLANKS}]*")
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)  # errors of a damaged gzip stream
DELIMITERS = {"csv": ",;\t", "tsv": "\t"}  # delimiters of each format, the likeliest first

Row = tuple[int, Any, bytes]  # (number from 1, the decoded row or a RowError, its bytes)


def text_rows(raw: Any, format: str, zipped: bool, start: int = 0, stop: int = -1) -> Iterator[Row]:
    """Yields the rows of an open file; of uncompressed JSON Lines those that begin in bytes [start, stop).

    Args:
        format: lines, array, csv or tsv.
    """
    if format == "lines" and not zipped:
        return json_rows(range_lines(raw, start, stop))
    stream: Any = gzip.GzipFile(fileobj=raw) if zipped else io.BufferedReader(raw, BLOCK)
    if format in DELIMITERS:
        return delimited_rows(stream, format)
    return array_rows(stream) if format == "array" else json_rows(stream_lines(stream))


def truncated(error: Exception) -> RowError:
    found = f"a gzip file that ends too early ({error})"
    return RowError("truncated_gzip", "", found, "a complete .gz file of rows", rest="all that follows")


def too_large() -> RowError:
    return RowError("too_large", "", f"more than {ROW >> 20} MiB without an end of the row", "a smaller row")


# ---- JSON Lines ------------------------------------------------------------------------------------------------------


def range_lines(raw: Any, start: int, stop: int) -> Iterator[bytes]:
    """Yields the lines that begin in bytes [start, stop). The last is read to its end, or until it is too large for a row."""
    at = max(start - 1, 0)
    raw.seek(at)
    data = raw.read(stop - at)
    if start:
        cut = data.find(b"\n") + 1
        if not cut:
            return
        data = data[cut:]
    if not data:
        return
    last, tail = len(data) - data.rfind(b"\n") - 1, [data]
    while not tail[-1].endswith(b"\n") and last <= ROW and (more := raw.read(BLOCK // 16)):
        end = more.find(b"\n") + 1
        tail.append(more[:end] if end else more)
        last += len(tail[-1])
    data = b"".join(tail) if len(tail) > 1 else data
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        yield data[at:end]
        at = end + 1


def stream_lines(stream: Any) -> Iterator[bytes]:
    """Yields the lines of a stream. A line that is too large for a row is cut. Raises DAMAGE."""
    while line := stream.readline(ROW + 1):
        yield line
        if len(line) > ROW:
            while line and not line.endswith(b"\n"):  # the rest of the line is skipped
                line = stream.readline(ROW)


def json_rows(lines: Iterator[bytes]) -> Iterator[Row]:
    """Yields the decoded rows of lines. Empty lines are skipped, but counted."""
    number = 0
    try:
        for number, line in enumerate(lines, 1):
            if len(line) > ROW:
                yield number, too_large(), b""
            elif line := line.removeprefix(codecs.BOM_UTF8).strip():
                yield number, decode(line), line
    except DAMAGE as error:
        yield number + 1, truncated(error), b""


def decode(line: bytes) -> Any:
    """Returns the row of a line, or a RowError."""
    try:
        text = line.decode("utf-8").strip(BLANKS)
        row, end = read_value(text)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return row
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
        return RowError("not_utf8", "", found, "UTF-8 text")
    except json.JSONDecodeError as error:
        found = f"{show(error.doc[:40])} ({error.msg} at column {error.colno})"
        return RowError("not_json", "", found, "one JSON object on each line, or one JSON array in the file")
    except RecursionError:
        return too_deep()


# ---- a JSON array ----------------------------------------------------------------------------------------------------


def array_rows(stream: Any) -> Iterator[Row]:
    """Yields the elements of an array, up to the first that is not JSON."""
    number = 0
    try:
        for number, (value, raw) in enumerate(elements(stream), 1):
            yield number, value, raw
        return
    except RowError as caught:
        error = caught
    except UnicodeDecodeError as caught:
        error = RowError("not_utf8", "", f"byte 0x{caught.object[caught.start]:02x}", "UTF-8 text")
    except DAMAGE as caught:
        error = truncated(caught)
    error.rest = "all that follows"
    yield number + 1, error, b""


def elements(stream: Any) -> Iterator[tuple[Any, bytes]]:
    """Yields (value, its bytes) of each element. Raises RowError, UnicodeDecodeError and DAMAGE."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, block, final = "", 0, BLOCK, False
    last = ""  # the previous token: a bracket, an element, or a comma
    while True:
        at = BLANK.match(text, at).end()  # type: ignore[union-attr]
        char = text[at : at + 1]
        if char == "[" and not last:
            last, at = "the bracket", at + 1
        elif char == "]" and last != "a comma":
            check_end(stream, text[at + 1 :])
            return
        elif char == "," and last == "an element":
            last, at = "a comma", at + 1
        elif char and (char in ",]" or last == "an element"):
            found = f"{show(text[at : at + 40])} after {last}"
            raise RowError("not_json", "", found, "elements with one comma between them")
        elif element := element_at(text, at, final):
            value, stop = element
            yield value, text[at:stop].encode("utf-8", "surrogatepass")
            last, at, block = "an element", stop, BLOCK
        else:
            data = stream.read1(block)
            final, block = not data, min(block * 2, ROW >> 2)
            text, at = text[at:] + decoder.decode(data, final=final), 0


def element_at(text: str, at: int, final: bool) -> tuple[Any, int] | None:
    """Returns (value, its end) of the element that begins at `at`, or None if more text is to be read.

    `final` says that `text` ends where the file does. Raises RowError for what is not JSON.
    """
    expected = "a JSON array of objects"
    if at == len(text):
        if final:
            raise RowError("not_json", "", "the array is not closed", expected)
        return None
    try:
        return read_value(text, at)
    except RecursionError:
        raise too_deep() from None
    except json.JSONDecodeError as error:
        # An error well inside the text is real; one near its end may only mean that more is to be read.
        if final or (error.pos < len(text) - 4096 and not error.msg.startswith("Unterminated")):
            raise RowError("not_json", "", f"{show(text[at : at + 40])} ({error.msg})", expected) from None
    if len(text) - at > ROW:
        raise too_large()
    return None


def check_end(stream: Any, text: str) -> None:
    """Raises RowError if there is text after the closing bracket; reads a gzip stream to its end."""
    extra = text.strip()
    while data := stream.read(BLOCK):
        extra = extra or data.decode("utf-8", "replace").strip()
    if extra:
        found = f"{show(extra[:40])} after the closing bracket"
        raise RowError("not_json", "", found, "one JSON array in the file")


# ---- CSV and TSV: the first line names the columns, and every value is text ------------------------------------------


def delimited_rows(stream: Any, format: str) -> Iterator[Row]:
    """Yields the rows below the header as {column: text}, each with the number of its first line.

    A header that cannot be used is a RowError in line 1, and ends the file. Blank lines are skipped, but counted.
    """
    last, error = (
        0,
        None,
    )  # the number of the last line that was read, and what is wrong with a line of this row

    def lines() -> Iterator[str]:
        nonlocal last, error
        try:
            for last, line in enumerate(stream_lines(stream), 1):
                if len(line) > ROW:
                    line, error = b"", too_large()
                try:
                    yield (line.removeprefix(codecs.BOM_UTF8) if last == 1 else line).decode()
                except UnicodeDecodeError as wrong:
                    found = f"byte 0x{line[wrong.start]:02x} at position {wrong.start + 1} of line {last}"
                    expected = "UTF-8 text: run iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
                    error = RowError("not_utf8", "", found, expected)
                    yield line.decode(errors="replace")
        except DAMAGE as damage:
            error = truncated(damage)

    csv.field_size_limit(ROW)  # applies to the process; the default is 128 KiB
    reader = csv.reader(lines(), delimiter=delimiter_of(stream, format), strict=True)
    names: list[str] = []
    while True:
        number, error = last + 1, None
        fields, problem = _next(reader)
        if wrong := error or problem:
            yield number, wrong, b""
            if not names or last < number or wrong.kind == "truncated_gzip":
                return
        elif fields is None:
            return
        elif not names:  # pandas names its index column like this
            names = [name or f"Unnamed: {index}" for index, name in enumerate(fields)]
            if repeated := repeated_column(names):
                yield number, repeated, b""
                return
        elif len(fields) == len(names):
            yield number, dict(zip(names, fields, strict=True)), "\x1f".join([*names, *fields]).encode()
        elif fields:
            found = f"{len(fields)} value{'s' * (len(fields) != 1)}"
            columns = fields_of(some(names)).replace("fields", "columns")
            expected = f"{len(names)}, as the header has {columns}"
            yield number, RowError("ragged", "", found, expected), b""


def _next(reader: Any) -> tuple[list[str] | None, RowError | None]:
    """Returns (the values of the next row, or None at the end; what is wrong with the row)."""
    try:
        return next(reader, None), None
    except csv.Error as error:
        if "field larger" in str(error):
            return None, too_large()
        unclosed = "unexpected end" in str(error)
        found = "a quote that is not closed" if unclosed else str(error)
        expected = 'values with a delimiter, a quote or a line end in "...", and a quote in these as ""'
        rest = "the lines from here on" if unclosed else ""
        return None, RowError("not_csv", "", found, expected, rest=rest)


def delimiter_of(stream: Any, format: str) -> str:
    """Returns the delimiter that the first line has most often."""
    try:
        head = stream.peek(1 << 16).removeprefix(codecs.BOM_UTF8)
    except DAMAGE:  # reading the rows reports it
        return DELIMITERS[format][0]
    first = head.decode(errors="replace").lstrip("\r\n").partition("\n")[0]
    return max(DELIMITERS[format], key=first.count)


def repeated_column(names: list[str]) -> RowError | None:
    if len(names) == len(set(names)):
        return None
    twice = next(name for name in names if names.count(name) > 1)
    found = f"two columns of the name {show(twice)}"
    return RowError("repeated_key", "", found, "each name once in the header")
