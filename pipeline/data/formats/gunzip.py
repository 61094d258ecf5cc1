"""Gzip streams of rows: damage becomes a RowError in place of the next row."""

import codecs
import gzip
import io
import zlib
from typing import Any

from pipeline.data.values import RowError


class Gunzip(io.RawIOBase):
    """A gzip stream that ends where it is damaged, with `.damage` saying how.

    The rows before the damage are read, so the error has a line number.
    """

    def __init__(self, raw: Any):
        self.raw, self.inner, self.damage = raw, gzip.GzipFile(fileobj=raw), ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.damage:
            return 0
        try:
            data = self.inner.read1(len(buffer))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.damage = f"ends too early ({error})"
            return 0
        buffer[: len(data)] = data
        return len(data)


def damage_of(stream: Any) -> str:
    return getattr(getattr(stream, "raw", None), "damage", "")


def damaged(stream: Any) -> RowError:
    return RowError(
        "truncated_gzip",
        "",
        f"a gzip file that {damage_of(stream)}",
        "a whole .gz file of rows",
        rest="all that follows",
    )


def peek_array(stream: io.BufferedReader) -> bool:
    return stream.peek(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
