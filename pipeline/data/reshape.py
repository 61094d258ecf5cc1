"""Applies the job's changes to a raw row: first data.transform, then data.columns, then data.label.

A transform is called once per row, in any process and any order, so its result must depend only on the row. After data.columns,
a row may have these fields:

    first + second + label                        the label determines the chosen and the rejected completion
    first + second + first_score + second_score   the completion with the higher score is chosen
    label                                         data.label converts a rating to true or false
"""

import dataclasses
import json
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.data.annotations import flatten_annotation
from pipeline.data.labels import Rule, as_list, parse_score, unpacked_label
from pipeline.data.values import Dropped, RowError, fields_of, parse_json, row_json, show_json, suggest_key
from pipeline.errors import in_brief
from pipeline.system.functions import import_function

EXPECTED = "a row (dict), a list of rows, or None to drop the row"  # expected result of data.transform
function = cache(import_function)  # imports a function `python:module:function` once


# ---- data.columns ----------------------------------------------------------------------------------------------------


Columns = Mapping[str, str | list[str]]
# fields of a row whose label or scores determine which of two completions is chosen
UNORDERED = ("first", "second", "label", "first_score", "second_score")


def formats_with(columns: Columns, formats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the formats that have all mapped fields, so that unmapped columns cannot select another format."""
    sides = {"first": "chosen", "second": "rejected"}
    fields = [field for field in columns if field != "label" or "first" not in columns]
    format_fields = {field for format in formats for field in format.split("+")}
    mapped = {sides.get(field, field) for field in fields} & format_fields
    return {format: parser for format, parser in formats.items() if mapped <= {*format.split("+")}}


def rename_columns(row: dict[str, Any], columns: Columns, needed: Iterable[str]) -> dict[str, Any]:
    """Renames the columns of a row to the fields in `columns`.

    Raises RowError if the row lacks the column of a `needed` field, or if an unmapped column has the name of a mapped field.
    """
    fields: dict[str, Any] = {}
    paths = [path for column in columns.values() for path in as_list(column)]
    for field, column in columns.items():
        try:
            values = [value_at(row, path) for path in as_list(column)]
        except KeyError as error:
            if field in needed or (field in row and field not in paths):
                found, column = fields_of(row) + suggest_key(error.args[0], row), str(error.args[0])
                expected = f"the column in data.columns.{field}"
                raise RowError("missing_field", column, found, expected) from None
            continue
        fields[field] = values if isinstance(column, list) else values[0]
    used = {path if path in row else path.partition(".")[0] for path in paths}
    return {**{name: value for name, value in row.items() if name not in used}, **fields}


def value_at(row: dict[str, Any], path: str) -> Any:
    """Returns the value of a column, or of a path inside a column. Returns None if the path leads into null. Raises
    KeyError(path)."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        value = parse_json(value)  # in CSV files, lists and objects are JSON text
        if value is None:
            return None
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(path)
    return value


# ---- all changes to a row ---------------------------------------------------------------------------------------------

NoteLabel = Callable[[str, str], None]  # (column of a label, "VALUE = MEANING")


@dataclass(frozen=True)
class Preprocess:
    """A job's preprocessing of each row. All fields of this class are part of the cache key."""

    columns: Columns = dataclasses.field(default_factory=dict)
    rule: Rule | None = None  # None if the rows have no labels, or if the rule has not been derived yet
    transform: str | None = None
    transform_digest: str = ""
    group_by: str | None = None  # `transform` gets lists of consecutive rows with equal values in this column

    def transformed(self, row: Any) -> Iterator[Any]:
        """Yields the results of data.transform for a row, or for a group's list of rows: rows, RowError or Dropped."""
        if self.transform is None or isinstance(row, RowError):
            yield flatten_annotation(row, as_list(self.columns.get("label")))
            return
        try:
            results = function(self.transform)(row)
            results = list(results) if isinstance(results, list | tuple | types.GeneratorType) else [results]
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
            place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            yield RowError("transform", "", in_brief(error) + place, f"{EXPECTED}, from {self.transform}")
            return
        if all(result is None for result in results):
            yield Dropped("left_out")
            return
        for result in results:
            try:
                found = f"{type(result).__name__} {show_json(result)}"
                if isinstance(result, dict):
                    yield json.loads(row_json(result))  # converts keys to text, and tuples to lists
                    continue
            except (TypeError, ValueError, RecursionError) as error:
                found = f"a row that is not JSON ({in_brief(error, 100)})"
            yield RowError("transform", "", f"{found} returned by {self.transform}", EXPECTED)

    def apply_label(self, row: dict[str, Any], has_pairs: bool, note_label: NoteLabel | None) -> Any:
        """Applies the label or the scores of a row. Returns the changed row, or Dropped if no completion is better.

        Args:
            has_pairs: whether a row may have two completions.
            note_label: called with the column of each label, and with the label's value and meaning.
        """
        rule = self.rule or Rule()
        if rule.good and "label" in row:
            meaning = rule.vote(row["label"])
            changed = {**row, "label": meaning == "good"}
        elif has_pairs and {"first", "second"} <= row.keys():
            inputs = {"first_score", "second_score"}
            if inputs <= row.keys():
                first, second = (parse_score(row[name], name) for name in sorted(inputs))
                meaning = "unlabeled"
                if first is not None and second is not None:
                    meaning = "tie" if first == second else "first" if first > second else "second"
            elif "label" in row:
                inputs, meaning = {"label"}, rule.vote(row["label"])
            else:
                expected = "`label`, or `first_score` and `second_score`"
                raise RowError("missing_field", "label", "no such field", expected)
            better, worse = ("second", "first") if meaning == "second" else ("first", "second")
            changed = {name: value for name, value in row.items() if name not in {"first", "second", *inputs}}
            changed |= {"chosen": row[better], "rejected": row[worse]}
        else:
            return row
        if note_label and meaning != "unlabeled" and "first_score" not in row:
            label = unpacked_label(row["label"])
            column = ", ".join(as_list(self.columns.get("label", "label")))
            word = "neither" if rule.good and meaning == "tie" else meaning
            value = word if isinstance(label, list) else str(label).strip()[:40]
            note_label(column, word if value.lower() == word else f"{value} = {word}")
        return Dropped(meaning) if meaning in ("tie", "unlabeled") else changed


NOTHING = Preprocess()
