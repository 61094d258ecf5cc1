"""Prompts, for which completions are to be written. Rows -> Records, with the row for a Python reward."""

import json
from typing import Any

from pipeline.data.messages import (
    completion_text,
    instruction,
    prompt_text,
    split_transcripts,
    with_system,
)
from pipeline.data.record import Record

SHAPES = {
    "prompt": ("prompt",),
    "conversations": ("conversations",),
    "messages": ("messages",),
    "instruction": ("instruction",),
    "chosen+rejected": ("chosen", "rejected"),  # the prompt that both share
}

# ---- row -> Record ---------------------------------------------------------------------------------------------


def parse(row: dict[str, Any], shape: str) -> Record:
    """The prompt of a row of one of SHAPES, and its further columns as they are."""
    if shape == "chosen+rejected":
        prompt, completions = split_transcripts(row["chosen"], row["rejected"])
        prompt, _ = with_system(prompt, completions, row.get("system"))
    elif shape == "instruction":
        prompt = instruction(row)
    else:
        prompt = prompt_text(row[shape], shape, row.get("system"))
    further = {key: value for key, value in row.items() if key != shape}
    return Record(prompt, row=json.dumps({"prompt": prompt, **further}, ensure_ascii=False))


def parse_answered(row: dict[str, Any], shape: str) -> Record:
    """As `parse`, of rows whose `completion`, where they have one, will be read too: its likelihood is measured."""
    record = parse(row, shape)
    if row.get("completion") not in (None, ""):
        completion_text(row["completion"], "completion", record.prompt)
    return record
