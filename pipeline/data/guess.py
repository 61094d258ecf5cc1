"""Guesses which columns of a file the fields of a stage may be, from their names and from their values.

A guess is only shown, as the data.columns to set, and only if rows can be read with it.
"""

import contextlib
import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from pipeline.config.stages import STAGE
from pipeline.data import reshape
from pipeline.data.messages import dialogue, offered
from pipeline.data.reshape import Preprocess, listed, value_at
from pipeline.data.shapes import LABELS as VERDICTS
from pipeline.data.shapes import is_good, kind_of, parse, shape_of
from pipeline.data.values import RowError, setting, some
from pipeline.errors import InputError, visible

# What other datasets call a field.
ALIASES = {
    "prompt": "question query instruction input problem user".split(),
    "completion": "response output answer solution target reply assistant".split(),
    "chosen": "preferred accepted winner better good positive chosen_response response_j preferred_output".split(),
    "rejected": "dispreferred refused loser worse bad negative rejected_response response_k non_preferred_output".split(),
    "label": "thumb thumbs feedback rating liked desirable".split(),
    "messages": "conversation dialogue dialog chat turns".split(),
}  # fmt: skip
LOOKED = 50  # rows that are read with a guess
# Words in which the names of a pair's two columns differ.
PAIRED = (("1", "2"), ("0", "1"), ("a", "b"), ("first", "second"), ("left", "right"))
LABELS = "label preference winner choice choose better preferred annotator vote judge verdict".split()
SCORES = "score rating reward votes likes points".split()  # more of these is better, unlike ranks and lengths
PROMPTS = "post history context title article document source human text review".split()


def misfit(rows: Sequence[dict[str, Any]], stage: str, file: str, key: str = "data") -> str:
    """Returns the message for a file in which no row has a shape of the stage. `key` names its source, or all sources."""
    found = visible(
        ", ".join(dict.fromkeys(name for row in rows[:LOOKED] for name in some(row))), lines=False
    )
    numbers = f"rows 1-{len(rows):,} match" if len(rows) > 1 else "row 1 matches"
    head = f"{visible(file, lines=False)}: {numbers} no format of `{stage}`; the columns are {found[:300] or 'none'}"
    guess = guessed(rows, stage)
    if guess:
        return f"{head}; set {as_setting(guess, rows, key)}"
    if others := fitting(rows):
        return f"{head}; such rows fit {others}"
    shape = next(iter(kind_of(stage).shapes.values()))
    blank = ", ".join(f"{name}: COLUMN" for name in shape)
    return (
        f"{head}; expected one of {' | '.join(kind_of(stage).shapes)}: name the columns, "
        f"{setting(f'{key}.columns', f'{{{blank}}}')}, or make such rows, {key}.transform=python:MODULE:FUNCTION"
    )


def fitting(rows: Sequence[dict[str, Any]]) -> str:
    """Returns in words which stages rows fit, as they are or with which data.columns, or "" if they fit none."""
    fits: dict[str, list[str]] = {}
    for stage, facts in STAGE.items():
        if facts.learns and (guess := guessed(rows, stage)) is not None:
            fits.setdefault(f"with {as_setting(guess, rows)}" if guess else "as they are", []).append(stage)
    words = {
        how: " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) for how, names in fits.items()
    }
    return "; ".join(f"{stages} {how}" for how, stages in words.items())


def as_setting(guess: dict[str, Any], rows: Sequence[dict[str, Any]], key: str = "data") -> str:
    """Returns the guess as it is written on a command line, or in the job file if `key` names one source."""
    shown = setting(f"{key}.columns", mapping(guess))
    if not is_clear(guess, rows):
        label = setting(f"{key}.label", meaning(guess))
        return f"{shown} and {label} for what its values mean"
    return shown


def mapping(guess: dict[str, Any]) -> str:
    """Returns the guess as data.columns, in YAML on one line."""
    return "{" + ", ".join(f"{field}: {_yaml(column)}" for field, column in guess.items()) + "}"


def is_clear(guess: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Returns True if the values show what the labels mean, or if the guess has no labels."""
    return _rule(guess, rows) is not None


def meaning(guess: dict[str, Any]) -> str:
    """Returns the data.label to fill in."""
    return "{first: VALUE, second: VALUE}" if "first" in guess else "{good: VALUE, bad: VALUE}"


def _yaml(column: str | list[str]) -> str:
    if isinstance(column, list):
        return f"[{', '.join(map(_yaml, column))}]"
    # Not null, yes, on
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", column) and yaml.safe_load(column) == column
    return column if plain else json.dumps(column, ensure_ascii=False)


def guessed(rows: Sequence[dict[str, Any]], stage: str) -> dict[str, Any] | None:
    """Returns {field: column} with which most rows can be read, {} if they need no mapping, or None if no guess fits."""
    rows = rows[:LOOKED]
    columns = _columns(rows)
    guess = next((guess for guess in _candidates(columns, stage) if reads(rows, guess, stage)), None)
    if guess is None:
        return None
    free = {name: values for name, values in columns.items() if name not in _used(guess)}
    if stage == "sft":
        names = {*VERDICTS, *ALIASES["label"]}
        labels = [name for name, values in free.items() if _words(name) & names and _is_verdict(values)]
        if labels and labels[0] not in VERDICTS:
            guess |= {"label": labels[0]}
    if stage in ("sft", "ppo") and "tools" not in rows[0]:
        tools = [name for name, values in free.items() if _is_tools(values)]
        guess |= {"tools": tools[0]} if tools else {}
    return guess


def reads(rows: Sequence[dict[str, Any]], guess: dict[str, Any], stage: str) -> bool:
    """Returns True if with these data.columns at least half of the rows have a shape, and one can be read."""
    rows = rows[:LOOKED]
    kind = kind_of(stage, Preprocess(guess, _rule(guess, rows) or _any_rule(guess, rows)))
    shaped = read = 0
    for made in itertools.chain.from_iterable(map(kind.rows, rows)):
        if not isinstance(made, dict):
            shaped += not isinstance(made, RowError)  # a tie
            continue
        shaped += shape_of(made, kind) is not None
        try:
            parse(made, kind)
            read += 1
        except RowError:
            continue
    return 2 * shaped >= len(rows) and read > 0


def _rule(guess: dict[str, Any], rows: Sequence[dict[str, Any]]) -> reshape.Rule | None:
    """Returns what the labels mean, an empty rule if the guess needs none, or None if the labels do not show it."""
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
    """Returns a rule that accepts all values of a label, to test whether the other fields can be read."""
    values = tuple(map(reshape.comparable, _labels(guess, rows)))
    return reshape.Rule(values) if "first" in guess else reshape.Rule(good=values)


def _labels(guess: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns the labels of rows, without nulls, lists and objects."""
    found = []
    for row in rows:
        for name in listed(guess.get("label", "label")):
            with contextlib.suppress(KeyError):
                found.append(value_at(row, name))
    return [value for value in found if value is not None and not isinstance(value, list | dict)]


# ---- columns and their values ----------------------------------------------------------------------------------------

Values = list[Any]  # a column's values in the first rows, without nulls


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Values]:
    """Returns the columns, and the fields of columns with an object (`question.full_text`) or two (`summaries.0.text`)."""
    columns: dict[str, Values] = {}
    for row in rows:
        for name in some(row):
            value = row[name]
            objects = {name: value} if isinstance(value, dict) else {}
            if isinstance(value, list) and len(value) == 2 and all(isinstance(one, dict) for one in value):
                objects = {f"{name}.{at}": one for at, one in enumerate(value)}
            inner = {f"{path}.{key}": one[key] for path, one in objects.items() for key in some(one)}
            for path, one in {name: value, **inner}.items():
                columns.setdefault(path, []).extend([one] if one is not None else [])
    return {name: values for name, values in columns.items() if values}


def _words(name: str) -> set[str]:
    return {name, *re.split(r"[^a-z]+", name.lower())}


def _is_text(values: Values) -> bool:
    texts = [value for value in values if isinstance(value, str)]
    return 2 * len(texts) > len(values) and any(len(text.split()) > 1 for text in texts)


def _is_chat(values: Values) -> bool:
    first = next((value[0] for value in values if isinstance(value, list) and value), None)
    keys = first.keys() if isinstance(first, dict) else set()
    return bool({"role", "from"} & keys) or {"input", "output"} <= keys


def _is_dialogue(name: str, values: Values) -> bool:
    """Returns True if most values are complete conversations, in any form."""
    listed = any(isinstance(value, list) and value and isinstance(value[0], str) for value in values)
    if listed and name not in ("messages", "conversations", "data", *ALIASES["messages"]):
        return False  # several texts, but of what?
    turns = [one for one in map(dialogue, values) if isinstance(one, list)]
    long = sum(len(one) > 1 for one in turns)
    roles = all(isinstance(item, dict) and "role" in item for one in turns for item in one)
    return _is_chat(values) or (2 * long > len(values) and roles)


def _is_tools(values: Values) -> bool:
    found = [tools for value in values if (tools := offered(value))]
    return bool(found) and all("function" in tool for tools in found for tool in tools)


def _numbers(values: Values) -> list[float]:
    """Returns the values as numbers, or [] if one of them is not a number."""
    numbers = [*map(reshape.comparable, values)]
    return numbers if all(isinstance(number, float) for number in numbers) else []


def _is_label(values: Values) -> bool:
    """Returns True for few different values of at most two words, or for numbers from 1 to 2, as in AlpacaEval."""
    numbers = _numbers(values)
    if numbers and 1 <= min(numbers) < 1.5 < max(numbers) <= 2:
        return True
    different = {str(reshape.comparable(value)) for value in values if not isinstance(value, list | dict)}
    least = 2 if len(values) > 1 else 1  # one value alone is no label if there are several rows
    return least <= len(different) <= reshape.SEVERAL and all(len(value.split()) < 3 for value in different)


def _is_verdict(values: Values) -> bool:
    return None not in map(is_good, values)


# ---- candidates ------------------------------------------------------------------------------------------------------


def _candidates(columns: dict[str, Values], stage: str) -> Iterator[dict[str, Any]]:
    """Yields mappings to try, the likeliest first."""
    yield {}
    pairs, prompts = [*_pairs(columns)], _prompts(columns)
    if stage == "ppo":
        yield from ({"prompt": name} for name in prompts if not _is_label(columns[name]))
    elif stage != "sft":
        for pair in pairs:
            if {"prompt", "instruction"} & columns.keys():
                yield _unlike(pair)
            free = [name for name in prompts if name not in _used(pair)]
            yield from (_unlike({"prompt": name, **pair}) for name in free)
            yield _unlike(pair)
    if pairs:
        return  # the other candidates would misread one completion of a pair
    if stage == "sft":
        yield from _demonstrations(columns)
    if stage == "kto":
        yield from _rated(columns)
    for needs in kind_of(stage).shapes.values():  # by the names alone
        called = {need: _called(need, columns) for need in needs}
        if None not in called.values() and len({*called.values()}) == len(needs):
            yield _unlike(called)


def _demonstrations(columns: dict[str, Values]) -> Iterator[dict[str, Any]]:
    yield from (_unlike({"messages": name}) for name in columns if _is_dialogue(name, columns[name]))
    if "instruction" in columns and (output := _called("completion", columns)):
        context = {"input": "context"} if "context" in columns and "input" not in columns else {}
        yield _unlike({"instruction": "instruction", **context, "output": output})
    texts = [name for name, values in columns.items() if _is_text(values) and not _is_tools(values)]
    for prompt in _prompts(columns):
        if name := _called("completion", [name for name in texts if name != prompt]):
            yield _unlike({"prompt": prompt, "completion": name})


def _rated(columns: dict[str, Values]) -> Iterator[dict[str, Any]]:
    names = ("label", *ALIASES["label"])
    verdicts = [
        name
        for name, values in columns.items()
        if (_is_verdict(values) and len({*map(is_good, values)}) == 2)
        or (_numbers(values) and not _is_verdict(values) and _words(name) & {*names})
    ]
    for label in sorted(verdicts, key=lambda name: name not in names):
        others = {name: values for name, values in columns.items() if name != label}
        for guess in ({}, *_demonstrations(others)):
            yield _unlike({**guess, "label": label})


def _prompts(columns: dict[str, Values]) -> list[str]:
    """Returns columns that may be the prompt, sorted by name, then by position."""
    known = ("prompt", *ALIASES["prompt"], *PROMPTS)

    def rank(name: str) -> tuple[bool, int]:
        words = _words(name)
        place = next((at for at, word in enumerate(known) if word in words), len(known))
        return _is_label(columns[name]), place

    texts = [
        name
        for name, values in columns.items()
        if (_is_text(values) or _is_chat(values)) and not _is_tools(values)
    ]
    # excludes a field of one of two objects in a list (`summaries.0.text`)
    free = [name for name in texts if not re.search(r"\.[01]\.", name) and not name.startswith("system")]
    return sorted(free, key=rank)


def _pairs(columns: dict[str, Values]) -> Iterator[dict[str, Any]]:
    """Yields mappings of both completions: by names that say which is better, or with labels or scores."""
    texts = [name for name, values in columns.items() if not _numbers(values)]
    chosen = _called("chosen", texts)
    rejected = _called("rejected", [name for name in texts if name != chosen])
    if chosen and rejected:
        yield {"chosen": chosen, "rejected": rejected}
    labels = [name for name, values in columns.items() if _is_label(values)]
    named_labels = [name for name in labels if any(word in name.lower() for word in LABELS)]
    flags = [name for name in named_labels if {*_numbers(columns[name])} in ({0.0, 1.0}, {0.0}, {1.0})]
    numbers = [
        name
        for name, values in columns.items()
        if _numbers(values) and any(word in name.lower() for word in SCORES)
    ]
    for first, second, ends in _siblings([n for n in texts if _is_text(columns[n]) or _is_chat(columns[n])]):
        both = {"first": first, "second": second}
        scores = [(one, two) for one, two, _ in (*_siblings(flags, ends), *_siblings(numbers, ends))]
        if scores:
            yield {**both, "first_score": scores[0][0], "second_score": scores[0][1]}
        voters = [name for name in named_labels if re.search(r"\d$", name)]
        if len(voters) > 1:
            yield {**both, "label": voters}
        yield from ({**both, "label": name} for name in named_labels)


def _siblings(
    names: list[str], ends: tuple[str, str] | None = None
) -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Yields names of two columns that differ only in one pair of PAIRED, and this pair."""
    for low, high in [ends] if ends else PAIRED:
        before = r"(?<!\d)" if low.isdigit() else "(?<![a-zA-Z])"  # response1, but not data
        for name in names:
            for match in re.finditer(rf"(?i){before}{low}(?![a-z0-9])", name):
                end = high.upper() if match[0].isupper() else high
                other = name[: match.start()] + end + name[match.end() :]
                if other in names and other != name:
                    yield name, other, (low, high)


def _called(field: str, names: Iterable[str]) -> str | None:
    """Returns the column that probably is a field, by its spelling or by its name in other datasets, or None."""
    names = [*names]
    aliases = (field, *ALIASES.get(field, ()))
    exact = [alias for alias in aliases if alias in names]
    words = {name: re.split(r"[^a-z0-9]+", name.lower()) for name in names}
    within = (
        name for alias in aliases for name in names if alias in words[name] and "non" not in words[name]
    )
    return next(iter([*exact, *within, *difflib.get_close_matches(field, names, 1)]), None)


def _unlike(guess: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the guess without the fields whose column has the same name."""
    return {field: column for field, column in guess.items() if field != column}


def _used(guess: Mapping[str, Any]) -> set[str]:
    return {one for column in guess.values() for one in listed(column)}
