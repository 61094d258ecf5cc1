"""data.transform: a Python function of the job's own that makes rows of rows, before data.columns and the shapes.

    def pairs(row):                       # data.transform: python:my_rows:pairs
        return {"prompt": row["q"], "chosen": row["answers"][0], "rejected": row["answers"][1]}

It returns a row, several as a list (or yields them), or None to leave the row out. It is called once for each row, in any
process and order, so its result depends on the row alone. With data.group_by it gets the list of all rows in succession
that have the same value in this column, such as those of a tree or a prompt.
"""

import datetime
import decimal
import importlib
import json
import traceback
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from pipeline.data.encode import Dropped
from pipeline.data.values import RowError, show, type_name
from pipeline.errors import in_brief
from pipeline.system.functions import parts

EXPECTED = "a row (dict), a list of rows, or None to leave it out"


@cache
def function(source: str) -> Callable[[Any], Any]:
    """The function of `python:module:function`; runtime.inputs has proved that it can be imported."""
    module, name = parts(source)
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def transformed(row: Any, source: str) -> Iterator[Any]:
    """The rows that the function makes of a row, or of the list of those of a group: each a row or Dropped.

    Raises:
        RowError: when it raises, or returns what is no row.
    """
    try:
        made = function(source)(row)
        made = list(made) if isinstance(made, list | tuple | types.GeneratorType) else [made]
    except Exception as error:
        found = f"{in_brief(error)}{_place(error)}"
        raise RowError("transform", "", found, f"{EXPECTED}, from {source}") from None
    if not made or (len(made) == 1 and made[0] is None):
        yield Dropped("left_out")
        return
    for one in made:
        yield _row(one, source)


def _row(made: Any, source: str) -> dict[str, Any]:
    """A row as JSON has it: with keys of text, and without tuples."""
    try:
        if isinstance(made, dict):
            return json.loads(json.dumps(made, default=_cell))  # type: ignore[no-any-return]
        found = f"{type_name(made)} {show(made)}"
    except (TypeError, ValueError, RecursionError) as error:
        found = f"a row that is not JSON ({in_brief(error, 100)})"
    raise RowError("transform", "", f"{found} returned by {source}", EXPECTED)


def _cell(value: Any) -> str:
    """What a Parquet column may hold beside the values of JSON, as text."""
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _place(error: BaseException) -> str:
    """Where it was raised: the last frame that is not the pipeline's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
