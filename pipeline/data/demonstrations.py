"""Demonstrations: a prompt and the completion to learn. Rows -> Records -> token ids with labels."""

import contextlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from pipeline.data.encode import Dropped, Encoder, Example, Outcome, Rendered
from pipeline.data.messages import (
    check_prompt,
    completion_text,
    ends_on,
    instruction,
    messages,
    prompt_text,
)
from pipeline.data.record import Record, Text, Turns
from pipeline.data.template import Span, holds, no_completion
from pipeline.data.values import RowError, show

SHAPES = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt+completion": ("prompt", "completion"),
    "prompt+answer": ("prompt", "answer"),
    "instruction+output": ("instruction", "output"),
}
# Columns that say whether a completion is good (trl.KTOTrainer's, LLaMA-Factory's), and their values where it is not.
LABELS = {"label", "kto_tag"}
_BAD_WORDS = (
    "bad dislike disliked down f false n negative no reject rejected thumbs_down undesirable unsafe wrong 👎"
)
BAD = (0, -1, *_BAD_WORDS.split())
GOOD = (1, *"chosen desirable good like liked positive t thumbs_up true up y yes 👍".split())
WEIGHTS = {"weight", "train"}  # fields of a message that say whether it is trained

# ---- row -> Record ---------------------------------------------------------------------------------------------


def parse(row: dict[str, Any], shape: str) -> Record:
    """A demonstration of one of SHAPES, to be imitated; one that one of LABELS calls bad is refused.

    A label that says something else is a column that is not read.
    """
    for name in LABELS & row.keys():
        if is_good(row[name]) is False:
            raise RowError(
                "label",
                name,
                f"{show(row[name])}: a completion that is not to be imitated",
                "good completions only; data.on_error=skip trains on those alone; kto learns from both kinds",
            )
    record = demonstration(row, shape)
    record.unread = tuple(name for name in sorted(LABELS & row.keys()) if is_good(row[name]) is None)
    return record


def is_good(label: Any) -> bool | None:
    """Whether a label calls a completion good; None: it says something else, such as a topic."""
    value = label.strip().lower().replace(" ", "_") if isinstance(label, str) else label
    with contextlib.suppress(ValueError, TypeError):
        value = float(value)
    if not isinstance(value, str | int | float):
        return None
    return True if value in GOOD else False if value in BAD else None


def demonstration(row: dict[str, Any], shape: str) -> Record:
    """A demonstration of one of SHAPES, whatever its `label`."""
    if shape in ("messages", "conversations"):
        turns = messages(row[shape], shape, system=row.get("system"))
        ends_on(turns, "assistant", shape)
        check_prompt(turns[:-1], shape)
        return Record(
            turns[:-1], [(turns[-1:],)], all_turns=True, untrained=untrained(row[shape], turns, shape)
        )
    if shape == "instruction+output":
        prompt: Text = instruction(row)
        return Record(prompt, [(completion_text(row["output"], "output", prompt),)])
    prompt = prompt_text(row["prompt"], system=row.get("system"))
    key = shape.removeprefix("prompt+")
    completion = completion_text(row[key], key, prompt)
    excluded: frozenset[int] = frozenset()
    if isinstance(row[key], list | dict):
        items = row[key] if isinstance(row[key], list) else [row[key]]
        excluded = untrained(items, messages(items, key), key)
        if excluded and isinstance(prompt, str):
            raise RowError("wrong_type", key, "weights beside a prompt of text", "a prompt of messages")
        excluded = frozenset(len(prompt) + index for index in excluded)
    return Record(prompt, [(completion,)], untrained=excluded)


def untrained(items: list[dict[str, Any]], turns: Turns, key: str) -> frozenset[int]:
    """The assistant turns that a row takes out of training: `weight: 0` (OpenAI's format) or `train: false`.

    Raises:
        RowError: for a weight other than 0 and 1, for a weight of 1 on a turn of another role, and where no assistant
            turn is left to train.
    """
    added = len(turns) - len(items)  # 1 where the system prompt comes from a field of its own
    excluded = set()
    for index, item in enumerate(items):
        role = turns[index + added]["role"]
        for name in WEIGHTS & item.keys():
            if item[name] is None:
                continue
            if item[name] not in (0, 1):
                raise RowError(
                    "weight", f"{key}[{index}].{name}", show(item[name]), "1 (train this turn) or 0 (do not)"
                )
            if item[name] and role != "assistant":
                raise RowError(
                    "weight",
                    f"{key}[{index}].{name}",
                    f"{show(item[name])} on a turn by `{role}`",
                    "it on `assistant` turns only: no others are trained",
                )
            if not item[name]:
                excluded.add(index + added)
    assistant = {index for index, turn in enumerate(turns) if turn["role"] == "assistant"}
    if excluded and assistant <= excluded:
        raise RowError("weight", key, "no assistant turn that is to be trained", "one without `weight: 0`")
    return frozenset(excluded & assistant)


# ---- Record -> token ids and labels ----------------------------------------------------------------------------


def encode(encoder: Encoder, records: Sequence[Record]) -> list[list[Outcome]]:
    """One example for each record; `labels` are the ids of the trained tokens and -100 elsewhere."""
    rendered = [_render(encoder, record) for record in records]
    texts = [item[0] for item in rendered if not isinstance(item, RowError)]
    encodings = iter(encoder.encodings(texts, encoder.backend.encode_batch))
    return [
        [item if isinstance(item, RowError) else _labelled(encoder, next(encodings), item[0][0], *item[1:])]
        for item in rendered
    ]


def _render(encoder: Encoder, record: Record) -> tuple[Rendered, list[Span], bool] | RowError:
    """The text, the spans in it that are trained, and whether its last turn is one of them."""
    try:
        prompt, (completion,), escaping = encoder.turns(record, record.pairs[0])
        if isinstance(prompt, str):
            whole = prompt + str(completion)
            return (whole, escaping), [(len(prompt), len(whole))], True
        turns = [*prompt, *completion]
        first = 0 if record.all_turns else len(prompt)
        chat = encoder.chat.offering(record.tools)
        whole, spans = chat.spans(turns, first, record.untrained)  # type: ignore[arg-type]
        if not holds(whole, prompt[-1]["content"].strip()):
            # raises where the template leaves out or changes the last turn of the prompt
            chat.asking(prompt)
        return (whole, escaping), spans, len(turns) - 1 not in record.untrained
    except RowError as error:
        return error


def _labelled(encoder: Encoder, encoding: Any, whole: str, spans: list[Span], trains_end: bool) -> Outcome:
    ids, offsets = encoding.ids, encoding.offsets
    starts, trained = [start for start, _ in offsets], [False] * len(ids)
    for begin, stop in spans:  # a token that spans the border of prompt and completion is not trained
        first, last = bisect_left(starts, begin), bisect_left(starts, stop)
        trained[first:last] = [True] * (last - first)
    _mend_ends(encoder, ids, trained, whole, offsets)
    kept = len(encoder.ended(ids)) if ids and ids[-1] not in encoder.ends else len(ids)
    if kept > len(ids):
        ids, trained = [*ids, encoder.eos], [*trained, trains_end]
    else:
        ids, trained = ids[:kept], trained[:kept]
    with_bos = encoder.one_bos(ids)
    trained = [False] * (len(with_bos) - len(ids)) + trained[max(len(ids) - len(with_bos), 0) :]
    return _fit(encoder, with_bos, trained)


def _mend_ends(
    encoder: Encoder, ids: list[int], trained: list[bool], whole: str, offsets: list[Span]
) -> None:
    """The end token of each completion is trained; the white space that the template writes behind it is not."""
    at = 0
    while True in trained[at:]:
        at = trained.index(True, at)
        stop = trained.index(False, at) if False in trained[at:] else len(ids)
        if ids[stop - 1] not in encoder.ends and stop < len(ids) and ids[stop] in encoder.ends:
            # the span (a generation block, or the completion's words) ends before the end token
            trained[stop] = True
            stop += 1
        last = stop - 1
        while last > at and ids[last] not in encoder.ends and not whole[slice(*offsets[last])].strip():
            last -= 1
        if ids[last] in encoder.ends:
            trained[last + 1 : stop] = [False] * (stop - last - 1)
        at = stop


def _fit(encoder: Encoder, ids: list[int], trained: list[bool]) -> Outcome:
    length = len(ids)
    if length > encoder.max_length:
        if encoder.too_long != "truncate":
            return encoder.over_length(f"{length} tokens")
        ids, trained = ids[: encoder.max_length], trained[: encoder.max_length]
    # The first token is never predicted.
    if encoder.blank([token for token, on in zip(ids[1:], trained[1:], strict=True) if on]):
        return Dropped("prompt_too_long") if length > encoder.max_length else no_completion()
    labels = [token if on else -100 for token, on in zip(ids, trained, strict=True)]
    completion_tokens = sum(trained)
    ended = not encoder.ends.isdisjoint(labels)
    columns = {"input_ids": ids, "labels": labels}
    return Example(
        columns, len(ids) - completion_tokens, completion_tokens, length > encoder.max_length, ended
    )
