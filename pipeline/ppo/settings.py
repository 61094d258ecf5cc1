"""Checks of the settings dataclasses. A wrong value raises SettingError with its key, its value and the expected values."""

from __future__ import annotations

import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pipeline.errors import short
from pipeline.intervals import outside


class SettingError(ValueError):
    """The error of a setting's value; the text is `key: message`."""

    def __init__(self, key: str, message: str):
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


class Settings:
    """A dataclass whose values are checked when it is made: first their types, then their ranges, then combinations."""

    def _check_types(self) -> None:
        for key, hint in get_type_hints(type(self)).items():
            value = getattr(self, key)
            if not _fits(value, hint):
                raise SettingError(key, f"found {short(repr(value))}, expected {_spell(hint)}")
            if float in _options(hint) and type(value) is int:
                setattr(self, key, float(value))

    def _check_ranges(self, ranges: dict[str, str]) -> None:
        for key, allowed in ranges.items():
            value = getattr(self, key)
            expected = None if value is None else outside(value, allowed)
            self._require(key, expected is None, expected or "")

    def _require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise SettingError(key, f"found {short(repr(getattr(self, key)))}, expected {expected}")


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a union type, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Returns True if a value is of the annotated type; an int that a float holds counts as a float, a bool as no number."""
    for option in _options(hint):
        if get_origin(option) is Literal:
            if value in get_args(option) and isinstance(value, str):
                return True
        elif option is float:
            if (type(value) is int and abs(value) < 1 << 63) or (
                type(value) is float and math.isfinite(value)
            ):
                return True
        elif type(value) is (get_origin(option) or option):
            return True
    return False


def _spell(hint: Any) -> str:
    """Returns an annotated type in the words of an error message."""
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        dict: "a mapping",
        list: "a list",
        type(None): "null",
    }
    words = []
    for option in _options(hint):
        words += (
            [repr(v) for v in get_args(option)]
            if get_origin(option) is Literal
            else [names[get_origin(option) or option]]
        )
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else words[0]
