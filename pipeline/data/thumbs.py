"""Thumbs: a prompt, a completion, and whether it is desirable. Rows -> Records -> token ids of each completion.

A preference pair is two thumbs: its chosen completion is desirable, its rejected one is not.
"""

from collections.abc import Sequence
from typing import Any

from pipeline.data import demonstrations, preferences
from pipeline.data.encode import Dropped, Encoder, Example, Outcome, Rendered
from pipeline.data.record import Record
from pipeline.data.template import no_prompt
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


# ---- Record -> token ids ---------------------------------------------------------------------------------------


def encode(encoder: Encoder, records: Sequence[Record]) -> list[list[Outcome]]:
    """An example for each completion of a record: `prompt_ids`, `completion_ids`, `label`."""
    rendered = [_render(encoder, record) for record in records]
    good = [texts for texts in rendered if not isinstance(texts, RowError)]
    ids = iter(encoder.ids([text for texts in good for both in texts for text in both]))
    return [
        [texts]
        if isinstance(texts, RowError)
        else _contrary(
            [
                _fit(encoder, both, next(ids), next(ids), label)
                for both, label in zip(texts, record.labels, strict=True)
            ]
        )
        for record, texts in zip(records, rendered, strict=True)
    ]


def _render(encoder: Encoder, record: Record) -> list[tuple[Rendered, Rendered]] | RowError:
    """For each completion: the prompt, and the prompt with it."""
    texts = []
    try:
        for completions in record.pairs:
            prompt, (completion,), escaping = encoder.turns(record, completions)
            head, whole = encoder.whole(record, prompt, completion)
            texts.append(((head, escaping), (whole, escaping)))
    except RowError as error:
        return error
    return texts


def _contrary(outcomes: list[Outcome]) -> list[Outcome]:
    """Without the thumbs of a pair whose completions are the same tokens after truncation: one would be up, one down."""
    kept: list[Outcome] = []
    for one in outcomes:
        other = kept[-1] if kept else None
        if (
            isinstance(one, Example)
            and isinstance(other, Example)
            and one.columns | {"label": None} == other.columns | {"label": None}
            and one.columns["label"] != other.columns["label"]
        ):
            kept[-1] = Dropped("equal_after_truncation")
        else:
            kept.append(one)
    return kept


def _fit(
    encoder: Encoder, texts: tuple[Rendered, Rendered], prompt: list[int], whole: list[int], label: bool
) -> Outcome:
    completion = encoder.ended(encoder.behind(prompt, whole, *texts))
    if error := encoder.faulty([completion]):
        return error
    if not prompt:
        return no_prompt()
    room, length = encoder.max_length - len(prompt), len(completion)
    if length > room:
        if encoder.too_long != "truncate":
            return encoder.over_length(f"{len(prompt) + length} tokens")
        if room < 1:
            return Dropped("prompt_too_long")
        completion = completion[:room]
    columns = {"prompt_ids": prompt, "completion_ids": completion, "label": label}
    return Example(columns, len(prompt), len(completion), length > room, completion[-1] in encoder.ends)
