"""Splits files into chunks, one for each task, and reads the rows of a chunk. This module does not use Ray.

A chunk is a byte range of an uncompressed JSON Lines file, or a range of rows of a Parquet or Arrow file. Compressed files, JSON
arrays and CSV files are one chunk each, because the rows of a CSV file may contain line ends. The rows of a chunk are read one
after another, so at most one chunk is in memory.
"""

import codecs
import itertools
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.data.files import File, open_bytes, unreadable_file
from pipeline.data.formats import Kind
from pipeline.data.table_rows import split_table_file, table_rows
from pipeline.data.text_rows import BLOCK, Row, text_rows
from pipeline.data.values import RowError, fields_of
from pipeline.errors import InputError, escape_controls
from pipeline.system import storage

CHUNK = 4 << 20  # bytes of a chunk; a worker needs about 50 times this amount of memory


Format = Literal["lines", "array", "csv", "tsv", "parquet", "arrow"]
NAMED: dict[str, Format] = {
    ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow",
}  # fmt: skip
UNITS: dict[str, Literal["element", "row"]] = {"array": "element", "parquet": "row", "arrow": "row"}
MAGIC: dict[bytes, Format] = {b"PAR1": "parquet", b"ARRO": "arrow"}
# {pattern for the first bytes of an unsupported file: its format, and how to convert the file}
FOREIGN = {
    b"PK\x03\x04": "an Excel workbook or another zip archive; save its sheet as CSV UTF-8, or unpack it",
    b"\xd0\xcf\x11\xe0": "an Excel workbook in the old .xls format; save its sheet as CSV UTF-8",
    rb"\(\xb5/\xfd|BZh|\xfd7zXZ": "compressed in an unsupported format; unpack it, or compress it with gzip",
    b"\x80[\x02-\x05]": "a pickle; save its rows as JSON Lines or Parquet",
    b"\xff\xfe|\xfe\xff": "UTF-16 text; run iconv -f UTF-16 -t UTF-8 FILE > NEW",
    rb"\s*\{\s*\n": "JSON with objects that span several lines; run jq -c . FILE > NEW, or jq -c '.data[]' if the rows are in `data`",
}


@dataclass(frozen=True)
class FileChunk:
    """The part of a file that one task reads: bytes [start, stop) of JSON Lines, or rows [start, stop) of Parquet or Arrow."""

    path: str
    split: str  # train or eval
    start: int = 0
    stop: int = -1  # -1 means the end of the file
    format: Format = "lines"
    zipped: bool = False
    size: int = 0  # approximate bytes of the chunk in the file
    source: int = 0  # index of the file's source among the job's sources for the split
    group_by: str | None = None  # column that has the same value in all rows of a group


def plan_chunks(file: File, split: str, kind: Kind, chunk_bytes: int = CHUNK) -> list[FileChunk]:
    """Returns the chunks of a file, in order. Reads only the first bytes of the file, and the metadata of Parquet and Arrow."""
    path, group_by = storage.absolute(file.path), kind.preprocess.group_by
    name = path.lower()
    try:
        with open_bytes(file.path) as stream:
            head = stream.read(BLOCK // 4)
    except OSError as error:  # some file systems can open a folder but not read it
        raise unreadable_file(file.path, error) from error
    zipped = head[:2] == b"\x1f\x8b" or name.endswith(".gz")
    if zipped:
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, 4096)
        except zlib.error:  # the task that reads the file reports the error
            head = b""
    start = head.removeprefix(codecs.BOM_UTF8)
    for pattern, description in FOREIGN.items():
        if re.match(pattern, start):
            raise InputError(f"data: {escape_controls(file.path, lines=False)} is {description}")
    text_format: Format = "array" if start.lstrip()[:1] == b"[" else "lines"
    format = NAMED.get(os.path.splitext(name.removesuffix(".gz"))[1]) or MAGIC.get(head[:4]) or text_format
    parts = [(0, -1, file.size)]  # (start, stop, bytes). If data.group_by is set, the file is one chunk.
    if format in ("parquet", "arrow") and not group_by:
        parts = split_table_file(path, format, file.size, chunk_bytes)
    elif format == "lines" and not zipped:
        step = max(file.size, 1) if group_by else chunk_bytes
        starts = range(0, max(file.size, 1), step)
        parts = [(start, stop, stop - start) for start in starts for stop in [min(start + step, file.size)]]
    return [
        FileChunk(path, split, start, stop, format, zipped, size, file.source, group_by)
        for start, stop, size in parts
    ]


# ---- rows of a chunk -------------------------------------------------------------------------------------------


def chunk_rows(chunk: FileChunk) -> Iterator[Row]:
    """Returns the rows of a chunk with their numbers *in the chunk*. If data.group_by is set, returns lists of rows.

    Blank lines count in the row numbers, but are not returned. For a row that cannot be decoded, returns a RowError instead of
    the row.
    """
    if chunk.format in ("parquet", "arrow"):
        rows = table_rows(chunk.path, chunk.format, chunk.start, chunk.stop)
    else:
        rows = text_rows(chunk.path, chunk.format, chunk.zipped, chunk.start, chunk.stop)
    return group_rows(rows, chunk.group_by) if chunk.group_by else rows


def group_rows(numbered: Iterator[Row], column: str) -> Iterator[Row]:
    """Yields lists of consecutive rows with the same value in a column, each with the number of its first row."""

    def value(row: Row) -> Any:
        has_value = isinstance(row[1], dict) and column in row[1]
        return (row[1][column],) if has_value else row[0]  # a row without this column becomes its own group

    for _, members in itertools.groupby(numbered, value):
        numbers, group, raws = zip(*members, strict=True)
        row: Any = list(group)
        if not isinstance(row[0], dict):
            row = row[0]
        elif column not in row[0]:
            found = fields_of(row[0])
            row = RowError("missing_field", column, found, "the column in data.group_by")
        yield numbers[0], row, b"\n".join(raws)


def lines_before(chunk: FileChunk) -> int:
    """Returns how many lines or rows of the file come before the chunk. Only error messages use this number."""
    if chunk.start == 0 or chunk.format != "lines":
        return chunk.start
    count, remaining = 1, chunk.start - 1
    with open_bytes(chunk.path) as file:
        while remaining and (data := file.read(min(remaining, BLOCK))):
            count, remaining = count + data.count(b"\n"), remaining - len(data)
    return count


def locate_errors(errors: list[RowError], chunk: FileChunk) -> None:
    """Sets `file` and `unit` of errors, and converts `line` from a line number in the chunk to a line number in the file."""
    file, offset = storage.relative(chunk.path), lines_before(chunk)
    for error in errors:
        error.file, error.line, error.unit = file, error.line + offset, UNITS.get(chunk.format, "line")
