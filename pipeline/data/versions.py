"""Which registered versions wrote the rows: the column `version` of feedback and of collected rows, counted.

A row that comes from a model's conversation names who spoke, `models:/NAME/NUMBER`. Any other `version` is a column like others.
"""

from collections.abc import Mapping
from typing import Any

from pipeline.references import Ref

OTHERS = "others"  # in place of the rest


def of_row(row: Mapping[str, Any]) -> str | None:
    """The version that a row is from; None: it names none."""
    version = row.get("version")
    return version if isinstance(version, str) and Ref.parse(version).version else None


def add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    """Adds {version: rows} to other counts."""
    for version, rows in more.items():
        counts[version] = counts.get(version, 0) + rows


def most_frequent(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """The `most` versions with the most rows, those first; what further ones have is that of OTHERS."""
    ordered = sorted(counts.items(), key=lambda item: (item[0] == OTHERS, -item[1], item[0]))
    kept = dict(ordered[:most])
    if left := sum(rows for _, rows in ordered[most:]):
        kept[OTHERS] = kept.get(OTHERS, 0) + left
    return kept


def in_words(counts: Mapping[str, int], kept: int) -> str:
    """`300 rows from models:/demo-ppo/3, 12 without a version`, of so many rows that were kept."""
    named = [f"{counted(rows)} from {version}" for version, rows in most_frequent(counts, 8).items()]
    rest = kept - sum(counts.values())
    return ", ".join([*named, *([f"{rest:,} without a version"] if rest else [])])


def counted(rows: int) -> str:
    return f"{rows:,} row{'s' * (rows != 1)}"
