"""The rows of JSON Lines: the lines of a byte range or of a stream, each decoded by itself."""

import codecs
import io
import json
from collections.abc import Iterator
from typing import Any

from pipeline.data.formats.gunzip import damage_of, damaged
from pipeline.data.values import RowError, read_value, show, too_deep

BLOCK = 1 << 20  # bytes that are read at a time
ROW = 64 << 20  # bytes of the largest row: what has no end in sight is no row
BLANKS = " \t\r\n"  # JSON's white space

Row = tuple[int, Any, bytes]  # (number from 1, the decoded row or a RowError, its bytes)


def range_lines(raw: Any, start: int, stop: int) -> Iterator[bytes]:
    """The lines that begin in bytes [start, stop); the last is read to its end, or until it is too large for a row."""
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


def stream_lines(stream: io.BufferedReader) -> Iterator[bytes | RowError]:
    """The lines of a gzip stream, and the RowError of its damage if there is any."""
    while line := stream.readline(ROW + 1):
        if damage_of(stream):
            break  # the line is cut short, too
        yield line
        if len(line) > ROW:
            while line and not line.endswith(b"\n"):  # the rest of it is skipped
                line = stream.readline(ROW)
    if damage_of(stream):
        yield damaged(stream)


def rows_of(lines: Iterator[bytes | RowError]) -> Iterator[Row]:
    """The decoded rows of lines; empty lines are skipped, but counted."""
    for number, line in enumerate(lines, 1):
        if isinstance(line, RowError):
            yield number, line, b""
            continue
        if len(line) > ROW:
            yield number, too_large(), b""
            continue
        line = line.removeprefix(codecs.BOM_UTF8).strip()
        if line:
            yield number, decode(line), line


def decode(line: bytes) -> Any:
    """The row of a line, or a RowError."""
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


def too_large() -> RowError:
    return RowError("too_large", "", f"more than {ROW >> 20} MiB without an end of the row", "a smaller row")
