"""Text on the terminal: tables and numbers."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], rule: int = 160) -> str:
    """Returns aligned columns, with rules of at most `rule` characters around the header and at the end."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
    line = "-" * min(rule, max(map(len, lines)))
    return "\n".join([line, lines[0], line, *lines[1:], line])


def row(label: str, value: str) -> str:
    """Returns a line about a run: what it is, and its value."""
    return f"  {label:<24}{value}"


def number(value: float | None) -> str:
    """Returns a metric with three decimals, or "" for None."""
    return "" if value is None else f"{value:.3f}"
