"""Guesses which column contains each field that a stage needs, from the names and values of the columns.

Error messages suggest a guess as the value of data.columns. A run never applies a guess. A guess is suggested only if it makes at
least half of the rows readable.
"""

import contextlib
import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import yaml

from pipeline.data.annotations import Answered
from pipeline.data.formats import (
    Kind,
    field_names,
    format_of,
    kind_of,
    parse_imitated,
    parse_rated,
    parse_row,
)
from pipeline.data.labels import (
    BAD,
    GOOD,
    LABEL_FIELDS,
    MAX_VALUES,
    Rule,
    are_clear,
    are_labels,
    are_mostly_numbers,
    are_mostly_ratings,
    are_verdicts,
    as_list,
    choose_sides,
    derive_rule,
    is_blank,
    is_good_label,
    is_unrated,
    normalize_label,
    unpacked_label,
    without_blanks,
)
from pipeline.data.messages import READ, ROLES, unpack_messages
from pipeline.data.reshape import Preprocess, value_at
from pipeline.data.values import Dropped, RowError, how_to_set, some_keys
from pipeline.errors import InputError, escape_controls
from pipeline.job.stages import STAGE_SPECS

# {field: column names that datasets use for the field, most likely first}
NAMES = {
    field: [field, *names.split()]
    for field, names in {
        "prompt": "question query instruction input problem user post history context title article document source text review",
        "completion": "response output answer solution target reply assistant",
        "chosen": "preferred accepted winner better good positive chosen_response response_j preferred_output",
        "rejected": "dispreferred refused loser worse bad negative rejected_response response_k non_preferred_output",
        "label": "kto_tag thumb thumbs feedback rating helpful vote upvote "
        + " ".join(word for word in map(str, GOOD) if len(word) > 2),
        "messages": "conversations conversation dialogue dialog chat turns data",
    }.items()
}
CONTEXTS = ("context", "passage", "document")  # columns with the context of a question
Rows = Sequence[dict[str, Any]]
# Words that answer any question, not only whether a completion is good
ANSWERS = "true false yes no t f y n".split()
LOOKED = 50  # number of rows on which a guess is tested
# words that distinguish the names of the two columns of a pair
PAIRED = (("1", "2"), ("0", "1"), ("a", "b"), ("first", "second"), ("left", "right"))
STEM = r"[\W_]*(\d+|(?<![a-z])([a-z]|first|second|left|right)(?![a-z]))"  # pattern for PAIRED and for numbers
PREFERENCES = "label preference winner choice choose better preferred annotator vote judge verdict".split()
# Larger numbers are better in columns with one of these words in the name. In columns of ranks or lengths, smaller numbers may be
# better.
SCORES = "score rating reward votes likes points winner".split()
_SCALES = "grade quality score stars csat nps satisfaction helpfulness".split()
RATING_WORDS = {word.removesuffix("s") for word in (*NAMES["label"], *_SCALES)}


def explain_misfit(rows: Rows, kind: Kind, file: str, key: str = "data") -> str:
    """Returns the error message for a file whose rows match no format of the stage. `key` is the job's section for the rows."""
    names = dict.fromkeys(name for row in rows[:LOOKED] for name in some_keys(row))
    columns = escape_controls(", ".join(names), lines=False)
    subject = f"rows 1-{len(rows):,} match" if len(rows) > 1 else "row 1 matches"
    head = f"{escape_controls(file, lines=False)}: {subject} no format of `{kind.stage}`; the columns are {columns[:300] or 'none'}"
    if rows and format_of(rows[0], kind):
        try:
            parse_row(rows[0], kind)
        except RowError as error:
            return str(replace(error, file=file, line=1))
    if _are_messages(_columns(rows[:LOOKED])):
        advice = "combine the rows into conversations with data.group_by=COLUMN and data.transform"
        return f"{head}; each row is one message; {advice}"
    if kind.parse in (parse_imitated, parse_rated) and (problem := unclear_label_note(rows)):
        return f"{head}; {problem}"
    if guess := guess_columns(rows, kind):
        return f"{head}; set {as_setting(guess, rows, key)}"
    for name, value in rows[0].items() if len(rows) == 1 else ():
        inner = value[0] if isinstance(value, list) and value else None
        if isinstance(inner, dict) and not {"role", "from"} & inner.keys():
            return f"{head}; if the rows are in `{name}`, run jq -c '.{name}[]' FILE > NEW"
    stages = fitting_stages(rows)
    if stages and not stages.startswith("ppo with"):  # one text column may contain both prompt and completion
        return f"{head}; these rows can train {stages}"
    field_lists = [*map(field_names, kind.formats)]
    fields = next(names for names in field_lists if names[0] == "prompt" and "pos_answers" not in names)
    mappings = [fields, ("prompt", "first", "second", "label")][: 1 + ("chosen" in fields)]
    templates = ["{" + ", ".join(f"{name}: COLUMN" for name in names) + "}" for names in mappings]
    settings = " or ".join(how_to_set(f"{key}.columns", template) for template in templates)
    return (
        f"{head}; expected one of {' | '.join(kind.formats)}; set {settings}, or convert the rows with "
        f"{key}.transform=python:MODULE:FUNCTION"
    )


def fitting_stages(rows: Rows) -> str:
    """Returns a text with the stages that can read the rows and the data.columns to set, or "" if no stage can read them."""
    groups: dict[str, list[str]] = {}
    for stage, spec in STAGE_SPECS.items():
        if rows and spec.learns and (guess := guess_columns(rows, kind_of(stage))) is not None:
            groups.setdefault(f"with {as_setting(guess, rows)}" if guess else "as they are", []).append(stage)
    words = {
        text: " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) for text, names in groups.items()
    }
    return "; ".join(f"{stages} {text}" for text, stages in words.items())


def as_setting(guess: dict[str, Any], rows: Rows, key: str = "data") -> str:
    """Returns the setting of data.columns as text, and also of data.label if the meaning of the labels is unclear."""
    setting = how_to_set(f"{key}.columns", _flow(guess))
    if is_clear(guess, rows):
        return setting
    return f"{setting} and {how_to_set(f'{key}.label', label_template(guess))} with the values of the column"


def _flow(mapping: Mapping[str, Any]) -> str:
    """Returns a mapping as YAML on one line."""
    text = yaml.safe_dump(
        {**mapping}, default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False
    )
    return str(text).strip()


def is_clear(guess: dict[str, Any], rows: Rows) -> bool:
    """Returns True if the meaning of the labels follows from their values, or if the guess has no labels."""
    if "label" not in guess and ("first" not in guess or "first_score" in guess):
        return True
    labels = labels_in_rows(guess, rows)
    if "first" not in guess:  # a column without a typical label name may not rate completions
        return are_clear(labels) and bool(_called("label", as_list(guess["label"])))
    with contextlib.suppress(InputError):
        return bool(derive_rule(labels, guess))
    return False


def label_template(guess: dict[str, Any]) -> str:
    """Returns a template for data.label, with placeholders for the label values."""
    return "{first: VALUE, second: VALUE}" if "first" in guess else "{good: VALUE, bad: VALUE}"


def guess_columns(rows: Rows, kind: Kind) -> dict[str, Any] | None:
    """Returns a mapping {field: column} that makes most rows readable, {} if none is needed, or None if no guess fits."""
    rows = rows[:LOOKED]
    columns, rated, stage = _columns(rows), _ratings(rows), kind.stage
    if stage in ("sft", "kto") and unclear_label_note(rows):
        return None
    guess = next(
        (guess for guess in _candidates(columns, rated, stage) if reads_most_rows(rows, guess, kind)), None
    )
    if guess is None:
        return None
    fields = _used(guess) | kind.format_fields  # a field such as `answer` cannot also be the label
    free = {name: values for name, values in columns.items() if name not in fields}
    if stage == "sft":  # sft uses labels only to drop bad completions
        labels = _labels(free, rated)
        if labels and labels[0] not in LABEL_FIELDS:
            guess |= {"label": _with_twins(labels[0], free)}
    return guess


def unread_label_note(rows: Rows, mapping: Mapping[str, Any], used: set[str], section: str) -> str:
    """Returns a message about an unread column that may label completions as good or bad, or "".

    Args:
        mapping: the job's data.columns.
        used: the columns and fields that sft reads.
        section: the section of the job that describes the rows.
    """
    if problem := unclear_label_note(rows, used):
        return problem
    columns = {name: v for name, v in _columns(rows).items() if name.split(".")[0] not in used}
    if not (labels := [*filter(partial(_may_be_bad, columns), _labels(columns, _ratings(rows)))]):
        return ""
    setting = as_setting({**mapping, "label": _with_twins(labels[0], columns)}, rows, section)
    return f"`{labels[0]}` may label completions as good or bad; set {setting}, or remove this column with {section}.transform"


def message_label_note(rows: Rows, fields: Iterable[str], section: str) -> str:
    """Returns a message about a key of the assistant's messages that may label them as good or bad, or "".

    Args:
        fields: the columns and fields that may have messages.
        section: the section of the job that describes the rows.
    """
    messages = [*_assistant_messages(rows, fields)]
    columns = _columns(messages)
    labels = [
        *filter(partial(_may_be_bad, columns), _labels(columns, _ratings(messages))),
        *_bad_marks(columns),
    ]
    if not labels:
        return ""
    advice = f"give bad messages `weight: 0`, which excludes them from training, and remove this key, both with {section}.transform"
    return f"`{labels[0]}` may label messages as good or bad; {advice}"


def _assistant_messages(rows: Rows, fields: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the assistant's messages in the fields of rows, without role and content. A key becomes, for example,
    `messages[].feedback`."""
    for row, name in itertools.product(rows, sorted(fields)):
        with contextlib.suppress(KeyError, RowError):
            messages = unpack_messages("messages", value_at(row, name))
            for message in messages if isinstance(messages, list) else ():
                role = message.get("role", message.get("from")) if isinstance(message, dict) else None
                if ROLES.get(str(role).lower()) == "assistant":
                    yield {f"{name}[].{key}": message[key] for key in some_keys(message) if key not in READ}


def unclear_label_note(rows: Rows, used: Collection[str] = ()) -> str:
    """Returns a message if it is unclear which completions are good, or "".

    A column name such as thumbs_down may mark bad rows, or several columns may be the completion. Columns in `used` are ignored.
    """
    columns = {name: values for name, values in _columns(rows).items() if name not in used}
    texts, questions = _texts(columns), _questions(rows[:LOOKED])
    if LABEL_FIELDS & columns.keys() or any(True for _ in _pairs(columns, texts)):
        return ""
    for name in _bad_marks(columns):
        value_of = {is_good_label(value): value for value in reversed(without_blanks(columns[name]))}
        rule = {"good": value_of.get(False, 0), "bad": value_of.get(True, 1)}
        parts = how_to_set("data.columns", _flow({"label": name})), how_to_set("data.label", _flow(rule))
        return f"`{name}` may mark bad rows; set {' and '.join(parts)}, or create one label column with data.transform"
    answers = sorted(questions.intersection(texts))
    candidates = [*dict.fromkeys([*answers, *_called("completion", texts)])]
    if len(candidates) > 1 and (answers or not (used or format_of(rows[0], kind_of("sft")))):
        setting = how_to_set("data.columns", _flow({"prompt": "COLUMN", "completion": candidates[0]}))
        shown = " and ".join(f"`{name}`" for name in candidates)
        return f"{shown} could be the completion to train on; to use the first column, set {setting}"
    return ""


def reads_most_rows(rows: Rows, guess: dict[str, Any], kind: Kind) -> bool:
    """Returns True if at least half of the rows can be read with the columns of `guess`. Ties and unlabeled rows are ignored."""
    rows = rows[:LOOKED]
    labels = tuple(map(normalize_label, labels_in_rows(guess, rows)))  # the rule below accepts any label
    rule = Rule(labels) if "first" in guess else Rule(good=labels if "label" in guess else ())
    kind = kind.with_preprocess(Preprocess(guess, rule))
    if not kind.formats:
        return False
    readable, dropped = 0, 0
    for result in itertools.chain.from_iterable(map(kind.rows, rows)):
        dropped += isinstance(result, Dropped)
        with contextlib.suppress(RowError):
            if isinstance(result, dict):
                parse_row(result, kind)
                readable += 1
    return readable > 0 and 2 * readable >= len(rows) - dropped


def labels_in_rows(guess: Mapping[str, Any], rows: Rows) -> list[Any]:
    """Returns the labels of rows, and the elements of label lists. Skips blanks, nested lists and objects."""
    labels = []
    for row in rows:
        for name in as_list(guess.get("label", "label")):
            with contextlib.suppress(KeyError):
                labels += as_list(unpacked_label(value_at(row, name)))
    blank = is_blank if "first" in guess else is_unrated
    return [value for value in labels if not blank(value) and not isinstance(value, list | dict)]


# ---- columns and their values ----------------------------------------------------------------------------------------

Values = list[Any]  # a column's values in the first rows, without nulls


def _columns(rows: Rows) -> dict[str, Values]:
    """Returns {column: values}. Fields inside objects count as columns, too (`question.full_text`, `summaries.0.text`)."""
    columns: dict[str, Values] = {}
    for row in rows:
        for name in some_keys(row):
            value = row[name]
            objects = {name: value} if isinstance(value, dict) else {}
            pair = value if isinstance(value, list) and len(value) == 2 else []
            if all(isinstance(item, dict) and not {"role", "from"} & item.keys() for item in pair):
                objects |= {f"{name}.{index}": item for index, item in enumerate(pair)}
            inner = {f"{path}.{key}": item[key] for path, item in objects.items() for key in some_keys(item)}
            for path, item in {name: value, **inner}.items():
                columns.setdefault(path, []).extend([item] if item is not None else [])
    return {name: values for name, values in columns.items() if values}


def _texts(columns: Mapping[str, Values]) -> list[str]:
    """Returns the columns that contain texts, or lists other than lists of labels."""

    def is_text(values: Values) -> bool:
        lists = any(isinstance(value, list) for value in values) and not are_labels(values)
        return lists or any(isinstance(value, str) and " " in value.strip() for value in values)

    return [name for name, values in columns.items() if is_text(values)]


def _questions(rows: Rows) -> set[str]:
    """Returns the columns with the answers of annotators."""
    return {name for row in rows if isinstance(row, Answered) for name in row.questions}


def _ratings(rows: Rows) -> list[str]:
    """Returns the columns whose words or emoji rate completions, and the columns with numeric ratings by annotators."""
    columns, questions = (
        {name: without_blanks(values) for name, values in _columns(rows).items()},
        _questions(rows),
    )

    def rates(name: str, values: Values) -> bool:
        if are_mostly_numbers(values):
            return name in questions
        words = {normalize_label(value) for value in values if is_good_label(value) is not None} - {*ANSWERS}
        return (
            are_labels(values)
            and are_mostly_ratings(values)
            and bool(words)
            and False in map(is_good_label, values)
        )

    return [name for name, values in columns.items() if rates(name, values)]


def _labels(free: Mapping[str, Values], rated: Sequence[str]) -> list[str]:
    """Returns the columns that may label demonstrations as good or bad, in order of likelihood."""
    rows = {name: without_blanks(values) for name, values in free.items()}
    labels = [name for name in _called("label", free) if not rows[name] or are_mostly_ratings(rows[name])]
    scales = [name for name in free if are_mostly_numbers(rows[name]) and are_labels(free[name])]
    labels += sorted(filter(_rating_words, scales), key=lambda name: name.lower() not in NAMES["label"])
    return labels + [name for name in rated if name in free]


def _may_be_bad(columns: Mapping[str, Values], name: str) -> bool:
    """Returns False if all values of a column mean good, such as `true` in each row of a filtered file."""
    values = without_blanks(columns[name])
    return not values or not all(is_good_label(value) for value in values)


def _bad_marks(columns: Mapping[str, Values]) -> Iterator[str]:
    """Yields the columns whose name means bad, such as thumbs_down, and whose values mark some rows."""
    for name, values in columns.items():
        bad = {*BAD} & {word.removesuffix("s") for word in re.findall(r"[a-z]{3,}", name.lower())}
        values = without_blanks(values)
        if bad and are_mostly_ratings(values) and True in map(is_good_label, values):
            yield name


def _rating_words(name: str) -> set[str]:
    """Returns the words in a column's name that are typical of ratings, such as `rating` in rating_anna and annaRating."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return {word.lower().removesuffix("s") for word in words} & RATING_WORDS


def _with_twins(name: str, columns: Mapping[str, Values]) -> str | list[str]:
    """Returns the columns of all annotators, such as [rating_anna, rating_ben], or `name` if only one column has labels."""
    words = _rating_words(name)

    def is_twin(column: str) -> bool:
        values = without_blanks(columns[column])
        few = len({str(normalize_label(value)) for value in values}) <= MAX_VALUES
        same_words = _rating_words(column) == words and column.lower().removesuffix("s") not in words
        return same_words and few and (not values or are_mostly_numbers(values) or are_mostly_ratings(values))

    twins = [*filter(is_twin, columns)]
    return twins if words and name in twins and len(twins) > 1 else name


# ---- candidates ------------------------------------------------------------------------------------------------------


def _candidates(columns: dict[str, Values], rated: list[str], stage: str) -> Iterator[dict[str, Any]]:
    """Yields candidate mappings {field: column} in order of likelihood."""

    yield {}
    texts = _texts(columns)
    pairs = [] if stage == "ppo" else [*_pairs(columns, texts)]
    prompts = [] if _are_messages(columns) else [*_prompts(texts)]
    if stage == "ppo":
        yield from map(_unlike, prompts)
    elif stage != "sft":
        for pair in pairs:
            as_they_are = [dict[str, str]()] * bool({"prompt", "instruction"} & columns.keys())
            unused = [name for name in texts if name not in _used(pair)]
            single = [{"prompt": unused[0]}] if len(unused) == 1 else []
            for prompt in (*as_they_are, *prompts, {}, *single):
                if not {*prompt.values()} & _used(pair):
                    yield _unlike({**prompt, **pair})
    if stage in ("sft", "kto", "score") and not pairs:  # a guess would use only one completion of a pair
        labels = [*_called("label", columns), *_labels(columns, rated)]
        labels = [name for name in labels if name in rated or are_labels(columns[name])]
        for label in [{"label": _with_twins(name, columns)} for name in labels] if stage == "kto" else [{}]:
            for guess in ({}, *_demonstrations(columns, prompts)):
                if not _used(label) & _used(guess):
                    yield _unlike({**guess, **label})


def _prompts(texts: list[str]) -> Iterator[dict[str, str]]:
    """Yields mappings for the prompt: first a question together with its context, then the question alone."""
    for name in _called("prompt", texts):
        yield from ({"instruction": name, "input": c} for c in CONTEXTS if c in texts and c != name)
        yield {"instruction" if name == "instruction" else "prompt": name}


def _are_messages(columns: Mapping[str, Values]) -> bool:
    """Returns True if each row is one message of a conversation, with a text and a role."""
    column_roles = ({ROLES.get(str(value).lower(), "") for value in values} for values in columns.values())
    return any({"user", "assistant"} <= roles <= {*ROLES.values()} for roles in column_roles) and not _called(
        "completion", columns
    )


def _demonstrations(columns: dict[str, Values], prompts: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    # Skip columns of pairs, such as reply_1 and reply_2, because they may contain the worse completion.
    stems = {name: re.sub(STEM, "", name.lower()) for name in columns}
    columns = {name: columns[name] for name in columns if [*stems.values()].count(stems[name]) == 1}
    for name, (value, *_) in columns.items():  # lists of texts are conversations only under a typical name
        if name in NAMES["messages"] or not (isinstance(value, list) and value and isinstance(value[0], str)):
            yield {"messages": name}
    for name in dict.fromkeys([*_called("completion", _texts(columns)), *_called("completion", columns)]):
        if name != "completion" and are_verdicts(columns[name]):
            continue
        for prompt in (prompt for prompt in prompts if name not in prompt.values()):
            yield {**prompt, "output" if "instruction" in prompt else "completion": name}


def _pairs(columns: dict[str, Values], texts: list[str]) -> Iterator[dict[str, Any]]:
    """Yields mappings for the two completions of a pair, if names, labels or scores show which completion is better."""
    for chosen, rejected in itertools.product(_called("chosen", texts), _called("rejected", texts)):
        if chosen != rejected:
            yield {"chosen": chosen, "rejected": rejected}

    def named(words: list[str]) -> list[str]:
        return [name for name in columns if any(word in name.lower() for word in words)]

    labels = [name for name in named(PREFERENCES) if are_labels(columns[name]) or are_verdicts(columns[name])]
    votes = [name for name in labels if re.search(r"\d$", name)]
    spoken = [name for name, values in columns.items() if choose_sides(values)]
    labels += [name for name in spoken if name not in labels]
    scores = [name for name in named(SCORES) if are_mostly_numbers(columns[name])]
    for low, high in PAIRED:
        for first, second in _siblings(texts, low, high):
            for score, other_score in _siblings(scores, low, high):
                yield {"first": first, "second": second, "first_score": score, "second_score": other_score}
            for label in [group for group in (votes, spoken) if len(group) > 1] + labels:
                yield {"first": first, "second": second, "label": label}


def _siblings(names: list[str], low: str, high: str) -> Iterator[tuple[str, str]]:
    """Yields pairs of column names that differ only in `low` and `high`, such as response_1 and response_2."""
    boundary = r"(?<!\d)" if low.isdigit() else "(?<![a-zA-Z])"  # the last `a` of `data` is not a word
    for name in names:
        pattern = rf"(?i){boundary}{low}(?![a-z0-9])"
        sibling = re.sub(pattern, lambda match: high.upper() if match[0].isupper() else high, name)
        if sibling in names and sibling != name:
            yield name, sibling


def _called(field: str, columns: Iterable[str]) -> list[str]:
    """Returns the columns that may be a field, because their name equals, contains or resembles a known name of the field."""
    names = [name for name in columns if not name.startswith("system")]
    words = {name: re.split(r"[^a-z0-9]+", name.lower()) for name in names}
    exact = [alias for alias in NAMES[field] if alias in names]
    within = [
        name for alias in NAMES[field] for name in names if alias in words[name] and "non" not in words[name]
    ]
    return [*dict.fromkeys([*exact, *within, *difflib.get_close_matches(field, names, 1)])]


def _unlike(guess: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the guess without fields whose column already has the field's name."""
    return {field: column for field, column in guess.items() if field != column}


def _used(guess: Mapping[str, Any]) -> set[str]:
    return {name for column in guess.values() for name in as_list(column)}
