"""Completions to be scored: one of a demonstration, or the two of a pair. Rows -> Records -> token ids."""

import json
from collections.abc import Sequence
from typing import Any

from pipeline.data import demonstrations, preferences
from pipeline.data.encode import Dropped, Encoder, Example, Outcome, Rendered
from pipeline.data.messages import shared_length
from pipeline.data.record import Record, Text
from pipeline.data.values import RowError

SHAPES = {**preferences.SHAPES, **demonstrations.SHAPES}


def parse(row: dict[str, Any], shape: str) -> Record:
    """A demonstration or a preference, and the row for a Python reward."""
    read = preferences.parse if shape in preferences.SHAPES else demonstrations.demonstration
    record = read(row, shape)
    record.row = json.dumps({**row, "prompt": record.prompt}, ensure_ascii=False)
    return record


def encode(encoder: Encoder, records: Sequence[Record]) -> list[list[Outcome]]:
    """Prompt and completions, which together are the ids that a reward model is trained on, to the last one."""
    return [_encode(encoder, record) for record in records]


def _encode(encoder: Encoder, record: Record) -> list[Outcome]:
    try:
        texts = [_render(encoder, record, completions) for completions in record.pairs]
    except RowError as error:
        return [error]
    return [_fit(encoder, record, index, pair) for index, pair in enumerate(texts)]


def _render(encoder: Encoder, record: Record, completions: tuple[Text, ...]) -> list[Rendered]:
    """The prompt, then the prompt with each of the completions."""
    prompt, completions, escaping = encoder.turns(record, completions)
    wholes = [encoder.whole(record, prompt, completion) for completion in completions]
    return [(wholes[0][0], escaping), *((whole, escaping) for _, whole in wholes)]


def _fit(encoder: Encoder, record: Record, index: int, texts: list[Rendered]) -> Outcome:
    head, *sides = encoder.ids(texts)
    sides = [encoder.ended(side) for side in sides]
    # A token that spans the border belongs to the completion; and the completion is never empty.
    prompt = min(min(shared_length(head, side), len(side) - 1) for side in sides)
    if error := encoder.faulty([side[prompt:] for side in sides]):
        return error
    length = max(map(len, sides))
    if length > encoder.max_length:
        if encoder.too_long != "truncate":
            return encoder.over_length(f"{length} tokens")
        sides = [side[: encoder.max_length] for side in sides]
        if len(sides) > 1 and sides[0] == sides[1]:
            return Dropped("equal_after_truncation")
        prompt = min(min(prompt, len(side) - 1) for side in sides)
    row = record.row
    if len(record.pairs) > 1:  # one row of several answers is several pairs
        row = json.dumps({**json.loads(row), "pair": index}, ensure_ascii=False)
    completions = [side[prompt:] for side in sides]
    columns = {
        "prompt_ids": sides[0][:prompt],
        "chosen_ids": completions[0],
        "rejected_ids": completions[1] if len(completions) > 1 else None,
        "row": row,
    }
    return Example(columns, prompt, len(completions[0]), length > encoder.max_length)
