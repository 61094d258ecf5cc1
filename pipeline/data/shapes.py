"""Row formats: for each kind its shapes (sets of fields), parser and token columns. Turns rows into Records; no tokenizer.

KIND is the table. job.stages.STAGE says which kind a stage reads. A row has the first shape whose fields all exist.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.data import reshape, values
from pipeline.data.messages import (
    ABOUT_TOOLS,
    SIDES,
    THOUGHTS,
    WEIGHTS,
    Text,
    Turns,
    as_turns,
    check_last,
    check_prompt,
    completion_text,
    instruction,
    list_in,
    messages,
    offered,
    plain,
    prompt_text,
    repeats_prompt,
    split_transcripts,
    template_kwargs,
    unpacked,
    without_unread,
    words,
)
from pipeline.data.reshape import NOTHING, UNORDERED, NoteLabel, Preprocess, shapes_with
from pipeline.data.values import RowError, as_json, check_values, decoded, fields_of, nearest, show, too_deep
from pipeline.input_uri import InputURI
from pipeline.job.stages import rows_of


@dataclass
class Record:
    """A row in canonical form.

    `pairs` holds the completions: one 1-tuple for a demonstration, (chosen, rejected) for each preference pair, nothing for a
    prompt. Completions are text if `prompt` is text, or else messages that begin with an assistant turn.
    """

    prompt: Text
    pairs: list[tuple[Text, ...]] = field(default_factory=list)
    all_turns: bool = False  # whether assistant turns inside `prompt` are also trained
    # untrained turns, numbered through prompt and completion
    untrained: frozenset[int] = frozenset()
    margin: float | None = None
    # for rated completions: whether each 1-tuple in `pairs` is desirable
    labels: tuple[bool, ...] = ()
    # the registered version that wrote the row, models:/NAME/NUMBER, or None if the row names none
    version: str | None = None
    judges: tuple[str, ...] = ()  # judges (judge:FILE@DIGEST) that scored the row, by its `reward_version`
    tools: list[dict[str, Any]] | None = None  # JSON schemas of the functions that a completion may call
    # variables of the chat template, such as enable_thinking
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # columns of the row, and keys of its messages, that no code reads
    row: str = ""  # JSON of the prompt and all other columns, as a Python reward gets them

    def joined(self) -> bool:
        """Returns True if no white space separates a text prompt from its completion."""
        if not isinstance(self.prompt, str) or self.prompt[-1:].isspace():
            return False
        return any(not str(side)[:1].isspace() for pair in self.pairs for side in pair)

    def prompt_content(self) -> str:
        """Returns the key for splitting a hold-out, which is equal for a text prompt and one message with the same content."""
        turns = as_turns(self.prompt)
        if len(turns) == 1:
            return words(turns[0]).strip()
        return json.dumps([[turn["role"], words(turn)] for turn in turns], ensure_ascii=False)

    def digests(self) -> bytes:
        """Returns 8 bytes for the prompt and 8 for prompt and completions, equal for text and messages with the same content."""
        prompt = self.prompt_content()
        completions = json.dumps([[plain(side) for side in pair] for pair in self.pairs], ensure_ascii=False)
        return digest(prompt).to_bytes(8) + digest(f"{prompt}\0{completions}").to_bytes(8)


def digest(text: str) -> int:
    """Returns the first 64 bits of the BLAKE2 hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


Ids = list[int]


@dataclass(frozen=True)
class Kind:
    """The rows of one kind, from JSON to token ids."""

    # shape -> the fields that it needs; a row has the first shape whose fields all exist
    shapes: Mapping[str, tuple[str, ...]]
    parse: Callable[[dict[str, Any], str], Record]  # (row, name of the shape) -> Record; raises RowError
    columns: tuple[str, ...]  # columns of the token table
    # learned: the policy learns to write the completions of the rows. scored: a reward model scores them.
    # written: the rows have only prompts, and the policy writes the completions.
    completions: Literal["learned", "scored", "written"]
    further: frozenset[str] = frozenset()  # fields that no shape needs, but the kind reads
    # keys of messages that the chat template reads, other than messages.READ
    message_keys: frozenset[str] = frozenset({*THOUGHTS, *ABOUT_TOOLS})
    stage: str = ""  # the stage that error messages name
    preprocess: Preprocess = NOTHING  # how the job changes a raw row

    @property
    def needed(self) -> frozenset[str]:
        """Returns the fields that shapes need."""
        return frozenset(UNORDERED).union(*self.shapes.values())

    @property
    def has_pairs(self) -> bool:
        """Returns True if a row may have two completions, one of them preferred."""
        return self.completions != "written" and "rejected" in self.needed

    def rows(self, row: Any, note_label: NoteLabel | None = None) -> Iterator[Any]:
        """Yields the results of a decoded row: rows, RowError or Dropped."""
        for made in self.preprocess.rows(row, self.needed, self.has_pairs, note_label):
            if isinstance(made, dict):
                read = self.further.union(self.shapes.get(shape_of(made, self) or "", ()))
                labels = {name: majority(made[name]) for name in LABELS & read & made.keys()}
                blank = any(map(reshape.is_unrated, labels.values()))
                made = values.Dropped("unlabeled") if blank else {**made, **labels}
            yield made

    def example(self, record: Record, at: int, prompt: Ids, sides: list[Ids]) -> dict[str, Any]:
        """Returns the columns of pair `at` of a record, from the token ids of the prompt and of each completion."""
        chosen, rejected = [*sides, None, None][:2]
        row = record.row
        if row and len(record.pairs) > 1:  # a row with several answers gives several pairs
            row = json.dumps({**json.loads(row), "pair": at}, ensure_ascii=False)
        values: dict[str, Any] = dict.fromkeys(("prompt_ids", "input_ids"), prompt)
        values |= {"completion_ids": chosen, "chosen_ids": chosen, "rejected_ids": rejected, "row": row}
        if "margin" in self.columns:  # a reward model reads prompt and completion as one sequence
            values |= {"chosen_ids": prompt + sides[0], "rejected_ids": prompt + sides[1]}
            values["margin"] = record.margin or 0.0
        if record.labels:
            values["label"] = record.labels[at]
        return {name: values[name] for name in self.columns}


def _shapes(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: tuple(name.split("+")) for name in names}


# ---- demonstrations: a prompt and the completion to learn ------------------------------------------------------------

DEMONSTRATIONS = _shapes(
    "messages", "conversations", "prompt+completion", "prompt+answer", "instruction+output"
)
# Columns that say whether a completion is good (in TRL's KTOTrainer and in LLaMA-Factory), and their values for bad.
LABELS = {"label", "kto_tag"}
_BAD = (
    "bad dislike disliked down f fail failed false flagged harmful incorrect n negative no reject rejected thumbs_down toxic "
    "undesirable unsafe wrong 👎"
)
BAD = (0, -1, *_BAD.split())
_GOOD = "accept accepted approved chosen correct desirable good like liked ok pass passed positive safe t thumbs_up true up y yes 👍"
GOOD = (1, *_GOOD.split())


def parse_demonstration(row: dict[str, Any], shape: str) -> Record:
    """Returns a demonstration of one of DEMONSTRATIONS to imitate. Raises RowError if one of LABELS says that it is bad.

    A label that means something else is an unread column.
    """
    labels = {name: is_good(row[name]) for name in sorted(LABELS & row.keys())}
    if bad := [name for name, good in labels.items() if good is False]:
        found = f"{show(row[bad[0]])}: a completion that is not to be imitated"
        expected = "good completions only; data.on_error=skip trains on those alone; kto learns from both"
        raise RowError("label", bad[0], found, expected)
    record = demonstration(row, shape)
    record.unread = tuple(name for name, good in labels.items() if good is None)
    return record


def majority(label: Any) -> Any:
    """Returns the majority of a list of labels: true, false, or null if there is none. Returns other labels unchanged."""
    given = reshape.unpacked_label(label)
    votes = [is_good(one) for one in reshape.listed(given) if not reshape.is_unrated(one)]
    if None in votes or not isinstance(given, list):
        return label
    more = sum(1 if good else -1 for good in votes)
    return more > 0 if more else None


def is_good(label: Any) -> bool | None:
    """Returns whether a label means a good completion, or None if it is something else, such as a topic."""
    value = label.strip().lower().replace(" ", "_") if isinstance(label, str) else label
    with contextlib.suppress(ValueError, TypeError):
        value = float(value)
    if not isinstance(value, str | int | float):
        return None
    return True if value in GOOD else False if value in BAD else None


def are_clear(labels: Sequence[Any]) -> bool:
    """Returns True if each label means good or bad. Next to -1, a 0 may mean an unrated completion."""
    return None not in map(is_good, labels) and not {0.0, -1.0} <= {*map(reshape.comparable, labels)}


def are_mostly(labels: Sequence[Any]) -> bool:
    """Returns True if most labels mean good or bad, or some words each of them: then others, such as neutral, are no topics."""
    words = {is_good(one) for one in labels if isinstance(reshape.comparable(one), str)}
    return {True, False} <= words or 2 * [*map(is_good, labels)].count(None) < len(labels)


def demonstration(row: dict[str, Any], shape: str) -> Record:
    """Returns a demonstration of one of DEMONSTRATIONS, with any `label`."""
    if shape in ("messages", "conversations"):
        turns = messages(row[shape], shape, system=row.get("system"))
        check_last(turns, shape)
        check_prompt(turns[:-1], shape)
        excluded = untrained(row[shape], turns, shape)
        return Record(turns[:-1], [(turns[-1:],)], all_turns=True, untrained=excluded)
    key = shape.split("+")[1]
    prompt = given_prompt(row, shape)
    completion, excluded = completion_text(row[key], key, prompt), frozenset[int]()
    if isinstance(row[key], list | dict) and shape != "instruction+output":
        items = row[key] if isinstance(row[key], list) else [row[key]]
        excluded = untrained(items, messages(items, key), key)
        if excluded and isinstance(prompt, str):
            raise RowError("wrong_type", key, "weights with a text prompt", "a prompt of messages")
        excluded = frozenset(len(prompt) + index for index in excluded)
    return Record(prompt, [(completion,)], untrained=excluded)


def given_prompt(row: dict[str, Any], shape: str) -> Text:
    """Returns the prompt in the first field of a shape, with the row's `system` prompt, if any."""
    key = shape.partition("+")[0]
    return instruction(row) if key == "instruction" else prompt_text(row[key], key, row.get("system"))


def untrained(items: list[dict[str, Any]], turns: Turns, key: str) -> frozenset[int]:
    """Returns the assistant turns that a row excludes from training: `weight: 0` (OpenAI's format) or `train: false`.

    Raises RowError if no assistant turn is left to train.
    """
    added = len(turns) - len(items)  # 1 if the system prompt comes from a separate field
    off = (i for i, item in enumerate(items) if any(is_good(item.get(name)) is False for name in WEIGHTS))
    excluded = {index + added for index in off}
    assistant = {index for index, turn in enumerate(turns) if turn["role"] == "assistant"}
    if excluded and assistant <= excluded:
        raise RowError("weight", key, "no assistant turn that is to be trained", "one without `weight: 0`")
    return frozenset(excluded & assistant)


# ---- preferences: a prompt, a chosen and a rejected completion -------------------------------------------------------

PREFERENCES = _shapes(
    "prompt+pos_answers+neg_answers",
    *(f"{prompt}+chosen+rejected" for prompt in ("prompt", "conversations", "messages", "instruction")),
    "chosen+rejected",
)
# Maximum margin of a pair. TRL's RewardTrainer minimizes -logsigmoid(score_chosen - score_rejected - margin). Above some tens
# the gradient no longer depends on the pair, and the scores diverge. Llama 2's margins are 1/3 to 3.
LARGEST_MARGIN = 100.0


def parse_preference(row: dict[str, Any], shape: str) -> Record:
    """Parses a row of one of PREFERENCES: one pair, or one for each index of `pos_answers` and `neg_answers`."""
    margin = decoded(row.get("margin"))  # in CSV, numbers and missing values are text
    if margin in (None, ""):
        margin = None
    elif isinstance(margin, bool) or not isinstance(margin, int | float):
        raise RowError("wrong_type", "margin", show(margin), "a number")
    elif not 0 <= margin <= LARGEST_MARGIN:
        expected = f"a number from 0 to {LARGEST_MARGIN:g}; if it is negative, swap `chosen` and `rejected`"
        raise RowError("margin", "margin", show(margin), expected)
    pairs: list[tuple[Text, ...]]
    if shape == "prompt+pos_answers+neg_answers":
        prompt = given_prompt(row, shape)
        good, bad = (
            [completion_text(one, f"{side}[{i}]", prompt) for i, one in enumerate(_as_list(row[side], side))]
            for side in ("pos_answers", "neg_answers")
        )
        if len(good) != len(bad):
            found = f"{len(good)} pos_answers and {len(bad)} neg_answers"
            raise RowError("unequal_answers", "neg_answers", found, "one pair for each index")
        pairs = list(zip(good, bad, strict=True))
    elif shape == "chosen+rejected":
        prompt, completions = split_transcripts(row, row.get("system"))
        pairs = [completions]
    elif any(repeats_prompt(row[side]) for side in SIDES):  # UltraFeedback: both completions repeat it
        key = shape.partition("+")[0]
        empty = isinstance(row[key], str) and not row[key].strip()  # an empty text contradicts nothing
        prompt, completions = split_transcripts(row, row.get("system") if empty else None)
        prompt, pairs = prompt if empty else agreed(prompt, given_prompt(row, shape), key), [completions]
    else:
        prompt = given_prompt(row, shape)
        pairs = [tuple(completion_text(row[side], side, prompt) for side in SIDES)]
    for index, (chosen, rejected) in enumerate(pairs):
        if plain(chosen) == plain(rejected):
            name = f"pos_answers[{index}]" if shape.endswith("neg_answers") else "chosen"
            found = f"the same text on both sides: {show(plain(chosen))}"
            raise RowError("equal_pair", name, found, "two different completions")
    return Record(prompt, pairs, margin=margin)


def agreed(repeated: Text, given: Text, key: str) -> Text:
    """Returns the prompt of a row that has it in the field `key` (`given`) and again in both completions (`repeated`).

    If one prompt is the end of the other, returns the longer one: the field often holds one question of a conversation, or adds
    system turns. Otherwise, both prompts must be equal.
    """

    def stripped(turns: Turns) -> list[tuple[str, str]]:
        return [(turn["role"], turn["content"].strip()) for turn in turns]

    both = as_turns(given), as_turns(repeated)
    for longer, shorter in (both[::-1], both):
        if stripped(longer[-len(shorter) :]) == stripped(shorter):
            return longer
    # `given` is the first of several questions.
    if isinstance(given, str) and stripped(both[0])[0] in stripped(both[1]):
        return repeated
    ends = [show(turns[-1]["content"]) for turns in both]
    found = f"{ends[0]}, but `chosen` and `rejected` begin with {ends[1]}"
    expected = f"the same prompt there as in `{key}`, or completions without a prompt"
    raise RowError("prompts_differ", key, found, expected)


# ---- rated completions: desirable or not; a pair gives one of each ---------------------------------------------------

RATED = (
    _shapes(*(f"{shape}+{label}" for label in ("label", "kto_tag") for shape in DEMONSTRATIONS)) | PREFERENCES
)


def parse_rated(row: dict[str, Any], shape: str) -> Record:
    """Parses a row of one of RATED: one completion with its label, or the completions of preference pairs."""
    if shape in PREFERENCES:
        record = parse_preference(row, shape)
        record.labels = (True, False) * len(record.pairs)
        record.pairs = [(completion,) for pair in record.pairs for completion in pair]
        return record
    inner, _, name = shape.rpartition("+")
    label = is_good(row[name])
    if label is None:
        raise unclear(row[name], name)
    record = demonstration(row, inner)
    if record.untrained:
        found, expected = "turns with weight 0 beside a label", f"`{name}` alone, which labels the last turn"
        raise RowError("weight", inner, found, expected)
    record.all_turns, record.labels = False, (label,)
    return record


def unclear(label: Any, name: str) -> RowError:
    expected = "true or false, 1 or 0, 1 or -1, or a word such as up or down; for ratings set data.label={good: 4, bad: 2}"
    return RowError("unclear_label", name, show(label), expected)


# ---- completions to be scored: one, or the two of a pair -------------------------------------------------------------

SCORED = {**PREFERENCES, **DEMONSTRATIONS}


def parse_scored(row: dict[str, Any], shape: str) -> Record:
    """Parses a demonstration or a preference, and stores the row for Python rewards."""
    read = parse_preference if shape in PREFERENCES else demonstration
    record = read(row, shape)
    record.row = as_json({**row, "prompt": record.prompt})
    return record


# ---- benchmarks of reward models: a prompt and several completions, the correct ones first ---------------------------

BENCHMARKS = _shapes("prompt+chosen+rejected")
STYLED = 3  # number of correct and of wrong completions in a row of RM-Bench: concise, detailed, markdown


def parse_benchmark(row: dict[str, Any], shape: str) -> Record:
    """Parses a row of RewardBench 2 or RM-Bench, or a row with lists of correct and wrong completions.

    Keeps the other columns, and adds `benchmark`, `subset`, and the numbers of `correct` and of all `completions`.
    """
    good, bad = (
        [(f"{side}[{i}]", value) for i, value in enumerate(_as_list(row[side], side))] for side in SIDES
    )
    if "domain" in row:
        name, subset = "rm_bench", row["domain"]
        if len(good) != STYLED or len(bad) != STYLED:
            found = f"{len(good)} correct and {len(bad)} wrong completions"
            raise RowError("wrong_type", "chosen", found, f"{STYLED} of each: RM-Bench has three styles")
    else:
        name = "reward_bench_2" if "num_correct" in row else "best_of_k"
        subset = row.get("subset", "all")
        if (number := row.get("num_correct", len(good))) != len(good):
            found = f"{show(number)} and {len(good)} completions in chosen"
            raise RowError("wrong_type", "num_correct", found, "the number of correct completions")
    completions, correct = good + bad, len(good)
    prompt = given_prompt(row, shape)
    pairs: list[tuple[Text, ...]] = [(completion_text(value, key, prompt),) for key, value in completions]
    for (key, value), (text,) in zip(completions[correct:], pairs[correct:], strict=True):
        if any(plain(text) == plain(good) for (good,) in pairs[:correct]):
            found = f"a correct completion: {show(value)}"
            raise RowError("equal_pair", key, found, "a different completion")
    facts = {"benchmark": name, "subset": subset, "correct": correct, "completions": len(pairs)}
    read = {field for fields in BENCHMARKS.values() for field in fields}
    others = {key: value for key, value in row.items() if key not in read}
    return Record(prompt, pairs, row=as_json({**others, "prompt": prompt, **facts}))


def _as_list(value: Any, key: str) -> list[Any]:
    values = list_in(value, key)
    check_values(values, key)
    if isinstance(values, str):
        return [values]
    if not isinstance(values, list) or not values:
        raise RowError("wrong_type", key, show(values), "a text, or a list of at least one")
    return values


# ---- prompts, for which completions are to be written ----------------------------------------------------------------

# A row with chosen and rejected gets the prompt that both share.
PROMPTS = _shapes("prompt", "conversations", "messages", "instruction", "chosen+rejected")


def parse_prompt(row: dict[str, Any], shape: str) -> Record:
    """Returns the prompt of a row of one of PROMPTS, and its other columns unchanged."""
    if shape == "chosen+rejected":
        prompt, _ = split_transcripts(row, row.get("system"))
    else:
        prompt = given_prompt(row, shape)
    further = {key: value for key, value in row.items() if key != shape}
    return Record(prompt, row=as_json({"prompt": prompt, **further}))


def parse_answered(row: dict[str, Any], shape: str) -> Record:
    """Parses a row like `parse_prompt`, and checks its `completion`, if any, because its likelihood will be measured."""
    record = parse_prompt(row, shape)
    if row.get("completion") not in (None, ""):
        completion_text(row["completion"], "completion", record.prompt)
    return record


# ---- the table -------------------------------------------------------------------------------------------------------

_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
_WHOLE_PAIR = ("chosen_ids", "rejected_ids", "margin")
_RATED = ("prompt_ids", "completion_ids", "label")
_SCORED = (*_PAIR, "row")
_PROMPT, _LABELS = ("input_ids", "row"), ("input_ids", "labels")
_MARGIN = frozenset({"margin"})

KIND = {
    "demonstrations": Kind(DEMONSTRATIONS, parse_demonstration, _LABELS, "learned", frozenset(LABELS)),
    "preferences": Kind(PREFERENCES, parse_preference, _PAIR, "learned", _MARGIN),
    "whole_preferences": Kind(PREFERENCES, parse_preference, _WHOLE_PAIR, "scored", _MARGIN),
    "labels": Kind(RATED, parse_rated, _RATED, "learned", _MARGIN),
    "prompts": Kind(PROMPTS, parse_prompt, _PROMPT, "written"),
    "answered_prompts": Kind(PROMPTS, parse_answered, _PROMPT, "written", frozenset({"completion"})),
    "completions": Kind(SCORED, parse_scored, _SCORED, "scored"),
    "pairs": Kind(PREFERENCES, parse_scored, _SCORED, "scored"),
    "benchmarks": Kind(BENCHMARKS, parse_benchmark, _SCORED, "scored"),
}


def kind_of(stage: str, preprocess: Preprocess = NOTHING) -> Kind:
    """Returns the kind of rows that a stage reads. The rows of data.pairs and data.benchmarks have separate kinds."""
    name = rows_of(stage) or stage
    shapes = shapes_with(preprocess.columns, KIND[name].shapes)
    return replace(KIND[name], stage=stage, shapes=shapes, preprocess=preprocess)


# ---- row -> Record ---------------------------------------------------------------------------------------------------


def parse(row: Any, kind: Kind) -> Record:
    """Parses a decoded JSON row. Raises RowError without file and line, which the reader adds."""
    try:
        return _parsed(row, kind)
    except RecursionError:
        raise too_deep() from None


def _parsed(row: Any, kind: Kind) -> Record:
    one_of = f"one of {' | '.join(kind.shapes)} (stage {kind.stage})"
    if not isinstance(row, dict):
        raise RowError("not_object", "", show(row), f"a JSON object with {one_of}")
    shape = shape_of(row, kind)
    if shape is None:
        closest = max(kind.shapes.values(), key=lambda needs: sum(need in row for need in needs) / len(needs))
        missing = next(need for need in closest if need not in row)
        found = fields_of(row) + nearest(missing, [key for key in row if key not in kind.needed])
        raise RowError("missing_field", missing, found, one_of)
    fields, unread = {}, list[str]()
    for key in kind.shapes[shape]:
        if row[key] is None:
            raise RowError("null", key, "null", "a value")
        fields[key] = without_unread(unpacked(key, row[key]), key, kind.message_keys, unread)
    read = {*fields, *kind.further, "system"} | ({"input", "history"} if "instruction" in fields else set())
    row = row | fields
    check_values({key: value if key in read else None for key, value in row.items()})
    record = kind.parse(row, shape)
    if "label" in record.unread and "label" in kind.preprocess.columns:
        raise unclear(row["label"], "label")
    record.tools = offered(row.get("tools"))
    record.template_kwargs = template_kwargs(row.get("chat_template_kwargs"))
    if isinstance(version := row.get("version"), str) and InputURI.parse(version).version:
        record.version = version
    scored = row.get("reward_version")
    named = scored if isinstance(scored, list) else [scored]
    record.judges = tuple(one for one in named if isinstance(one, str) and InputURI.parse(one).is_judge)
    also: dict[str, Any] = {"tools": record.tools, "chat_template_kwargs": record.template_kwargs}
    also |= {"version": record.version, "reward_version": list(record.judges)}
    check_values(also)
    if "row" not in kind.columns:  # Python rewards get all columns
        read |= {key for key, value in also.items() if value}
        unread += [key for key in row if key not in read]
    record.unread += tuple(dict.fromkeys(unread))
    return record


def shape_of(row: dict[str, Any], kind: Kind) -> str | None:
    """Returns the name of the shape of a row, or None."""
    return next((name for name, needs in kind.shapes.items() if all(key in row for key in needs)), None)
