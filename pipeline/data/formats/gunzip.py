"""Gzip streams of rows: damage, and streams that unpack to nothing, become a RowError in place of the next row."""

import codecs
import gzip
import io
import zlib
from typing import Any

from pipeline.data.values import RowError

BARREN = 128 << 20  # unpacked bytes without a row, twice those of the largest row: what follows is not read


class Gunzip(io.RawIOBase):
    """A gzip stream that ends where it is damaged, with `.damage` saying how.

    The rows before the damage are read, so the error has a line number. A stream may unpack to a thousand times its size,
    as repeated rows do; but only to BARREN bytes without a row: the reader sets `barren` to 0 at each row.
    """

    def __init__(self, raw: Any):
        self.raw, self.inner, self.damage, self.barren = raw, gzip.GzipFile(fileobj=raw), "", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.damage:
            return 0
        try:
            data = self.inner.read1(len(buffer))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.damage = f"breaks off here ({error})"
            return 0
        self.barren += len(data)
        if self.barren > BARREN:
            self.damage = f"unpacks to {BARREN >> 20} MiB without a row"
            return 0
        buffer[: len(data)] = data
        return len(data)


def damage_of(stream: Any) -> str:
    return getattr(getattr(stream, "raw", None), "damage", "")


def damaged(stream: Any) -> RowError:
    return RowError(
        "truncated_gzip",
        "",
        f"a gzip stream that {damage_of(stream)}",
        "a whole .gz file of rows",
        rest="all that follows",
    )


def peek_array(stream: io.BufferedReader) -> bool:
    return stream.peek(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
