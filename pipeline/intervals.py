"""Allowed numbers of settings, as intervals and in words.

outside(1.5, "[0, 1)")                       -> "0 or more and below 1"
outside(7, "-1 or whole [1, 100]")           -> None, because 7 is allowed
"""

from __future__ import annotations

import math
import re


def outside(value: float, allowed: str) -> str | None:
    """Returns what `allowed` (numbers and intervals joined by ` or `) expects, in words, or None if `value` is in it.

    `whole [1, 9]` holds the whole numbers of the interval, 3.0 among them.
    """
    parts = allowed.split(" or ")
    return None if any(_holds(value, part) for part in parts) else " or ".join(map(_words, parts))


def table(rows: dict[str, str]) -> dict[str, str]:
    """Converts {interval: "key key ..."} to {key: interval}."""
    return {key: allowed for allowed, keys in rows.items() for key in keys.split()}


def bounds(part: str) -> tuple[str, float, float, str]:
    """Returns the brackets and ends of an interval: ("[", 0.0, 1.0, ")") for `[0, 1)`, ("[", 3.0, 3.0, "]") for `3`."""
    if match := re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", part.removeprefix("whole ")):
        return match[1], float(match[2]), float(match[3]), match[4]
    return "[", float(part), float(part), "]"


def _holds(value: float, part: str) -> bool:
    left, low, high, right = bounds(part)
    inside = low <= value <= high and (left, value) != ("(", low) and (right, value) != (")", high)
    return inside and (not part.startswith("whole") or value == int(value))


def _words(part: str) -> str:
    left, low, high, right = bounds(part)
    if low == high:
        return part
    whole = "a whole number " if part.startswith("whole") else ""
    if left == "[" and right == "]":
        return f"{whole}between {_number(low)} and {_number(high)}"
    start = f"{_number(low)} or more" if left == "[" else f"above {_number(low)}"
    end = f" and {'at most' if right == ']' else 'below'} {_number(high)}" if high < math.inf else ""
    return whole + start + end


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"  # {:g} would round the largest seed
