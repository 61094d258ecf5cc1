"""What the cells of CSV, Parquet and Arrow hold that rows of JSON do not: numbers as text, and dates, bytes and decimals."""

from typing import Any

from pipeline.data.shapes import Kind
from pipeline.data.tools import decoded

DECODED = ("margin", "messages", "conversations")  # what a shape reads as a number or as a list
ALWAYS = {"input", "system", "tools"}  # what a row may have beside the fields of its shape


def as_json(row: Any, kind: Kind, format: str) -> Any:
    """A row with the values that a row of JSON has; what its file's format cannot say otherwise is made so.

    In CSV all is text: a field that a shape reads as a number or a list is read as JSON, and null where it is empty. Of a
    table's columns that no shape of the kind reads, what JSON has no word for becomes text, as which Python rewards get it. In
    a column that is read it stays, to be refused.
    """
    if not isinstance(row, dict):
        return row
    if format in ("csv", "tsv"):
        texts = {key: row[key] for key in DECODED if isinstance(row.get(key), str)}
        return row | {key: decoded(text) if text.strip() else None for key, text in texts.items()}
    if format in ("parquet", "arrow"):
        read = ALWAYS | kind.further | {field for needs in kind.shapes.values() for field in needs}
        return {key: value if key in read else jsonable(value) for key, value in row.items()}
    return row


def jsonable(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    return f"<{len(value):,} bytes>" if isinstance(value, bytes) else str(value)
