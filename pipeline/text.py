"""Text on the terminal: tables and numbers."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "", rules: bool = False) -> str:
    """Returns rows as indented columns, or between rules of at most 160 characters.

    Args:
        sides: to which side each column is aligned, < or >; by default, all to the left.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    columns = [f"{side}{width}" for side, width in zip(sides or "<" * len(widths), widths, strict=True)]
    lines = ["  ".join(map(format, line, columns)).rstrip() for line in (header, *rows)]
    if not rules:
        return "\n".join(f"   {line}" for line in lines)
    rule = "-" * min(160, max(map(len, lines)))
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def row(label: str, value: str) -> str:
    """Returns a line about a run: what it is, and its value."""
    return f"  {label:<24}{value}"


def number(value: float | None) -> str:
    """Returns a metric with three decimals, or "" for None."""
    return "" if value is None else f"{value:.3f}"
