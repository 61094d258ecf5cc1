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
    answers, known = defaultdict[str, list[Any]](list), row if isinstance(row, dict) else {}
    fields, others = dict[str, Any](), set[str]()
    if isinstance(known.get("data"), dict) and isinstance(known.get("annotations"), list):
        fields, others = known["data"], {"data", "annotations"}
        for one in _objects(known["annotations"]):
            for result in () if one.get("was_cancelled") else _objects(one.get("result")):
                value, key = result.get("value"), ANSWERS.get(str(result.get("type")))
                if isinstance(value, dict) and key in value:
                    answers[str(result.get("from_name"))].append(_only(value[key]))
    elif isinstance(known.get("fields"), dict) and isinstance(known.get("responses"), dict):
        fields, others = known["fields"], {"fields", "responses"}
        for question, given in known["responses"].items():
            answers[question] = [one.get("value") for one in _objects(given)]
    else:
        for name in [name for name in known if name.endswith(".responses") and f"{name}.status" in known]:
            pairs = zip(known[name] or (), known[f"{name}.status"] or (), strict=False)
            answers[name.removesuffix(".responses")] = [one for one, state in pairs if state == "submitted"]
            others |= {name, f"{name}.status", f"{name}.users"}
    if not others:
        return row
    columns = {name: _only(given) if given else None for name, given in answers.items()}
    empty = dict.fromkeys([*labels] if any(answers.values()) else [*labels, "label"])
    rest = {name: value for name, value in known.items() if name not in others}
    made = Answered({**empty, **rest, **fields, **columns})
    made.questions = frozenset(columns)
    return made


def _only(items: Any) -> Any:
    return items[0] if isinstance(items, list) and len(items) == 1 else items


def _objects(items: Any) -> list[dict[str, Any]]:
    return [one for one in items if isinstance(one, dict)] if isinstance(items, list) else []
