"""A decoded JSON row -> a Record, or a RowError that says what is wrong with it. Pure Python: no tokenizer, no Ray."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.data import versions
from pipeline.data.kinds import Kind, kind_of
from pipeline.data.messages import dialogue
from pipeline.data.record import Record
from pipeline.data.tools import decoded, offered
from pipeline.data.values import RowError, check_values, fields_of, show, some
from pipeline.errors import visible

# What other data sets call a field.
ALIASES = {
    "prompt": ("question", "query", "instruction", "input", "problem", "user"),
    "completion": ("response", "output", "answer", "solution", "target", "reply", "assistant"),
    "chosen": (
        "preferred",
        "accepted",
        "winner",
        "better",
        "positive",
        "chosen_response",
        "response_j",
        "preferred_output",
    ),
    "rejected": (
        "dispreferred",
        "refused",
        "loser",
        "worse",
        "negative",
        "rejected_response",
        "response_k",
        "non_preferred_output",
    ),
    "label": ("thumb", "thumbs", "feedback", "rating", "liked", "desirable"),
    "messages": ("conversation", "dialogue", "dialog", "chat", "turns"),
}
OPTIONAL = {"input", "margin", "system"}  # fields that no shape needs


def parse(row: Any, kind: Kind) -> Record:
    """A decoded JSON row -> `Record`; raises RowError (without file and line, which the reader adds)."""
    check_values(row)
    if not isinstance(row, dict):
        raise RowError("not_object", "", show(row), "a JSON object, such as " + example(kind))
    shape = shape_of(row, kind)
    if shape is None:
        raise wrong_fields(row, kind)
    for key in kind.shapes[shape]:
        if row[key] is None:
            raise RowError("null", key, "null", "a value")
    row = {**row, **{key: unpacked(key, row[key]) for key in kind.shapes[shape]}}
    record = kind.parse(row, shape)
    record.tools = offered(row.get("tools"))
    record.version = versions.of_row(row)
    if "row" not in kind.columns:  # else all columns go to Python rewards
        record.unread += tuple(key for key in row if key not in read_of(record, kind, shape))
    return record


def unpacked(field: str, value: Any) -> Any:
    """A list of messages, if a text is the JSON of one: a CSV file holds them like that. Or if it is a conversation's field."""
    if field in ("messages", "conversations"):
        return dialogue(value)
    if not isinstance(value, str) or not value.lstrip().startswith("[{"):
        return value
    items = decoded(value)
    is_chat = isinstance(items, list) and all(
        isinstance(item, dict) and item.keys() & {"role", "from"} for item in items
    )
    return items if is_chat else value


def read_of(record: Record, kind: Kind, shape: str) -> set[str]:
    """The columns that are read of a row of a shape."""
    read = {*kind.shapes[shape], *kind.further, "system"} | ({"version"} if record.version else set())
    return read | ({"input"} if "instruction" in read else set()) | ({"tools"} if record.tools else set())


def shape_of(row: dict[str, Any], kind: Kind) -> str | None:
    """Name of the shape of a row, or None."""
    return next((name for name, needs in kind.shapes.items() if all(key in row for key in needs)), None)


def wrong_fields(row: dict[str, Any], kind: Kind) -> RowError:
    """No shape fits: names the field that is missing from the nearest shape, and a field that looks like it."""
    shapes, keys = kind.shapes.values(), some(row)
    known = {name for needs in shapes for name in needs}
    unknown = [key for key in keys if key not in known | OPTIONAL]
    nearest_shape = max(shapes, key=lambda needs: _likeness(needs, keys, unknown))
    missing = [need for need in nearest_shape if need not in row]
    meant = _meant(missing, unknown)
    hint = (
        f" (is {', '.join(f'`{visible(key, lines=False)}` meant to be `{name}`' for name, key in meant.items())}?)"
        if meant
        else ""
    )
    expected = "one of " + " | ".join(kind.shapes) + f" (stage {kind.stage})"
    if len(meant) == len(missing) and all(key.isidentifier() for key in meant.values()):
        renamed = ", ".join(f"{name}: {column}" for name, column in meant.items())
        expected += f"; data.columns='{{{renamed}}}' renames"
    for stage, stages in (("rm", "rm, dpo and kto"), ("kto", "kto"), ("sft", "sft")):
        if not meant and shape_of(row, kind_of(stage)):
            expected += f"; rows with such fields are for {stages}"
            break
    return RowError("missing_field", missing[0], fields_of(keys) + hint, expected)


def _meant(names: Iterable[str], keys: list[str]) -> dict[str, str]:
    """Returns {field: the key that it is likely to be called}, by spelling or as other datasets do; each key stands for one."""
    meant: dict[str, str] = {}
    for name in names:
        left = [key for key in keys if key not in meant.values()]
        close = difflib.get_close_matches(name, left, 1)
        words = [key for key in left if name in key.split("_")]  # response_chosen
        aliases = [alias for alias in ALIASES.get(name, ()) if alias in left]
        if found := [*close, *words, *aliases]:
            meant[name] = found[0]
    return meant


def _likeness(needs: Sequence[str], keys: list[str], unknown: list[str]) -> float:
    missing = [need for need in needs if need not in keys]
    return (len(needs) - len(missing) + 0.5 * len(_meant(missing, unknown))) / len(needs)


def example(kind: Kind) -> str:
    shape = min((needs for needs in kind.shapes.values() if "prompt" in needs), key=len)
    return "{" + ", ".join(f'"{name}": ...' for name in shape) + "}"
