"""Converts records of annotation tools to rows with one column for each field and each question.

    Argilla, to_datasets   {"reply_1": TEXT, "better.responses": ["reply_1"], "better.responses.status": ["submitted"]}
    Argilla, to_json       {"fields": {"reply_1": TEXT}, "responses": {"better": [{"value": "reply_1"}]}}
    Label Studio, JSON     {"data": {"reply_1": TEXT},
                            "annotations": [{"result": [{"from_name": "better", "type": TYPE, "value": {KEY: ["A"]}}]}]}

The column of a question contains the answer, or a list of answers if several annotators answered.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

# {type of a Label Studio result: key of the answer in the result's `value`}
ANSWERS = dict(pairwise="selected", choices="choices", rating="rating", textarea="text", number="number")


class Answered(dict[str, Any]):
    """A row from an annotation tool. `questions` has the names of the columns with answers."""

    questions: frozenset[str] = frozenset()


def flatten_annotation(row: Any, labels: Iterable[str] = ()) -> Any:
    """Converts a record of an annotation tool to a row. Returns other rows unchanged. Unanswered columns in `labels` are null."""
    answers, record = defaultdict[str, list[Any]](list), row if isinstance(row, dict) else {}
    fields, tool_keys = dict[str, Any](), set[str]()
    if isinstance(record.get("data"), dict) and isinstance(record.get("annotations"), list):
        fields, tool_keys = record["data"], {"data", "annotations"}
        for annotation in _objects(record["annotations"]):
            for result in () if annotation.get("was_cancelled") else _objects(annotation.get("result")):
                value, key = result.get("value"), ANSWERS.get(str(result.get("type")))
                if isinstance(value, dict) and key in value:
                    answers[str(result.get("from_name"))].append(_only(value[key]))
    elif isinstance(record.get("fields"), dict) and isinstance(record.get("responses"), dict):
        fields, tool_keys = record["fields"], {"fields", "responses"}
        for question, responses in record["responses"].items():
            answers[question] = [response.get("value") for response in _objects(responses)]
    else:
        for name in [name for name in record if name.endswith(".responses") and f"{name}.status" in record]:
            pairs = zip(record[name] or (), record[f"{name}.status"] or (), strict=False)
            answers[name.removesuffix(".responses")] = [v for v, state in pairs if state == "submitted"]
            tool_keys |= {name, f"{name}.status", f"{name}.users"}
    if not tool_keys:
        return row
    columns = {name: _only(values) if values else None for name, values in answers.items()}
    empty = dict.fromkeys([*labels] if any(answers.values()) else [*labels, "label"])
    other_columns = {name: value for name, value in record.items() if name not in tool_keys}
    answered = Answered({**empty, **other_columns, **fields, **columns})
    answered.questions = frozenset(columns)
    return answered


def _only(items: Any) -> Any:
    return items[0] if isinstance(items, list) and len(items) == 1 else items


def _objects(items: Any) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
