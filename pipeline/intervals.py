"""Allowed numbers of settings, as intervals and in words.

outside(1.5, "[0, 1)")                       -> "0 or more and below 1"
outside(7, "-1 or whole [1, 100]")           -> None, because 7 is allowed
"""

from __future__ import annotations

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


def _ends(interval: str) -> tuple[str, float, float, str]:
    match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval.removeprefix("whole "))
    assert match is not None, interval
    return match[1], float(match[2]), float(match[3]), match[4]


def _holds(value: float, part: str) -> bool:
    if part[0] not in "[(w":
        return value == float(part)
    left, low, high, right = _ends(part)
    inside = (low <= value if left == "[" else low < value) and (
        value <= high if right == "]" else value < high
    )
    return inside and (not part.startswith("whole") or value == int(value))


def _words(part: str) -> str:
    if part[0] not in "[(w":
        return part
    left, low, high, right = _ends(part)
    whole = "a whole number " if part.startswith("whole") else ""
    if left == "[" and right == "]":
        return f"{whole}between {_number(low)} and {_number(high)}"
    start = f"{_number(low)} or more" if left == "[" else f"above {_number(low)}"
    if high == float("inf"):
        return whole + start
    return f"{whole}{start} and {'at most' if right == ']' else 'below'} {_number(high)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"  # {:g} would round the largest seed
