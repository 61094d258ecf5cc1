"""Which columns of a file may be meant by the fields of a stage: guessed from their names, and from a look at their values.

A guess is only ever shown, as the data.columns to type; and only if rows can be read with it.
"""

import contextlib
import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.config.stages import STAGE
from pipeline.data import reshape
from pipeline.data.messages import dialogue, offered
from pipeline.data.reshape import Preprocess, named, value_at
from pipeline.data.shapes import ALIASES, as_json, is_good, kind_of, parse, shape_of
from pipeline.data.shapes import LABELS as VERDICTS
from pipeline.data.values import RowError, setting, some
from pipeline.errors import InputError, visible

LOOKED = 50  # rows that are read with a guess
# Of the two columns of a pair, what their names differ in.
PAIRED = (("1", "2"), ("0", "1"), ("a", "b"), ("first", "second"), ("left", "right"))
LABELS = "label preference winner choice choose better preferred annotator vote judge verdict".split()
SCORES = "score rating reward votes likes points".split()  # of which more is better, unlike ranks and lengths
PROMPTS = "post history context title article document source human text review".split()


@dataclass(frozen=True)
class Column:
    """A column, or a field of a column of objects, and what its values in the first rows look like."""

    name: str
    values: list[Any]

    @property
    def is_text(self) -> bool:
        texts = [value for value in self.values if isinstance(value, str)]
        return 2 * len(texts) > len(self.values) and any(len(text.split()) > 1 for text in texts)

    @property
    def is_chat(self) -> bool:
        first = next((value[0] for value in self.values if isinstance(value, list) and value), None)
        return isinstance(first, dict) and bool(
            {"role", "from"} & first.keys() or {"input", "output"} <= first.keys()
        )

    @property
    def is_dialogue(self) -> bool:
        """Whether most values are conversations from the first turn to the last, whatever their form."""
        listed = any(isinstance(value, list) and value and isinstance(value[0], str) for value in self.values)
        if listed and self.name not in ("messages", "conversations", "data", *ALIASES["messages"]):
            return False  # several texts, but of what?
        turns = [dialogue(value) for value in self.values]
        return self.is_chat or (
            2 * sum(isinstance(one, list) and len(one) > 1 for one in turns) > len(turns)
            and (
                all(
                    isinstance(item, dict) and "role" in item
                    for one in turns
                    if isinstance(one, list)
                    for item in one
                )
            )
        )

    @property
    def is_tools(self) -> bool:
        """Functions that may be called."""
        found = [tools for value in self.values if (tools := offered(value))]
        return bool(found) and all("function" in tool for tools in found for tool in tools)

    @property
    def is_number(self) -> bool:
        return all(isinstance(reshape.comparable(value), float) for value in self.values) and bool(
            self.values
        )

    @property
    def is_verdict(self) -> bool:
        """Whether its name and values say which completions are good."""
        words = {self.name, *re.split(r"[^a-z]+", self.name.lower())}
        return bool(words & {*VERDICTS, *ALIASES["label"]}) and all(
            is_good(value) is not None for value in self.values
        )

    @property
    def is_rating(self) -> bool:
        """Whether it holds numbers, by name of ratings, that do not say which completions are good."""
        words = {*re.split(r"[^a-z]+", self.name.lower())}
        return self.is_number and not self.is_verdict and bool(words & {"label", *ALIASES["label"]})

    @property
    def is_element(self) -> bool:
        """Whether it is a part of one of two objects in a list (`summaries.0.text`)."""
        return bool(re.search(r"\.[01]\.", self.name))

    @property
    def is_label(self) -> bool:
        """Few different values, each a number or a word or two; one alone is no label where there are several rows.

        Or numbers from 1 to 2, as AlpacaEval's.
        """
        if self.is_number:
            numbers = [reshape.comparable(value) for value in self.values]
            if 1 <= min(numbers) < 1.5 < max(numbers) <= 2:
                return True
        different = {
            str(reshape.comparable(value)) for value in self.values if not isinstance(value, list | dict)
        }
        least = 2 if len(self.values) > 1 else 1
        return least <= len(different) <= reshape.SEVERAL and all(
            len(value.split()) <= 2 for value in different
        )

    def picks(self, ends: tuple[str, str]) -> bool:
        """Whether its values are what the names of two columns end in, whatever it is called itself; one more may be a tie."""
        different = {str(value).strip().lower().removesuffix(".0") for value in self.values}
        return set(ends) <= different and len(different) <= 3

    @property
    def length(self) -> float:
        """Mean number of characters."""
        return sum(len(str(value)) for value in self.values) / len(self.values)

    @property
    def repeats(self) -> float:
        """The share of values that stand in an earlier row, too."""
        return 1 - len({str(value) for value in self.values}) / len(self.values)


def misfit(rows: Sequence[dict[str, Any]], stage: str, file: str, key: str = "data") -> str:
    """What to say of a file of whose rows none has a shape of the stage, and what to type; `key` of its source, or of all."""
    found = visible(
        ", ".join(dict.fromkeys(name for row in rows[:LOOKED] for name in some(row))), lines=False
    )
    numbers = f"rows 1-{len(rows):,} are" if len(rows) > 1 else "row 1 is"
    head = f"{visible(file, lines=False)}: {numbers} of no shape that `{stage}` reads; found the columns {found[:300] or 'none'}"
    guess = guessed(rows, stage)
    if guess:
        return f"{head}; type {typed(guess, rows, key)}"
    if others := fitting(rows):
        return f"{head}; such rows fit {others}"
    shape = next(iter(kind_of(stage).shapes.values()))
    blank = ", ".join(f"{name}: COLUMN" for name in shape)
    return (
        f"{head}; expected one of {' | '.join(kind_of(stage).shapes)}: name the columns, "
        f"{setting(f'{key}.columns', f'{{{blank}}}')}, or make such rows, {key}.transform=python:MODULE:FUNCTION"
    )


def fitting(rows: Sequence[dict[str, Any]]) -> str:
    """The stages that rows fit, as they are or with which data.columns, in words; empty: none."""
    fits: dict[str, list[str]] = {}
    for stage, facts in STAGE.items():
        if facts.learns and (guess := guessed(rows, stage)) is not None:
            fits.setdefault(f"with {typed(guess, rows)}" if guess else "as they are", []).append(stage)
    return "; ".join(f"{_listed(stages)} {how}" for how, stages in fits.items())


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def typed(guess: dict[str, Any], rows: Sequence[dict[str, Any]], key: str = "data") -> str:
    """The guess as it is typed behind a command, or written where `key` is that of a source."""
    shown = setting(f"{key}.columns", mapping(guess))
    if not is_clear(guess, rows):
        label = setting(f"{key}.label", meaning(guess))
        return f"{shown} and {label} for what its values mean"
    return shown


def mapping(guess: dict[str, Any]) -> str:
    """The guess as data.columns, in YAML on one line."""
    return "{" + ", ".join(f"{field}: {_yaml(column)}" for field, column in guess.items()) + "}"


def is_clear(guess: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Whether it follows from the values what the labels mean, if the guess has any."""
    return _rule(guess, rows) is not None


def meaning(guess: dict[str, Any]) -> str:
    """Returns the data.label to fill in."""
    return "{first: VALUE, second: VALUE}" if "first" in guess else "{good: VALUE, bad: VALUE}"


def _yaml(column: str | list[str]) -> str:
    if isinstance(column, list):
        return f"[{', '.join(map(_yaml, column))}]"
    plain = (
        re.fullmatch(r"[A-Za-z_][\w.-]*", column) and yaml.safe_load(column) == column
    )  # not null, yes, on
    return column if plain else json.dumps(column, ensure_ascii=False)


def guessed(rows: Sequence[dict[str, Any]], stage: str) -> dict[str, Any] | None:
    """{field: column} with which most of the rows can be read, {} if they can be as they are; None: nothing fits."""
    rows = rows[:LOOKED]
    columns = _columns(rows)
    guess = next((guess for guess in _candidates(columns, stage) if reads(rows, guess, stage)), None)
    if guess is not None and stage == "sft":
        verdict = next(
            (one.name for one in columns if one.is_verdict and one.name not in _used(guess)), "label"
        )
        guess |= {} if verdict in VERDICTS else {"label": verdict}
    tools = next((one.name for one in columns if one.is_tools), "tools")
    if guess is None or "tools" in rows[0] or tools == "tools" or tools in _used(guess):
        return guess
    return {**guess, "tools": tools} if stage in ("sft", "ppo") else guess


def reads(rows: Sequence[dict[str, Any]], guess: dict[str, Any], stage: str) -> bool:
    """Whether at least half of the rows are of a shape with these data.columns, and one can be read."""
    rows = rows[:LOOKED]
    kind = kind_of(stage, Preprocess(guess, _rule(guess, rows) or _any_rule(guess, rows)))
    shaped = read = 0
    for made in itertools.chain.from_iterable(map(kind.rows, rows)):
        if not isinstance(made, dict):
            shaped += not isinstance(made, RowError)  # a tie
            continue
        shaped += shape_of(made, kind) is not None
        try:
            parse(as_json(made, kind, "parquet"), kind)
            read += 1
        except RowError:
            continue
    return 2 * shaped >= len(rows) and read > 0


def _rule(guess: dict[str, Any], rows: Sequence[dict[str, Any]]) -> reshape.Rule | None:
    """What the labels mean; an empty rule where the guess needs none, None where it does not follow from them."""
    labels = _labels(guess, rows)
    if "first" not in guess and "label" in guess:
        return None if any(is_good(value) is None for value in labels) else reshape.Rule()
    if "first" not in guess or "first_score" in guess:
        return reshape.Rule()
    try:
        return reshape.derived(labels, guess)
    except InputError:
        return None


def _any_rule(guess: dict[str, Any], rows: Sequence[dict[str, Any]]) -> reshape.Rule:
    """A rule that knows all values of a label, to see whether the rest of the rows can be read."""
    values = tuple(map(reshape.comparable, _labels(guess, rows)))
    return reshape.Rule(values) if "first" in guess else reshape.Rule(good=values)


def _labels(guess: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The labels of rows, without nulls, lists and objects."""
    found = []
    for row in rows:
        for name in named(guess.get("label", "label")):
            with contextlib.suppress(KeyError):
                found.append(value_at(row, name))
    return [value for value in found if value is not None and not isinstance(value, list | dict)]


# ---- candidates ------------------------------------------------------------------------------------------------


def _candidates(columns: list[Column], stage: str) -> Iterator[dict[str, Any]]:
    """Mappings worth a try, the likeliest first."""
    yield {}
    if stage == "sft":
        yield from _demonstrations(columns)
    elif stage == "ppo":
        yield from ({"prompt": one.name} for one in _prompts(columns) if not one.is_label)
    else:
        yield from _thumbs(columns) if stage == "kto" else ()
        for pair in _pairs(columns):
            free = [one for one in columns if one.name not in _used(pair)]
            if any(one.name in ("prompt", "instruction") for one in columns):
                yield _unlike(pair)
            yield from (_unlike({"prompt": one.name, **pair}) for one in _prompts(free))
            yield _unlike(pair)
    if next(_pairs(columns), None):
        return  # what is left would take one side of a pair for something else
    for needs in kind_of(stage).shapes.values():  # by the names alone
        called = {need: _called(need, columns) for need in needs}
        if None not in called.values() and len({*called.values()}) == len(needs):
            yield _unlike(called)


def _demonstrations(columns: list[Column]) -> Iterator[dict[str, Any]]:
    if next(_pairs(columns), None):
        return  # which of two completions is to be imitated?
    yield from (_unlike({"messages": one.name}) for one in columns if one.is_dialogue)
    names = {one.name for one in columns}
    if "instruction" in names and (output := _called("completion", columns)):
        context = {"input": "context"} if "context" in names - {"input"} else {}
        yield _unlike({"instruction": "instruction", **context, "output": output})
    for prompt in _prompts(columns):
        others = [one for one in columns if one.is_text and one is not prompt and not one.is_tools]
        if name := _called("completion", others):
            yield _unlike({"prompt": prompt.name, "completion": name})
    for prompt in _prompts(columns):
        for one in sorted(columns, key=lambda one: -one.length):
            if one.is_text and one is not prompt and not one.is_tools:
                yield _unlike({"prompt": prompt.name, "completion": one.name})


def _thumbs(columns: list[Column]) -> Iterator[dict[str, Any]]:
    if next(_pairs(columns), None):
        return
    verdicts = [
        one
        for one in columns
        if all(is_good(value) is not None for value in one.values)
        and len({is_good(value) for value in one.values}) == 2
    ] + [one for one in columns if one.is_rating]
    for one in sorted(verdicts, key=lambda one: one.name not in ("label", *ALIASES["label"])):
        for guess in ({}, *_demonstrations([other for other in columns if other is not one])):
            yield _unlike({**guess, "label": one.name})


def _prompts(columns: list[Column]) -> list[Column]:
    """Columns that may be the prompt: by name, then those whose values repeat, then in their order."""
    texts = [
        one
        for one in columns
        if (one.is_text or one.is_chat)
        and not one.is_tools
        and not one.is_element
        and one.name not in ("system", "system_prompt")
    ]
    words = ("prompt", *ALIASES["prompt"], *PROMPTS)

    def rank(one: Column) -> tuple[bool, int, float]:
        parts = re.split(r"[^a-z]+", one.name.lower())
        named = next((at for at, word in enumerate(words) if word in parts), len(words))
        return one.is_label, named, -one.repeats

    return sorted(texts, key=rank)


def _pairs(columns: list[Column]) -> Iterator[dict[str, Any]]:
    """Mappings of both completions: by names that say which is better, or with what else says it."""
    texts = [one for one in columns if not one.is_number]
    chosen = _called("chosen", texts)
    rejected = _called("rejected", [one for one in texts if one.name != chosen])
    if chosen and rejected:
        yield {"chosen": chosen, "rejected": rejected}
    for first, second, ends in _siblings([one for one in columns if one.is_text or one.is_chat]):
        both = {"first": first, "second": second}
        numbers = [
            one for one in columns if one.is_number and any(word in one.name.lower() for word in SCORES)
        ]
        scores = [(one, two) for one, two, _ in _siblings(numbers, ends)]
        labels = [one for one in columns if one.is_label and any(word in one.name.lower() for word in LABELS)]
        for one, two, _ in _siblings(labels, ends):
            if one_hot := _one_hot(one, two, columns):
                yield {**both, **one_hot}
        labels = labels or [one for one in columns if one.is_label and one.picks(ends)]
        if scores:
            score = next((pair for pair in scores if "score" in pair[0].lower()), scores[0])
            found = {**both, "first_score": score[0], "second_score": score[1]}
            if "score" in score[0].lower() or not labels:
                yield found
        voters = [one.name for one in labels if re.sub(r"\d+$", "", one.name) != one.name]
        if len(voters) > 1:
            yield {**both, "label": voters}
        yield from ({**both, "label": one.name} for one in labels)


def _one_hot(first: str, second: str, columns: list[Column]) -> dict[str, str]:
    """Returns the scores of both sides if each of two columns says whether its side wins; a tie has 0 in both."""
    flags = [one.values for one in columns if one.name in (first, second)]
    if all({*map(reshape.comparable, values)} <= {0.0, 1.0} for values in flags) and not any(
        all(map(reshape.comparable, both)) for both in zip(*flags, strict=False)
    ):
        return {"first_score": first, "second_score": second}
    return {}


def _siblings(
    columns: list[Column], ends: tuple[str, str] | None = None
) -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Names of two columns that differ in one of PAIRED alone, and in which."""
    names = [one.name for one in columns]
    for low, high in [ends] if ends else PAIRED:
        before = r"(?<!\d)" if low.isdigit() else "(?<![a-zA-Z])"  # response1, but not data
        for name in names:
            for match in re.finditer(rf"(?i){before}{low}(?![a-z0-9])", name):
                other = (
                    name[: match.start()]
                    + (high.upper() if match[0].isupper() else high)
                    + name[match.end() :]
                )
                if other in names and other != name:
                    yield name, other, (low, high)


def _called(field: str, columns: list[Column]) -> str | None:
    """The column that a field is likely to be called, by its spelling or as other data sets do."""
    names = [one.name for one in columns]
    if field in names:
        return field
    words = {name: re.split(r"[^a-z0-9]+", name.lower()) for name in names}
    aliases = next((alias for alias in ALIASES.get(field, ()) if alias in names), None)
    within = next(
        (
            name
            for word in (field, *ALIASES.get(field, ()))
            for name in names
            if word in words[name] and "non" not in words[name]
        ),
        None,
    )
    return aliases or within or next(iter(difflib.get_close_matches(field, names, 1)), None)


def _unlike(guess: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields whose column has their name."""
    return {field: column for field, column in guess.items() if field != column}


def _used(guess: dict[str, Any]) -> set[str]:
    return {one for column in guess.values() for one in named(column)}


def _columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns of rows, and the fields of those that hold objects (`question.full_text`) or two (`summaries.0.text`)."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name in some(row):
            value = row[name]
            objects = {name: value} if isinstance(value, dict) else {}
            if isinstance(value, list) and len(value) == 2 and all(isinstance(one, dict) for one in value):
                objects = {f"{name}.{at}": one for at, one in enumerate(value)}
            inner = {f"{path}.{key}": one[key] for path, one in objects.items() for key in some(one)}
            for path, one in {name: value, **inner}.items():
                values.setdefault(path, [])
                values[path] += [one] if one is not None else []
    return [Column(name, found) for name, found in values.items() if found]
