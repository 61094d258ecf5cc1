"""Interprets labels, which rate a completion as good or bad, or show which of two completions is better.

data.label defines the meaning of each label value. Without data.label, a rule is derived from the labels of the first rows, if
these labels are unambiguous. Unambiguous labels are numbers from 1 to 2 (1.5 is a tie), `tie`, and words such as a and b, or
model_a and model_b. Labels 0 and 1 are ambiguous, because 1 may be the number of the better completion, or mean that the first
completion is better.
"""

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.values import RowError, how_to_set, parse_json, show_json
from pipeline.errors import InputError

# Columns that label completions as good or bad in TRL's KTOTrainer and LLaMA-Factory
LABEL_FIELDS = {"label", "kto_tag"}
_BAD = (
    "bad dislike disliked down f fail failed false flagged harmful incorrect n negative no reject rejected thumbs_down toxic "
    "undesirable unsafe wrong 👎"
)
BAD = (0, -1, *_BAD.split())
_GOOD = "accept accepted approved chosen correct desirable good like liked ok pass passed positive safe t thumbs_up true up y yes 👍"
GOOD = (1, *_GOOD.split())
_SIDE = r"(?:model|response|reply|output|answer|completion|text|option|summary|assistant|conversation|candidate|system)?"
SIDE_WORDS = {
    "first": re.compile(rf"{_SIDE}(?:a|1|first|left)(?:better|isbetter|wins?)?"),
    "second": re.compile(rf"{_SIDE}(?:b|2|second|right)(?:better|isbetter|wins?)?"),
    "tie": re.compile(r"(?:tie|tied|draw|equal|same|both|neither|none).*"),
}
MEANINGS = ("first", "second", "tie", "good", "bad")
UNRATED = ("nan", "n/a", "na", "#n/a", "<na>", "null", "none")
MAX_VALUES = 12  # maximum number of distinct values of a label column
RARE = 0.05  # unknown texts are errors of single rows up to this fraction of the labels


# ---- one value -------------------------------------------------------------------------------------------------------


def as_list(values: Any) -> list[Any]:
    """Converts a value to a list. Null becomes an empty list, and any other value becomes the only element."""
    return [*values] if isinstance(values, list | tuple) else [] if values is None else [values]


def unpacked_label(label: Any) -> Any:
    """Parses a JSON list of labels, as in CSV files. Returns any other label unchanged."""
    parsed = parse_json(label) if isinstance(label, str) and label.lstrip().startswith("[") else label
    return parsed if isinstance(parsed, list) else label


def normalize_label(value: Any) -> Any:
    """Normalizes a label for comparisons: numbers and numeric text become float, other text becomes lower case."""
    if isinstance(value, str):
        value = value.strip().lower()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def is_blank(value: Any) -> bool:
    """Returns True for null and blank text. Empty cells of CSV files are empty text."""
    return value is None or (isinstance(value, str) and not value.strip())


def is_unrated(value: Any) -> bool:
    """Returns True for a blank rating, and for texts that pandas and spreadsheets write for a missing value."""
    return is_blank(value) or (isinstance(value, str) and value.strip().lower() in UNRATED)


def is_good_label(label: Any) -> bool | None:
    """Returns whether a label means a good completion, or None if the label means something else, such as a topic."""
    value = label.strip().lower().replace(" ", "_") if isinstance(label, str) else label
    with contextlib.suppress(ValueError, TypeError):
        value = float(value)
    if not isinstance(value, str | int | float):
        return None
    return True if value in GOOD else False if value in BAD else None


def side_of(value: Any) -> str | None:
    """Returns whether a text means the `first` completion, the `second` completion or a `tie`, or else None."""
    word = re.sub(r"[^a-z0-9]", "", value) if isinstance(value, str) else ""
    return next((name for name, pattern in SIDE_WORDS.items() if pattern.fullmatch(word)), None)


def majority_label(label: Any) -> Any:
    """Returns the majority of a list of labels: true, false, or null for no majority. Returns other labels unchanged."""
    labels = unpacked_label(label)
    votes = [is_good_label(value) for value in as_list(labels) if not is_unrated(value)]
    if None in votes or not isinstance(labels, list):
        return label
    margin = sum(1 if vote else -1 for vote in votes)
    return margin > 0 if margin else None


def parse_score(value: Any, name: str) -> float | None:
    """Returns a score in the field `name`, or None if the score is blank. Raises RowError if the score is not a finite number."""
    if is_blank(value):
        return None
    number = normalize_label(value)
    if not isinstance(number, float) or not math.isfinite(number):
        raise RowError("wrong_type", name, show_json(value), "a finite number")
    return number


# ---- the values of a column ------------------------------------------------------------------------------------------


def without_blanks(values: Iterable[Any]) -> list[Any]:
    """Returns the values without blanks. Lists are replaced by their elements."""
    return [item for value in values for item in as_list(value) if not is_unrated(item)]


def are_mostly_numbers(values: Sequence[Any]) -> bool:
    """Returns True if most values are numbers. A few texts may be typing errors."""
    return 2 * sum(isinstance(normalize_label(value), float) for value in values) > len(values)


def are_clear(labels: Sequence[Any]) -> bool:
    """Returns True if each label clearly means good or bad. With the labels 0 and -1, 0 may mean unrated."""
    return None not in map(is_good_label, labels) and not {0.0, -1.0} <= {*map(normalize_label, labels)}


def are_mostly_ratings(labels: Sequence[Any]) -> bool:
    """Returns True if most labels mean good or bad, or if some words mean good and others mean bad."""
    words = {is_good_label(label) for label in labels if isinstance(normalize_label(label), str)}
    return {True, False} <= words or 2 * [*map(is_good_label, labels)].count(None) < len(labels)


def are_labels(values: Iterable[Any]) -> bool:
    """Returns True if most values of a column have at most two words, and few of these values are distinct. A list has one label
    per annotator."""
    items = [item for value in values for item in as_list(value) if not isinstance(item, list | dict)]
    short = [text for item in items if len((text := str(normalize_label(item))).split()) < 3]
    minimum = 2 if len(items) > 1 else 1  # several labels must not all be the same
    return minimum <= len({*short}) <= MAX_VALUES and 2 * len(short) > len(items)


def are_verdicts(values: Iterable[Any]) -> bool:
    """Returns True for a few repeated texts, such as `A is better`. Unlike verdicts, completions are rarely repeated."""
    texts = [str(value) for value in values if not is_blank(value)]
    return len(texts) >= 6 and 1 < len({*texts}) <= min(10, len(texts) / 3)


def choose_sides(values: Iterable[Any]) -> bool:
    """Returns True if the values are words for the first and the second completion, and perhaps for a tie."""
    sides = {side_of(normalize_label(x)) for value in values for x in as_list(value) if not is_blank(x)}
    return {"first", "second"} <= sides <= {"first", "second", "tie"}


# ---- rules: data.label, or derived from the first rows ---------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Maps label values, which `normalize_label` has normalized, to their meanings: first, second, tie, good or bad."""

    first: tuple[Any, ...] = ()
    second: tuple[Any, ...] = ()
    tie: tuple[Any, ...] = ()
    good: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    derived: bool = False  # whether the rule comes from the first rows, which makes all SIDE_WORDS valid

    @classmethod
    def from_job(cls, label: Mapping[str, Any]) -> "Rule":
        """Converts data.label, {meaning: value or values}, to a Rule."""
        values: dict[str, Any] = {
            meaning: tuple(map(normalize_label, as_list(value))) for meaning, value in label.items()
        }
        return cls(**values)

    def _values(self) -> list[tuple[Any, str]]:
        return [(value, meaning) for meaning in MEANINGS for value in getattr(self, meaning)]

    def __str__(self) -> str:
        shown = ((f"{v:g}" if isinstance(v, float) else v, meaning) for v, meaning in self._values())
        return ", ".join(f"{value} ({meaning})" for value, meaning in shown) or "a or b, or tie"

    def meaning(self, value: Any) -> str:
        """Returns the meaning of a label. A rating between good and bad is a `tie`. Raises KeyError if the label is unknown."""
        value = normalize_label(value)
        for meaning in MEANINGS:
            if value in getattr(self, meaning) or (self.derived and side_of(value) == meaning):
                return meaning
        ends = [(end, meaning) for end, meaning in self._values() if meaning != "tie"]
        scale = [value, *(end for end, _ in ends)]
        if len(ends) != 2 or not all(isinstance(number, float) and math.isfinite(number) for number in scale):
            raise KeyError(value)
        (low, below), (high, above) = sorted(ends)
        if low < value < high:
            middle = (low + high) / 2
            return "tie" if self.good or value == middle else below if value < middle else above
        if self.good:
            return below if value < low else above
        raise KeyError(value)

    def vote(self, label: Any) -> str:
        """Returns the meaning of a label, the most frequent meaning in a list of labels, or `unlabeled` if all labels are blank.

        Raises RowError for a label without a known meaning.
        """
        votes: Counter[str] = Counter()
        for value in as_list(unpacked_label(label)):
            try:
                blank = is_unrated(value) if self.good else is_blank(value)
                votes.update([] if blank else [self.meaning(value)])
            except KeyError:
                kind = "unclear_label" if self.derived else "unknown_label"
                expected = f"{self}; data.label defines the label values"
                raise RowError(kind, "label", show_json(value), expected) from None
        (meaning, count), *others = [*votes.most_common(), ("unlabeled", 0)]
        return meaning if all(count > n for _, n in others) else "tie"


def derive_rule(labels: Sequence[Any], columns: Mapping[str, Any], key: str = "data.label") -> Rule:
    """Derives the label rule from the labels of the first rows. `columns` is the job's data.columns.

    Raises InputError if the labels are ambiguous. The error message shows how to set data.label.
    """
    items = itertools.chain.from_iterable(as_list(unpacked_label(label)) for label in labels)
    scalars = [item for item in items if not isinstance(item, list | dict) and not is_blank(item)]
    counts = Counter(map(normalize_label, scalars))
    # Ignore rare texts without a known meaning. The tasks report such texts as errors of single rows.
    values = [
        value
        for value, count in counts.items()
        if count > RARE * len(scalars) or isinstance(value, float) or side_of(value)
    ]
    scale = sorted(value for value in values if isinstance(value, float))
    sides = {side_of(value) for value in values if not isinstance(value, float)}
    # The label 1 may mean the first or the second completion, and "right" may mean correct or the second completion.
    doubtful = any(isinstance(value, str) and re.search(r"\d|^(left|right)", value) for value in values)
    if scale and 1 <= scale[0] < 1.5 < scale[-1] <= 2 and sides <= {"tie"}:
        return Rule((1.0,), (2.0,), derived=True)
    if not scale and sides and None not in sides and ({"first", "second"} <= sides or not doubtful):
        return Rule(derived=True)
    distinct = {normalize_label(label): label for label in scalars}
    shown = ", ".join(show_json(x) for x in [*distinct.values()][:MAX_VALUES]) or "no label in the first rows"
    ends = [f"{number:g}" for number in scale] if scale else sorted(map(str, distinct.values()))
    template = "{first: VALUE, second: VALUE, tie: VALUE}"
    condition = "where a VALUE may be a list"
    if len(ends) == len(distinct) > 1 and (scale or len(ends) == 2):  # the order of three words is unknown
        template = f"{{first: {ends[0]}, second: {ends[-1]}}}"
        condition = f"if {ends[0]} means that the first completion is better (add tie: VALUE for ties)"
    column = ", ".join(as_list(columns.get("label", "label")))
    raise InputError(
        f"the meaning of {shown} in the column {column!r} is ambiguous; set {how_to_set(key, template)} {condition}, or use "
        f"another column: {key.removesuffix('label')}columns.label=COLUMN",
        key=key,
    )
