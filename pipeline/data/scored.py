"""Completions to be scored: one of a demonstration, or the two of a pair. Rows -> Records."""

import json
from typing import Any

from pipeline.data import demonstrations, preferences
from pipeline.data.record import Record

SHAPES = {**preferences.SHAPES, **demonstrations.SHAPES}


def parse(row: dict[str, Any], shape: str) -> Record:
    """A demonstration or a preference, and the row for a Python reward."""
    read = preferences.parse if shape in preferences.SHAPES else demonstrations.demonstration
    record = read(row, shape)
    record.row = json.dumps({**row, "prompt": record.prompt}, ensure_ascii=False)
    return record
