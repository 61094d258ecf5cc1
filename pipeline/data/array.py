"""The rows of a JSON array, read block by block, so that memory holds one row and not the file.

Not ijson (3.6.0 tried, no faster): a NaN or an integer over 64 bits ends the file without naming its row, one of two
equal keys is dropped silently, half surrogate pairs are replaced, deep nesting takes gigabytes, and the bytes of a row,
by which duplicates are counted, are gone.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from pipeline.data.gunzip import damage_of, damaged
from pipeline.data.lines import BLANKS, BLOCK, ROW, Row, too_large
from pipeline.data.values import RowError, read_value, show, too_deep

BLANK = re.compile(f"[{BLANKS}]*")


def elements(stream: Any, digest: "hashlib._Hash") -> Iterator[Row]:
    """The elements of the array in `stream`; what is not JSON ends the file, as a RowError in place of the next row."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, number, ended, block = "", 0, 0, False, BLOCK
    opened, last = False, ""
    while True:
        at = BLANK.match(text, at).end()  # type: ignore[union-attr]
        char = text[at : at + 1]
        if opened and char == "]" and last != ",":
            yield from behind_array(stream, text[at + 1 :], number, digest)
            return
        if char and not opened:
            opened, at = True, at + 1  # the caller has seen the bracket
            continue
        if char and char == "," * (last == "element"):
            last, at = ",", at + 1
            continue
        if (char and char in (",", "]")) or (char and last == "element"):
            previous = "a comma" if last == "," else "an element" if number else "the bracket"
            found = f"{show(text[at : at + 40])} behind {previous}"
            yield number + 1, RowError("not_json", "", found, "elements with one comma between them"), b""
            return
        value, stop, failure, error = None, -1, "the array is not closed", None
        if char:
            try:
                value, stop = read_value(text, at)
            except RecursionError:
                ended, error = True, too_deep()
            except json.JSONDecodeError as caught:
                failure = f"{show(text[at : at + 40])} ({caught.msg})"
                # An error well inside the text is real; one near its end may only mean that more is to be read.
                ended = ended or (caught.pos < len(text) - 4096 and not caught.msg.startswith("Unterminated"))
        if stop >= 0:
            number, last = number + 1, "element"
            yield number, value, text[at:stop].encode("utf-8", "surrogatepass")
            at, block = stop, BLOCK
            continue
        if not ended and len(text) - at > ROW:
            ended, error = True, too_large()
        if ended:
            error = damaged(stream) if damage_of(stream) else error
            error = error or RowError("not_json", "", failure, "a JSON array of objects")
            error.expected += "; what stands behind it was not read"
            yield number + 1, error, b""
            return
        data = stream.read(block)
        digest.update(data)
        ended, block = not data, min(block * 2, ROW >> 2)
        try:
            text, at = text[at:] + decoder.decode(data, final=ended), 0
        except UnicodeDecodeError as caught:
            found = f"byte 0x{caught.object[caught.start]:02x}"
            yield number + 1, RowError("not_utf8", "", found, "UTF-8 text"), b""
            return


def behind_array(stream: Any, rest: str, number: int, digest: "hashlib._Hash") -> Iterator[Row]:
    """A RowError if something stands behind the closing bracket or the gzip stream is damaged, else nothing."""
    extra = rest.strip()
    while data := stream.read(BLOCK):
        digest.update(data)
        extra = extra or data.decode("utf-8", "replace").strip()
    if damage_of(stream):
        yield number + 1, damaged(stream), b""
    elif extra:
        found = f"{show(extra[:40])} behind the closing bracket"
        yield number + 1, RowError("not_json", "", found, "one JSON array in the file"), b""
