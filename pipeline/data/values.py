"""Decodes JSON, rejects invalid values of rows, and formats values for error messages."""

import datetime
import decimal
import difflib
import itertools
import json
import re
import sys
import uuid
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

from pipeline.errors import escape_controls

Reason = tuple[str, str, str]  # (kind, field without indices, expected)


@dataclass(eq=False)
class RowError(Exception):
    """Describes what is wrong with a row.

    `kind` is the name of the error in the report. `field` is a path (`messages[0].role`), or "" if the error is not in one field.
    `line` is the number, from 1, of a line of a file, an element of a JSON array, or a row of a table, depending on `unit`.
    """

    kind: str
    field: str
    found: str
    expected: str
    file: str = ""
    line: int = 0
    unit: Literal["line", "element", "row"] = "line"
    # part of the file that cannot be read because of the error, or "" if reading continues with the next row
    rest: str = ""

    def reason(self) -> Reason:
        """Returns a key that is the same for errors of the same kind, even at different positions in a list."""
        return self.kind, re.sub(r"\d+", "*", self.field), self.expected

    def where(self) -> str:
        file = escape_controls(self.file, lines=False)
        return f"{file}: element {self.line}" if self.unit == "element" else f"{file}:{self.line}"

    def __str__(self) -> str:
        name = f"`{escape_controls(self.field, lines=False)}`: " if self.field else ""
        rest = f"; not read: {self.rest}" if self.rest else ""
        return f"{self.where()}: {name}found {self.found}; expected {self.expected}{rest}"

    # Pickle would call RowError with `args`, which a dataclass does not set.
    def __reduce__(self) -> tuple[Any, ...]:
        return RowError, astuple(self)


@dataclass(frozen=True)
class Dropped:
    """A row that is valid but is dropped, for example because it is too long or has no label."""

    reason: str
    error: RowError | None = field(default=None, compare=False)  # the error that the report shows for the row


def check_values(value: Any, name: str = "") -> None:
    """Raises RowError for a number that is not finite, or text that is not Unicode."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowError("not_utf8", name, "half a surrogate pair (\\ud8..)", "Unicode text") from None
    elif isinstance(value, float | int):
        if not abs(value) <= sys.float_info.max:
            raise RowError("not_finite", name, show_json(value), "a finite number")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_values(item, f"{name}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_values(key, name)
            check_values(item, f"{name}.{key[:60]}" if name else key[:60])


# An integer of 400 or more digits becomes an infinite float, which check_values rejects. int() raises ValueError above 4,300
# digits.
_JSON = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 400 else float(digits))
read_json = _JSON.decode  # f(text) -> value; raises JSONDecodeError
read_value = _JSON.raw_decode  # (text, begin) -> (value, end); raises JSONDecodeError


def parse_json(value: Any) -> Any:
    """Parses a JSON text. Returns any other value unchanged."""
    if isinstance(value, str):
        try:
            return read_json(value)
        except (ValueError, RecursionError):
            pass
    return value


def row_json(row: dict[str, Any]) -> str:
    """Returns a row as JSON, in which dates, decimals and bytes are text. Raises TypeError for objects of other types."""

    def as_text(value: Any) -> str:
        if isinstance(
            value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | uuid.UUID
        ):
            return str(value)
        if isinstance(value, bytes):
            return f"<{len(value):,} bytes>"
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")

    return json.dumps(row, ensure_ascii=False, default=as_text)


def as_json(row: dict[str, Any]) -> str:
    """Returns a row as JSON for Python rewards, with null for non-finite numbers and "?" for half a surrogate pair."""
    text = row_json(row).encode(errors="replace")
    return json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)


# ---- texts of errors -------------------------------------------------------------------------------------------


def some_keys(keys: Iterable[str]) -> list[str]:
    """Returns the keys with at most 60 characters among the first 50 keys, for a message."""
    return [key for key in itertools.islice(keys, 50) if len(key) <= 60]


def fields_of(keys: Iterable[str]) -> str:
    """Returns the names of a row's first fields, for a message."""
    return "fields " + escape_controls(", ".join(some_keys(keys)[:8]), lines=False) if keys else "no fields"


def suggest_key(name: str, keys: Iterable[str]) -> str:
    """Returns a question that suggests a key similar to `name`, or "" if no key is similar."""
    matches = difflib.get_close_matches(name, some_keys(keys), 1)
    return f" (is `{escape_controls(matches[0], lines=False)}` meant to be `{name}`?)" if matches else ""


def how_to_set(key: str, value: str) -> str:
    """Returns a text that sets a key to `value`: a command-line override or, for an entry of a list, a line for the job file."""
    section, _, name = key.rpartition(".")
    if section != "data":
        return f"`{name}: {value}` in the entry {section}"
    quote = '"' if "'" in value else "'"
    return f"{key}={quote}{value}{quote}"


def show_json(value: Any) -> str:
    """Returns a value for an error message, as JSON of at most 60 characters with escaped control characters."""
    shown = escape_controls(
        json.dumps(value[:60] if isinstance(value, str) else value, ensure_ascii=False, default=str)
    )
    return shown if len(shown) <= 60 else shown[:57] + "..."
