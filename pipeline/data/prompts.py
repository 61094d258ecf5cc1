"""Prompts, for which completions are to be written. Rows -> Records -> token ids, and the row for a Python reward."""

import json
from collections.abc import Sequence
from typing import Any

from pipeline.data.encode import Encoder, Example, Outcome, Rendered
from pipeline.data.messages import (
    completion_text,
    instruction,
    prompt_text,
    split_transcripts,
    with_system,
)
from pipeline.data.record import Record
from pipeline.data.template import no_prompt
from pipeline.data.values import RowError

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


# ---- Record -> token ids ---------------------------------------------------------------------------------------


def encode(encoder: Encoder, records: Sequence[Record]) -> list[list[Outcome]]:
    rendered = [_render(encoder, record) for record in records]
    ids = iter(encoder.ids([item for item in rendered if not isinstance(item, RowError)]))
    return [
        [item if isinstance(item, RowError) else _fit(encoder, next(ids), record)]
        for record, item in zip(records, rendered, strict=True)
    ]


def _render(encoder: Encoder, record: Record) -> Rendered | RowError:
    try:
        prompt, _, escaping = encoder.turns(record, ())
        text = prompt if isinstance(prompt, str) else encoder.chat.offering(record.tools).asking(prompt)
    except RowError as error:
        return error
    return text[-encoder.room :], escaping


def _fit(encoder: Encoder, ids: list[int], record: Record) -> Outcome:
    length = len(ids)
    if not ids or (encoder.control.as_text and encoder.blank(ids)):
        return no_prompt()
    if length > encoder.max_length:
        if encoder.too_long != "truncate":
            return encoder.over_length(f"{length} tokens")
        begin = ids[:1] if ids[0] == encoder.bos else []  # a prompt keeps its end: the question stands there
        ids = begin + ids[length - encoder.max_length + len(begin) :]
    return Example({"input_ids": ids, "row": record.row}, len(ids), 0, length > encoder.max_length)
