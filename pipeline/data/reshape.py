"""Changes a raw row as the job says, before its format is determined: data.transform, data.columns, then data.label.

A transform is called once per row, in any process and order, so its result must depend on the row alone.

    first + second + label                        the label chooses: chosen and rejected
    first + second + first_score + second_score   the higher score chooses
    label                                         a rating becomes true or false

Without data.label, a label's meaning is derived if its values allow only one: 1 and 2, numbers between them (1.5 is a tie),
words such as a and b, model_a and model_b, and tie. Values 0 and 1 are ambiguous: the number of the better completion, or
whether the first one is better. Names such as response_0, response_1 and better_response_id resolve this.
"""

import dataclasses
import itertools
import json
import math
import re
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.data.annotations import flat
from pipeline.data.values import Dropped, RowError, decoded, fields_of, nearest, row_json, setting, show
from pipeline.errors import InputError, in_brief
from pipeline.system.functions import import_function

EXPECTED = "a row (dict), a list of rows, or None to leave it out"  # what data.transform may return
function = cache(import_function)  # the function of `python:module:function`


# ---- data.columns ----------------------------------------------------------------------------------------------------


Columns = Mapping[str, str | list[str]]
# fields of two completions without an order of preference (`ordered`)
UNORDERED = ("first", "second", "label", "first_score", "second_score")


def shapes_with(columns: Columns, shapes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Returns the formats with all mapped fields, so that other columns cannot select a format without them."""
    sides = {"first": "chosen", "second": "rejected"}
    fields = [field for field in columns if field != "label" or "first" not in columns]
    mapped = {sides.get(field, field) for field in fields} & {*itertools.chain(*shapes.values())}
    return {name: needs for name, needs in shapes.items() if mapped <= {*needs}}


def renamed(row: dict[str, Any], columns: Columns, needed: Iterable[str]) -> dict[str, Any]:
    """Returns the row with the fields of `columns` in place of their columns.

    Raises RowError if the row lacks the column of a `needed` field, or has an unmapped column with a field's name.
    """
    fields: dict[str, Any] = {}
    sources = [one for column in columns.values() for one in listed(column)]
    for field, column in columns.items():
        try:
            values = [value_at(row, one) for one in listed(column)]
        except KeyError as error:
            if field in needed or (field in row and field not in sources):
                found, column = fields_of(row) + nearest(error.args[0], row), str(error.args[0])
                expected = f"the column that data.columns.{field} names"
                raise RowError("missing_field", column, found, expected) from None
            continue
        fields[field] = values if isinstance(column, list) else values[0]
    used = {one if one in row else one.partition(".")[0] for one in sources}
    return {**{name: value for name, value in row.items() if name not in used}, **fields}


def value_at(row: dict[str, Any], path: str) -> Any:
    """Returns the value of a column, or at a path into it, or None for a path into null. Raises KeyError with the path."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        value = decoded(value)  # a CSV file holds lists and objects as JSON text
        if value is None:
            return None
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(path)
    return value


# ---- data.label, and scores ------------------------------------------------------------------------------------------


_WORD = r"(?:model|response|reply|output|answer|completion|text|option|summary|assistant|conversation|candidate|system)?"
WORDS = {
    "first": re.compile(rf"{_WORD}(?:a|1|first|left)(?:better|isbetter|wins?)?"),
    "second": re.compile(rf"{_WORD}(?:b|2|second|right)(?:better|isbetter|wins?)?"),
    "tie": re.compile(r"(?:tie|tied|draw|equal|same|both|neither|none).*"),
}
NAMES = ("first", "second", "tie", "good", "bad")  # possible meanings of a label's value
UNRATED = ("nan", "n/a", "na", "#n/a", "<na>", "null", "none")
SEVERAL = 12  # a column with more distinct values is not a label
RARE = 0.05  # up to this fraction of the labels, an unknown text is an error of its row
# Labels with such names hold the number of a completion, as in better_response_id. `label` alone may mean anything.
NUMBER_OF = re.compile(r"(?i)(?<![a-z])(id|idx|index|choice|better|best|winner)(?![a-z])")


@dataclass(frozen=True)
class Rule:
    """The meaning of a label's values, after `comparable`: first, second or tie; or good or bad."""

    first: tuple[Any, ...] = ()
    second: tuple[Any, ...] = ()
    tie: tuple[Any, ...] = ()
    good: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    derived: bool = False  # derived from the first rows; words then also have the meanings of WORDS

    @classmethod
    def of(cls, label: Mapping[str, Any]) -> "Rule":
        values: dict[str, Any] = {name: tuple(map(comparable, listed(some))) for name, some in label.items()}
        return cls(**values)

    def _values(self) -> list[tuple[Any, str]]:
        return [(value, name) for name in NAMES for value in getattr(self, name)]

    def __str__(self) -> str:
        shown = ((f"{end:g}" if isinstance(end, float) else end, name) for end, name in self._values())
        return ", ".join(f"{end} ({name})" for end, name in shown) or "a or b, or tie"

    def meaning(self, value: Any) -> str:
        """Returns the meaning (one of NAMES) of a value. A rating between good and bad is a `tie`. Raises KeyError for others."""
        value = comparable(value)
        for name in NAMES:
            if value in getattr(self, name) or (self.derived and side_of(value) == name):
                return name
        ends = [(end, name) for end, name in self._values() if name != "tie"]
        numbers = [value, *(end for end, _ in ends)]
        if len(ends) != 2 or not all(isinstance(one, float) and math.isfinite(one) for one in numbers):
            raise KeyError(value)
        (low, below), (high, above) = sorted(ends)
        if low < value < high:
            middle = (low + high) / 2
            return "tie" if self.good or value == middle else below if value < middle else above
        if self.good:
            return below if value < low else above
        raise KeyError(value)


def listed(values: Any) -> list[Any]:
    return [*values] if isinstance(values, list | tuple) else [] if values is None else [values]


def unpacked_label(label: Any) -> Any:
    """Returns the list of labels in a JSON text, as in CSV, or the label itself."""
    made = decoded(label) if isinstance(label, str) and label.lstrip().startswith("[") else label
    return made if isinstance(made, list) else label


def comparable(value: Any) -> Any:
    """Returns a label for comparison: numbers and numeric text as float, other text in lower case."""
    if isinstance(value, str):
        value = value.strip().lower()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def side_of(value: Any) -> str | None:
    """Returns `first`, `second` or `tie` if a text means one of them, else None."""
    word = re.sub(r"[^a-z0-9]", "", value) if isinstance(value, str) else ""
    return next((name for name, pattern in WORDS.items() if pattern.fullmatch(word)), None)


def vote(label: Any, rule: Rule) -> str:
    """Returns the meaning of most votes, or tie, or unlabeled without votes. A label that is not a list is the only vote."""
    votes: Counter[str] = Counter()
    for value in listed(unpacked_label(label)):
        try:
            blank = is_unrated(value) if rule.good else is_blank(value)
            votes.update([] if blank else [rule.meaning(value)])
        except KeyError:
            kind = "unclear_label" if rule.derived else "unknown_label"
            expected = f"{rule}; data.label says what its values mean"
            raise RowError(kind, "label", show(value), expected) from None
    (most, number), *others = [*votes.most_common(), ("unlabeled", 0)]
    return most if all(number > other for _, other in others) else "tie"


def is_blank(value: Any) -> bool:
    """Returns True for null and blank text. In CSV, an empty cell is empty text."""
    return value is None or (isinstance(value, str) and not value.strip())


def is_unrated(value: Any) -> bool:
    """Returns True for a rating that is blank, or the text of pandas and spreadsheets for a missing one."""
    return is_blank(value) or (isinstance(value, str) and value.strip().lower() in UNRATED)


def _score(value: Any, name: str) -> float | None:
    if is_blank(value):
        return None
    number = comparable(value)
    if not isinstance(number, float) or not math.isfinite(number):
        raise RowError("wrong_type", name, show(value), "a finite number")
    return number


def derived(labels: Sequence[Any], columns: Mapping[str, Any], key: str = "data.label") -> Rule:
    """Returns the rule that the labels of the first rows follow. `columns` is their data.columns.

    Raises InputError with the data.label to set if the labels are ambiguous.
    """
    column = ", ".join(listed(columns.get("label", "label")))
    flat = (
        one for label in labels for one in listed(unpacked_label(label)) if not isinstance(one, list | dict)
    )
    found = [one for one in flat if not is_blank(one)]
    times = Counter(map(comparable, found))
    # Reading a row reports its label if the label is rare and has no known meaning.
    values = [
        value
        for value, rows in times.items()
        if rows > RARE * len(found) or isinstance(value, float) or side_of(value)
    ]
    numbers = sorted(value for value in values if isinstance(value, float))
    words = {side_of(value) for value in values if not isinstance(value, float)}
    # A 1 may mean the first or the second. "right" may mean correct.
    doubtful = any(isinstance(value, str) and re.search(r"\d|^(left|right)", value) for value in values)
    # The label holds the number of a completion if all names suggest it: response_0, response_1, better_response_id.
    pair = columns.get("first", ""), columns.get("second", "")
    zeros = re.finditer(r"(?<!\d)0(?!\d)", pair[0])
    numbered = any(pair[0][: at.start()] + "1" + pair[0][at.end() :] == pair[1] for at in zeros)
    numbered &= all(NUMBER_OF.search(one) for one in listed(columns.get("label", "label")))
    if numbers and 1 <= numbers[0] < 1.5 < numbers[-1] <= 2 and words <= {"tie"}:
        return Rule((1.0,), (2.0,), derived=True)
    if numbers and {*numbers} <= {0.0, 1.0} and words <= {"tie"} and numbered:
        return Rule((0.0,), (1.0,), derived=True)
    if not numbers and words and None not in words and ({"first", "second"} <= words or not doubtful):
        return Rule(derived=True)
    distinct = {comparable(one): one for one in found}
    shown = ", ".join(show(value) for value in [*distinct.values()][:SEVERAL]) or "no label in the first rows"
    ends = [f"{one:g}" for one in numbers] if numbers else sorted(map(str, distinct.values()))
    said = "{first: VALUE, second: VALUE, tie: VALUE}"
    when = "where a VALUE may be a list"
    if len(ends) == len(distinct) > 1 and (numbers or len(ends) == 2):  # more than two words have no order
        said = f"{{first: {ends[0]}, second: {ends[-1]}}}"
        when = f"if {ends[0]} means that the first completion is better (and tie: VALUE for neither)"
    raise InputError(
        f"found {shown} in the column {column!r}, whose meaning is ambiguous; set {setting(key, said)} {when}, or name "
        f"another column: {key.removesuffix('label')}columns.label=COLUMN",
        key=key,
    )


# ---- all of it -------------------------------------------------------------------------------------------------------

NoteLabel = Callable[[str, str], None]  # (column of a label, "VALUE = MEANING")


@dataclass(frozen=True)
class Preprocess:
    """The changes to each row of a job. All of them are part of the cache key."""

    columns: Columns = dataclasses.field(default_factory=dict)
    rule: Rule | None = None  # unset if the rule is unknown or there are no labels
    transform: str | None = None
    transform_digest: str = ""
    group_by: str | None = None  # `transform` gets all consecutive rows with the same value in this column

    def rows(
        self, row: Any, needed: Iterable[str], has_pairs: bool, note_label: NoteLabel | None = None
    ) -> Iterator[Any]:
        """Yields the results of a decoded row: rows, RowError or Dropped.

        `needed` are the fields that formats need. `has_pairs` says whether a row may have two completions. `note_label` is
        called with each label's column and the meaning of its value.
        """
        for made in self.transformed(row):
            try:
                if isinstance(made, dict):
                    made = renamed(made, self.columns, needed) if self.columns else made
                    made = self._labelled(made, has_pairs, note_label)
                yield made
            except RowError as error:
                yield error

    def transformed(self, row: Any) -> Iterator[Any]:
        """Yields the results of data.transform for a row, or for a group's list of rows: rows, RowError or Dropped."""
        if self.transform is None or isinstance(row, RowError):
            yield flat(row, listed(self.columns.get("label")))
            return
        try:
            made = function(self.transform)(row)
            made = list(made) if isinstance(made, list | tuple | types.GeneratorType) else [made]
        except Exception as error:
            frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename != __file__]
            place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            yield RowError("transform", "", in_brief(error) + place, f"{EXPECTED}, from {self.transform}")
            return
        if all(one is None for one in made):
            yield Dropped("left_out")
            return
        for one in made:
            try:
                found = f"{type(one).__name__} {show(one)}"
                if isinstance(one, dict):
                    yield json.loads(row_json(one))  # like JSON: with text keys and without tuples
                    continue
            except (TypeError, ValueError, RecursionError) as error:
                found = f"a row that is not JSON ({in_brief(error, 100)})"
            yield RowError("transform", "", f"{found} returned by {self.transform}", EXPECTED)

    def _labelled(self, row: dict[str, Any], has_pairs: bool, note_label: NoteLabel | None) -> Any:
        """Returns the row with the completion that its label or scores choose, or Dropped if neither is better."""
        rule = self.rule or Rule()
        if rule.good and "label" in row:
            meaning = vote(row["label"], rule)
            made = {**row, "label": meaning == "good"}
        elif has_pairs and {"first", "second"} <= row.keys():
            read = {"first_score", "second_score"}
            if read <= row.keys():
                one, two = (_score(row[name], name) for name in sorted(read))
                meaning = "unlabeled"
                if one is not None and two is not None:
                    meaning = "tie" if one == two else "first" if one > two else "second"
            elif "label" in row:
                read, meaning = {"label"}, vote(row["label"], rule)
            else:
                expected = "`label`, or `first_score` and `second_score`"
                raise RowError("missing_field", "label", "no such field", expected)
            better, worse = ("second", "first") if meaning == "second" else ("first", "second")
            made = {name: value for name, value in row.items() if name not in {"first", "second", *read}}
            made |= {"chosen": row[better], "rejected": row[worse]}
        else:
            return row
        if note_label and meaning != "unlabeled" and "first_score" not in row:
            label, column = (
                unpacked_label(row["label"]),
                ", ".join(listed(self.columns.get("label", "label"))),
            )
            word = "neither" if rule.good and meaning == "tie" else meaning
            value = word if isinstance(label, list) else str(label).strip()[:40]
            note_label(column, word if value.lower() == word else f"{value} = {word}")
            votes = [comparable(one) for one in listed(label) if not is_blank(one)]
            if len(votes) > 1:
                agreed = "unanimous" if votes.count(votes[0]) == len(votes) else "not unanimous"
                note_label(f"{column}, {len(votes)} annotators", agreed)
        return Dropped(meaning) if meaning in ("tie", "unlabeled") else made


NOTHING = Preprocess()
