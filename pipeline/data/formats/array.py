"""The rows of a JSON array, read block by block, so that memory holds one row and not the file.

Not ijson (3.6.0 tried, no faster): a NaN or an integer over 64 bits ends the file without naming its row, one of two
equal keys is dropped silently, half surrogate pairs are replaced, deep nesting takes gigabytes, and the bytes of a row,
by which duplicates are counted, are gone.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from pipeline.data.formats.gunzip import damage_of, damaged
from pipeline.data.formats.lines import BLANKS, BLOCK, ROW, Row, too_large
from pipeline.data.values import RowError, read_value, show, too_deep

BLANK = re.compile(f"[{BLANKS}]*")


def elements(stream: Any) -> Iterator[Row]:
    """The elements of the array in `stream`; what is not JSON ends the file, as a RowError in place of the next row."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, number, block, final = "", 0, 0, BLOCK, False
    read = 0  # bytes
    last = ""  # what has been read last: "[", "element" or ","
    while True:
        at = BLANK.match(text, at).end()  # type: ignore[union-attr]
        char = text[at : at + 1]
        if char and not last:
            last, at = "[", at + 1  # the caller has seen the bracket
            continue
        if char == "]" and last != ",":
            yield from behind_array(stream, text[at + 1 :], number)
            return
        if char == "," and last == "element":
            last, at = ",", at + 1
            continue
        if char and (char in ",]" or last == "element"):
            previous = {"[": "the bracket", "element": "an element", ",": "a comma"}[last]
            found = f"{show(text[at : at + 40])} behind {previous}"
            expected = "elements with one comma between them"
            yield number + 1, RowError("not_json", "", found, expected, rest=behind(read, text[at:])), b""
            return
        element = element_at(text, at, final)
        if isinstance(element, tuple):
            number, last = number + 1, "element"
            value, stop = element
            yield number, value, text[at:stop].encode("utf-8", "surrogatepass")
            at, block = stop, BLOCK
            continue
        if element is not None:
            error = damaged(stream) if damage_of(stream) else element
            error.rest = error.rest or behind(read, text[at:])
            yield number + 1, error, b""
            return
        data = stream.read(block)
        read += len(data)
        final, block = not data, min(block * 2, ROW >> 2)
        try:
            text, at = text[at:] + decoder.decode(data, final=final), 0
        except UnicodeDecodeError as caught:
            found = f"byte 0x{caught.object[caught.start]:02x}"
            rest = behind(read - len(caught.object), "")
            yield number + 1, RowError("not_utf8", "", found, "UTF-8 text", rest=rest), b""
            return


def behind(read: int, left: str) -> str:
    """What is not read of an array, of which `read` bytes are, `left` at their end being of no use."""
    return f"all from byte {read - len(left.encode('utf-8', 'surrogatepass')) + 1:,} on"


def element_at(text: str, at: int, final: bool) -> tuple[Any, int] | RowError | None:
    """(value, its end) of the element that begins at `at`, or what is wrong with it; None: more text is to be read.

    `final` says that `text` ends where the file does.
    """
    expected = "a JSON array of objects"
    if at == len(text):
        return RowError("not_json", "", "the array is not closed", expected) if final else None
    try:
        return read_value(text, at)
    except RecursionError:
        return too_deep()
    except json.JSONDecodeError as error:
        # An error well inside the text is real; one near its end may only mean that more is to be read.
        if final or (error.pos < len(text) - 4096 and not error.msg.startswith("Unterminated")):
            return RowError("not_json", "", f"{show(text[at : at + 40])} ({error.msg})", expected)
    return too_large() if len(text) - at > ROW else None


def behind_array(stream: Any, rest: str, number: int) -> Iterator[Row]:
    """A RowError if something stands behind the closing bracket or the gzip stream is damaged, else nothing."""
    extra = rest.strip()
    while data := stream.read(BLOCK):
        extra = extra or data.decode("utf-8", "replace").strip()
    if damage_of(stream):
        yield number + 1, damaged(stream), b""
    elif extra:
        found = f"{show(extra[:40])} behind the closing bracket"
        yield number + 1, RowError("not_json", "", found, "one JSON array in the file"), b""
