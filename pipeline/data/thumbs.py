"""Thumbs: a prompt, a completion, and whether it is desirable. Rows -> Records.

A preference pair is two thumbs: its chosen completion is desirable, its rejected one is not.
"""

from typing import Any

from pipeline.data import demonstrations, preferences
from pipeline.data.record import Record
from pipeline.data.values import RowError, show

SHAPES = {
    f"{shape}+{label}": (*fields, label)
    for label in ("label", "kto_tag")
    for shape, fields in demonstrations.SHAPES.items()
} | preferences.SHAPES

# ---- row -> Record ---------------------------------------------------------------------------------------------


def parse(row: dict[str, Any], shape: str) -> Record:
    """A row of one of SHAPES: one completion with its label, or the completions of preference pairs."""
    if shape in preferences.SHAPES:
        record = preferences.parse(row, shape)
        labels = tuple(desirable for _ in record.pairs for desirable in (True, False))
        record.pairs = [(completion,) for pair in record.pairs for completion in pair]
        record.labels = labels
        return record
    inner, _, name = shape.rpartition("+")
    label = demonstrations.is_good(row[name])
    if label is None:
        raise RowError(
            "unclear_label",
            name,
            show(row[name]),
            "true or false, 1 or 0, 1 or -1, or a word such as up or down; for ratings set data.label={good: 4, bad: 2}",
        )
    record = demonstrations.demonstration(row, inner)
    if record.untrained:
        raise RowError(
            "weight", inner, "turns with weight 0 beside a label", f"`{name}` alone: it is of the last turn"
        )
    record.all_turns, record.labels = False, (label,)
    return record
