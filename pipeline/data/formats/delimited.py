"""The rows of CSV and TSV: the first line names the columns, and every value is text.

Python's csv module reads them, not pyarrow's CSV reader: that one guesses types (a prompt `42` would become a number, and
differently from block to block) and counts a row of several lines as one, so that an error could not name its line.
"""

import codecs
import csv
import io
import re
from collections.abc import Iterator
from typing import Any

from pipeline.data.formats.lines import ROW, Row, stream_lines, too_large
from pipeline.data.values import RowError, fields_of, show, some

DELIMITERS = {"csv": ",;\t", "tsv": "\t"}  # of a file of this format, the likeliest first


# The first line that Excel takes the delimiter from; it is no header.
SEPARATOR = re.compile(rb"sep=(.)\r?\n?$")


class _Lines:
    """Lines as text for csv.reader, which reads as many as a row has; `number` is that of the last one."""

    def __init__(self, lines: Iterator[bytes | RowError]):
        self.lines, self.number = lines, 0
        self.error: RowError | None = None  # of the lines of this row

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = next(self.lines)
        self.number += 1
        if isinstance(line, RowError):  # a damaged gzip stream: it has no further lines
            self.error = line
            raise StopIteration
        if len(line) > ROW:
            self.error = too_large()
            return ""
        if self.number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if SEPARATOR.match(line):
                return next(self)
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            found = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of line {self.number}"
            expected = "UTF-8 text (of Windows: iconv -f WINDOWS-1252 -t UTF-8; Excel saves as CSV UTF-8)"
            self.error = RowError("not_utf8", "", found, expected)
            return line.decode(errors="replace")


def delimited_rows(stream: io.BufferedReader, format: str) -> Iterator[Row]:
    """The rows below the header as {column: text}, each with the number of the line on which it begins.

    A header that cannot be used is a RowError in line 1, and ends the file. Blank lines are skipped, but counted.
    """
    csv.field_size_limit(ROW)  # of the process; the default is 128 KiB
    lines = _Lines(stream_lines(stream))
    reader = csv.reader(lines, delimiter=delimiter_of(stream, format), strict=True)
    names: list[str] = []
    while True:
        number, lines.error = lines.number + 1, None
        fields, problem = _next(reader)
        if error := lines.error or problem:
            yield number, error, b""
            if not names or lines.number < number or error.kind == "truncated_gzip":
                return
        elif fields is None:
            return
        elif not names:
            names = columns(fields)
            if error := header_error(names):
                yield number, error, b""
                return
        elif len(fields) == len(names):
            yield number, dict(zip(names, fields, strict=True)), "\x1f".join([*names, *fields]).encode()
        elif fields:
            count = f"{len(fields)} value{'s' * (len(fields) != 1)}"
            expected = (
                f"{len(names)}, as the header has {fields_of(some(names)).replace('fields', 'columns')}"
            )
            yield number, RowError("ragged", "", count, expected), b""


def _next(reader: Any) -> tuple[list[str] | None, RowError | None]:
    """(the values of the next row, None: there is none; what is wrong with it)."""
    try:
        return next(reader), None
    except StopIteration:
        return None, None
    except csv.Error as error:
        if "field larger" in str(error):
            return None, too_large()
        unclosed = "unexpected end" in str(error)
        found = "a quote that is not closed" if unclosed else str(error)
        expected = (
            'values with a delimiter, a quote or a line end in them in "...", and a quote in these as ""'
        )
        return None, RowError(
            "not_csv", "", found, expected, rest="the lines from here on" if unclosed else ""
        )


def delimiter_of(stream: io.BufferedReader, format: str) -> str:
    """What separates the columns: what a line `sep=;` says, else that which makes the most of the first line."""
    head = stream.peek(1 << 16)
    if said := SEPARATOR.match(head.removeprefix(codecs.BOM_UTF8).partition(b"\n")[0]):
        return said[1].decode("latin-1")
    first = head.decode(errors="replace").lstrip("\ufeff\r\n").partition("\n")[0]

    def count(delimiter: str) -> int:
        try:
            return max((len(fields) for fields in csv.reader([first], delimiter=delimiter)), default=0)
        except csv.Error:  # the rows will say what is wrong
            return 0

    return max(DELIMITERS[format], key=count)


def columns(header: list[str]) -> list[str]:
    """The names of the columns; one without a name, such as the index that pandas writes, gets the name that pandas gives it."""
    return [name or f"Unnamed: {index}" for index, name in enumerate(header)]


def header_error(names: list[str]) -> RowError | None:
    twice = next((name for name in names if names.count(name) > 1), None) if len(names) < 10_000 else None
    if twice is None:
        return None
    return RowError(
        "repeated_key", "", f"two columns of the name {show(twice)}", "each name once in the header"
    )
