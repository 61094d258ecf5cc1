"""Formats tables and numbers as text."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], sides: str = "") -> str:
    """Returns lines with aligned columns. `sides` has < (left) or > (right) for each column. By default, all columns are <."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    columns = [f"{side}{width}" for side, width in zip(sides or "<" * len(widths), widths, strict=True)]
    return "\n".join("   " + "  ".join(map(format, line, columns)).rstrip() for line in (header, *rows))


def row(label: str, value: str) -> str:
    """Returns a line with a label and an aligned value. A space separates the value from a long label."""
    return f"  {label:<23} {value}"


def number(value: float | None) -> str:
    """Returns a number with three significant digits, or "" for None. Only very small and very large numbers have an exponent."""
    if value is None:
        return ""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.1e}"
