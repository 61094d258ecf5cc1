"""Labels: which of two completions is better, or whether one is good.

    first + second + label                        the label picks the side: chosen and rejected
    first + second + first_score + second_score   the higher score does
    label                                         a rating becomes true or false

data.label sets the meaning of a label's values: {first: 1, second: 2, tie: 0} for pairs, {good: 4, bad: 2} for ratings.
For pairs it is derived if the values can mean only one thing: 1 and 2, numbers between them (1.5 is a tie), words such as a
and b, model_a and model_b, and tie. Values 0 and 1 are ambiguous: the number of the better completion, or whether the first
one is better. Columns such as response_0, response_1 and better_response_id settle that by their names.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.values import RowError, setting, show
from pipeline.errors import InputError

Side = str | None  # first, second, or None: a tie
_WORD = r"(?:model|response|output|answer|completion|text|option|summary|assistant|conversation|candidate|system)?"
WORDS = {
    "first": re.compile(rf"{_WORD}(?:a|1|first|left)(?:better|isbetter|wins?)?"),
    "second": re.compile(rf"{_WORD}(?:b|2|second|right)(?:better|isbetter|wins?)?"),
    "tie": re.compile(r"(?:tie|tied|draw|equal|same|both|neither|none).*"),
}
SEVERAL = 12  # different values, more of which are no label
# Names of labels that hold the number of a completion, such as better_response_id; not `label`, which may mean anything.
NUMBER_OF = re.compile(r"(?i)(?<![a-z])(id|idx|index|choice|better|best|winner)(?![a-z])")


@dataclass(frozen=True)
class Rule:
    """What the values of a label mean, as `comparable` makes them: those of each side and of a tie, or the good and bad ones."""

    first: tuple[Any, ...] = ()
    second: tuple[Any, ...] = ()
    tie: tuple[Any, ...] = ()
    good: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    derived: bool = False  # from the first rows; words mean what WORDS says, too

    @classmethod
    def of(cls, label: Mapping[str, Any]) -> "Rule":
        values: dict[str, Any] = {name: tuple(map(comparable, listed(some))) for name, some in label.items()}
        return cls(**values)

    def __str__(self) -> str:
        names = ("first", "second", "tie", "good", "bad")
        ends = [(name, end) for name in names for end in getattr(self, name)]
        words = ", ".join(
            f"{end:g} ({name})" if isinstance(end, float) else f"{end} ({name})" for name, end in ends
        )
        return words or "a or b, or tie"

    def is_good(self, value: Any) -> bool | None:
        """Returns whether a rating is good, or None if it lies between bad and good; raises KeyError for unknown values."""
        value = comparable(value)
        if value in self.good or value in self.bad:
            return value in self.good
        ends = [*self.good, *self.bad]
        if len(ends) > 2 or not all(isinstance(one, float) for one in (value, *ends)):
            raise KeyError(value)
        good, bad = ends
        return None if min(ends) < value < max(ends) else (value > bad) == (good > bad)

    def side(self, value: Any) -> Side:
        """The side that a value names; raises KeyError for a value that names none and is no tie."""
        value = comparable(value)
        for name in ("first", "second", "tie"):
            if value in getattr(self, name) or (self.derived and _word(value) == name):
                return name if name != "tie" else None
        ends = [number for number in (*self.first, *self.second) if isinstance(number, float)]
        on_a_scale = len(self.first) == len(self.second) == 1 and len(ends) == 2
        if isinstance(value, float) and on_a_scale and min(ends) < value < max(ends):
            middle = sum(ends) / 2
            low, high = ("first", "second") if self.first == (min(ends),) else ("second", "first")
            return None if value == middle else low if value < middle else high
        raise KeyError(value)


def listed(values: Any) -> list[Any]:
    return [*values] if isinstance(values, list | tuple) else [] if values is None else [values]


def comparable(value: Any) -> Any:
    """A label as it is compared: numbers, and text that is one, as float; other text in lower case."""
    if isinstance(value, str):
        value = value.strip().lower()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _word(value: Any) -> str | None:
    """`first`, `second` or `tie`, if that is what a text says."""
    word = re.sub(r"[^a-z0-9]", "", value) if isinstance(value, str) else ""
    return next((name for name, pattern in WORDS.items() if pattern.fullmatch(word)), None)


# ---- row -> row ------------------------------------------------------------------------------------------------


def ordered(row: dict[str, Any], rule: Rule | None) -> dict[str, Any] | None:
    """A row with `first` and `second` as one with `chosen` and `rejected`; None: a tie, or no label.

    Raises:
        RowError: for a label that names neither side, and where there is nothing to tell the sides apart by.
    """
    rest = {name: value for name, value in row.items() if name not in ("first", "second")}
    if "first_score" in row and "second_score" in row:
        scores = [_score(rest.pop(name), name) for name in ("first_score", "second_score")]
        if None in scores or scores[0] == scores[1]:
            return None
        side: Side = "first" if scores[0] > scores[1] else "second"  # type: ignore[operator]
    elif "label" in row:
        side = vote(rest.pop("label"), rule or Rule())
    else:
        expected = (
            "`label`, or `first_score` and `second_score`, which say whether `first` or `second` is better"
        )
        raise RowError("missing_field", "label", "no such field", expected)
    if side is None:
        return None
    other = "second" if side == "first" else "first"
    return {**rest, "chosen": row[side], "rejected": row[other]}


def graded(row: dict[str, Any], rule: Rule) -> dict[str, Any] | None:
    """Returns the row with true or false as its label, or None if its rating is neither good nor bad.

    Raises:
        RowError: for a rating that data.label does not cover.
    """
    value = row["label"]
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        good = rule.is_good(value)
    except (KeyError, TypeError):
        raise RowError("unknown_label", "label", show(value), f"{rule}, as in data.label") from None
    return None if good is None else {**row, "label": good}


def vote(label: Any, rule: Rule) -> Side:
    """The side with more votes than the other and than the ties; a label that is no list is the only vote."""
    votes: Counter[Side] = Counter()
    for value in listed(label):
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        try:
            votes[rule.side(value)] += 1
        except (KeyError, TypeError):
            kind = "unclear_label" if rule.derived else "unknown_label"
            raise RowError(
                kind, "label", show(value), f"{rule}; data.label says what its values mean"
            ) from None
    (side, most), *others = [*votes.most_common(), (None, 0)]
    return side if all(most > count for _, count in others) else None


def _score(value: Any, name: str) -> float | None:
    if value is None or (isinstance(value, str) and not value.strip()):  # in CSV nothing is empty text
        return None
    number = comparable(value)
    if not isinstance(number, float):
        raise RowError("wrong_type", name, show(value), "a number")
    if not math.isfinite(number):
        raise RowError("not_finite", name, show(value), "a finite number")
    return number


# ---- values -> rule --------------------------------------------------------------------------------------------


def derived(labels: Sequence[Any], columns: Mapping[str, Any], key: str = "data.label") -> Rule:
    """Returns the rule that the labels of the first rows follow; `columns` is their data.columns.

    Raises:
        InputError: with the data.label to type, where they can mean more than one thing.
    """
    column = ", ".join(listed(columns.get("label", "label")))
    flat = (one for label in labels for one in listed(label) if not isinstance(one, list | dict))
    values = {comparable(one): one for one in flat if one is not None and one != ""}
    numbers = sorted(value for value in values if isinstance(value, float))
    words = {_word(value) for value in values if not isinstance(value, float)}
    # 1 of 0 and 1, or of 1 and 2? And what is right may be the right one.
    doubtful = any(isinstance(value, str) and re.search(r"\d|^(left|right)", value) for value in values)
    if numbers and 1 <= numbers[0] < 1.5 < numbers[-1] <= 2 and words <= {"tie"}:
        return Rule((1.0,), (2.0,), derived=True)
    if numbers and {*numbers} <= {0.0, 1.0} and words <= {"tie"} and are_numbered(columns):
        return Rule((0.0,), (1.0,), derived=True)
    if not numbers and words and None not in words and ({"first", "second"} <= words or not doubtful):
        return Rule(derived=True)
    raise InputError(_unclear([*values.values()], column, key), key=key)


def are_numbered(columns: Mapping[str, Any]) -> bool:
    """Returns whether a label holds the number of one of two completions, judged by the names: response_0 and response_1."""
    first, second = columns.get("first", ""), columns.get("second", "")
    numbered = any(
        first[: at.start()] + "1" + first[at.end() :] == second
        for at in re.finditer(r"(?<!\d)0(?!\d)", first)
    )
    return numbered and all(NUMBER_OF.search(one) for one in listed(columns.get("label", "label")))


def _unclear(values: list[Any], column: str, key: str) -> str:
    """Why the values of a label are not understood, and what to type, or to write where `key` is that of a source."""
    shown = ", ".join(show(value) for value in values[:SEVERAL])
    if not values:
        return f"the column {column!r} holds no label in the first rows; name another: {key.removesuffix('label')}columns.label=COLUMN"
    if len(values) > SEVERAL:
        return f"the column {column!r} holds more than {SEVERAL} different values ({shown}, ...), and is no label"
    found = f"found the labels {shown} in the column {column!r}, which can mean more than one thing"
    ends = sorted(values, key=lambda value: (isinstance(value, str), str(value)))
    if {comparable(value) for value in values} <= {0.0, 1.0}:
        return (
            f"{found}; type {setting(key, '{first: 0, second: 1}')} where 0 means that the first completion is better, "
            f"{setting(key, '{first: 1, second: 0}')} where 1 does"
        )
    numbers = sorted(number for value in values if isinstance(number := comparable(value), float))
    low, high = (numbers[0], numbers[-1]) if len(numbers) == len(values) else (0.0, 0.0)
    if low == -high < 0 and len(numbers) > 2:  # a scale, such as -3 to 3
        return (
            f"{found}; type {setting(key, f'{{first: {low:g}, second: {high:g}, tie: 0}}')} where {low:g} means that the first "
            f"completion is better, {setting(key, f'{{first: {high:g}, second: {low:g}, tie: 0}}')} where {high:g} does; what lies "
            "between goes to the nearer"
        )
    first, second, *tie = (
        [1, 2, 0]
        if {comparable(value) for value in values} == {0.0, 1.0, 2.0}
        else ends + ["B"] * (len(ends) < 2)
    )
    rest = f", tie: {tie[0] if len(tie) == 1 else tie}" if tie else ""
    meaning = f"{{first: {first}, second: {second}{rest}}}"
    return f"{found}; type what they mean, for example {setting(key, meaning)}"
