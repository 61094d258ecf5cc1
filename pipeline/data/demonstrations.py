"""Demonstrations: a prompt and the completion to learn. Rows -> Records."""

import contextlib
from typing import Any

from pipeline.data.messages import (
    check_prompt,
    completion_text,
    ends_on,
    instruction,
    messages,
    prompt_text,
)
from pipeline.data.record import Record, Text, Turns
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
        RowError: for a weight other than 0 and 1, and if no assistant turn is left to train.
    """
    added = len(turns) - len(items)  # 1 where the system prompt comes from a field of its own
    excluded = set()
    for index, item in enumerate(items):
        for name in WEIGHTS & item.keys():
            if item[name] is None:
                continue
            if item[name] not in (0, 1):
                raise RowError(
                    "weight", f"{key}[{index}].{name}", show(item[name]), "1 (train this turn) or 0 (do not)"
                )
            if not item[name]:
                excluded.add(index + added)
    assistant = {index for index, turn in enumerate(turns) if turn["role"] == "assistant"}
    if excluded and assistant <= excluded:
        raise RowError("weight", key, "no assistant turn that is to be trained", "one without `weight: 0`")
    return frozenset(excluded & assistant)
