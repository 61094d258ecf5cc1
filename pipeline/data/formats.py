"""Defines the row formats: the fields of each format, and the function that parses a row. This module does not use a tokenizer.

KINDS lists all kinds of rows, and the formats of each kind. job.stages.STAGE_SPECS defines which kind each stage reads. A row has
the first format of its kind whose fields all exist in the row.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from pipeline.data.labels import LABEL_FIELDS, is_good_label, is_unrated, majority_label
from pipeline.data.messages import (
    ABOUT_TOOLS,
    THOUGHTS,
    WEIGHTS,
    Text,
    Turns,
    as_turns,
    check_last,
    check_prompt,
    comparable_text,
    completion_text,
    instruction_prompt,
    list_in,
    parse_messages,
    prompt_text,
    repeats_prompt,
    split_transcripts,
    template_kwargs,
    tool_schemas,
    turn_text,
    unpack_messages,
    without_unread,
)
from pipeline.data.reshape import NOTHING, UNORDERED, NoteLabel, Preprocess, formats_with, rename_columns
from pipeline.data.values import (
    Dropped,
    RowError,
    as_json,
    check_values,
    fields_of,
    parse_json,
    show_json,
    suggest_key,
)
from pipeline.input_uri import InputURI
from pipeline.job.stages import row_kind_of

GREETING = 10  # a user message with fewer characters, such as `Hi there`, does not identify a conversation


@dataclass
class Record:
    """A parsed row.

    `pairs` has the completions: one 1-tuple for a demonstration, or (chosen, rejected) for each preference pair. `pairs` is empty
    for a prompt without completions. Completions are text if `prompt` is text, or else messages that begin with an assistant
    turn.
    """

    prompt: Text
    pairs: list[tuple[Text, ...]] = field(default_factory=list)
    all_turns: bool = False  # whether the model also trains on assistant turns inside `prompt`
    # indices of turns without loss, in the conversation of prompt and completion
    untrained: frozenset[int] = frozenset()
    margin: float | None = None
    # for rated completions: whether each completion in `pairs` is desirable
    labels: tuple[bool, ...] = ()
    # the model version that generated the row, models:/NAME/NUMBER, or None if unknown
    version: str | None = None
    judges: tuple[str, ...] = ()  # judges (judge:FILE@DIGEST) that scored the row, from its `reward_version`
    tools: list[dict[str, Any]] | None = None  # JSON schemas of the functions that a completion may call
    # variables for the chat template, such as enable_thinking
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # columns of the row, and keys of its messages, that no code reads
    row: str = ""  # JSON of the prompt and all other columns, for Python rewards

    def joined(self) -> bool:
        """Returns True if no white space separates a plain-text prompt from its completion."""
        if not isinstance(self.prompt, str) or self.prompt[-1:].isspace():
            return False
        return any(not str(side)[:1].isspace() for pair in self.pairs for side in pair)

    def prompt_content(self) -> str:
        """Returns the content of the prompt, which is the same for a text and for a message with the same content."""
        return content_of(as_turns(self.prompt))

    def split_key(self) -> str:
        """Returns a key for choosing eval rows: the content of the prompt up to the first user message that is no mere greeting.

        Rows with the beginning and with the continuation of one conversation have the same key.
        """
        turns = as_turns(self.prompt)
        questions = (
            index
            for index, turn in enumerate(turns)
            if turn["role"] == "user" and len(str(turn.get("content"))) >= GREETING
        )
        return content_of(turns[: next(questions, len(turns)) + 1])

    def digests(self) -> bytes:
        """Returns two 8-byte hashes: one of the prompt, and one of the prompt with its completions.

        Text and messages with the same content have the same hashes."""
        prompt = self.prompt_content()
        completions = json.dumps(
            [[comparable_text(side) for side in pair] for pair in self.pairs], ensure_ascii=False
        )
        return hash_text(prompt).to_bytes(8) + hash_text(f"{prompt}\0{completions}").to_bytes(8)


def content_of(turns: Turns) -> str:
    """Returns the content of a single message as text, or the roles and contents of several messages as JSON."""
    if len(turns) == 1:
        return turn_text(turns[0]).strip()
    return json.dumps([[turn["role"], turn_text(turn)] for turn in turns], ensure_ascii=False)


def hash_text(text: str) -> int:
    """Returns the first 64 bits of the BLAKE2 hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


Row = dict[str, Any]
Ids = list[int]
Parser = Callable[..., Record]  # (row, each field of the format) -> Record; raises RowError
Formats = dict[str, Parser]  # {fields of a format, joined with "+": parser}
KindParser = Callable[[Row, Parser, tuple[str, ...]], Record]  # (row, parser of its format, fields) -> Record


@cache
def field_names(format: str) -> tuple[str, ...]:
    """Returns the fields of a format, such as prompt and completion for `prompt+completion`."""
    return tuple(format.split("+"))


@dataclass(frozen=True)
class Kind:
    """A kind of rows, such as preference pairs: its formats, its parser, and the columns of its token table."""

    formats: Formats
    parse: KindParser
    columns: tuple[str, ...]  # columns of the token table
    # learned: the policy is trained on the completions of the rows. scored: a reward model scores the completions of the rows.
    # written: the rows have only prompts, and the policy generates completions.
    completions: Literal["learned", "scored", "written"]
    further: frozenset[str] = frozenset()  # optional fields of the kind
    # message keys that the chat template reads in addition to messages.READ
    message_keys: frozenset[str] = frozenset({*THOUGHTS, *ABOUT_TOOLS})
    stage: str = ""  # name of the stage in error messages
    preprocess: Preprocess = NOTHING  # the job's preprocessing of raw rows

    def with_preprocess(self, preprocess: Preprocess) -> "Kind":
        """Returns this kind with the job's preprocessing, and with only the formats that have all fields in data.columns."""
        return replace(self, formats=formats_with(preprocess.columns, self.formats), preprocess=preprocess)

    @property
    def format_fields(self) -> frozenset[str]:
        return frozenset().union(*map(field_names, self.formats))

    @property
    def needed(self) -> frozenset[str]:
        """Returns the fields that the kind's formats need."""
        return self.format_fields.union(UNORDERED)

    @property
    def reads_label(self) -> bool:
        """Returns True if a row may have a label that says whether its completion is good."""
        return "label" in self.further.union(self.format_fields)

    @property
    def has_pairs(self) -> bool:
        """Returns True if a row may have two completions, one of them preferred."""
        return self.completions != "written" and "rejected" in self.format_fields

    def rows(self, row: Any, note_label: NoteLabel | None = None) -> Iterator[Any]:
        """Applies the job's preprocessing to a decoded row. Yields rows, RowError or Dropped."""
        for result in self.preprocess.transformed(row):
            try:
                yield self._changed(result, note_label) if isinstance(result, dict) else result
            except RowError as error:
                yield error

    def _changed(self, row: Row, note_label: NoteLabel | None) -> Row | Dropped:
        """Returns a row after applying data.columns and data.label, or Dropped."""
        columns = self.preprocess.columns
        row = rename_columns(row, columns, self.needed) if columns else row
        labeled = self.preprocess.apply_label(row, self.has_pairs, note_label)
        if isinstance(labeled, Dropped):
            return labeled
        fields = self.further.union(field_names(format_of(labeled, self) or ""))
        labels = {name: majority_label(labeled[name]) for name in LABEL_FIELDS & fields & labeled.keys()}
        return Dropped("unlabeled") if any(map(is_unrated, labels.values())) else {**labeled, **labels}

    def example(self, record: Record, index: int, prompt: Ids, sides: list[Ids]) -> dict[str, Any]:
        """Returns the token row for pair `index` of a record, given the token ids of the prompt and of each completion."""
        chosen, rejected = [*sides, None, None][:2]
        row = record.row
        if row and len(record.pairs) > 1:  # a row with several answers becomes several token rows
            row = json.dumps({**json.loads(row), "pair": index}, ensure_ascii=False)
        values: dict[str, Any] = dict.fromkeys(("prompt_ids", "input_ids"), prompt)
        values |= {"completion_ids": chosen, "chosen_ids": chosen, "rejected_ids": rejected, "row": row}
        if "margin" in self.columns:  # a reward model reads prompt and completion as one sequence
            values |= {"chosen_ids": prompt + sides[0], "rejected_ids": prompt + sides[1]}
            values["margin"] = record.margin or 0.0
        if record.labels:
            values["label"] = record.labels[index]
        return {name: values[name] for name in self.columns}


# ---- demonstrations: a prompt and the completion to train ------------------------------------------------------------


def parse_conversation(row: Row, key: str) -> Record:
    """Parses a list of messages that ends with the completion. The model trains on all assistant turns."""
    turns = parse_messages(row[key], key, system=row.get("system"))
    check_last(turns, key)
    check_prompt(turns[:-1], key)
    return Record(
        turns[:-1], [(turns[-1:],)], all_turns=True, untrained=untrained_turns(row[key], turns, key)
    )


def parse_demonstration(row: Row, prompt_key: str, key: str) -> Record:
    """Parses a prompt and a completion, each of which may be a text or messages."""
    prompt = prompt_in(row, prompt_key)
    completion, value = completion_text(row[key], key, prompt), row[key]
    excluded = frozenset[int]()
    if isinstance(value, list | dict):
        items = value if isinstance(value, list) else [value]
        excluded = untrained_turns(items, parse_messages(items, key), key)
        if excluded and isinstance(prompt, str):
            raise RowError("wrong_type", key, "message weights with a text prompt", "a prompt of messages")
    return Record(prompt, [(completion,)], untrained=frozenset(len(prompt) + index for index in excluded))


def prompt_in(row: Row, key: str) -> Text:
    """Returns the prompt from a field. If the row has a `system` prompt, the returned prompt includes it."""
    return instruction_prompt(row) if key == "instruction" else prompt_text(row[key], key, row.get("system"))


def untrained_turns(items: list[dict[str, Any]], turns: Turns, key: str) -> frozenset[int]:
    """Returns the indices of assistant turns with `weight: 0` or `train: false`, which are excluded from training.

    Raises RowError if all assistant turns are excluded, or if a weight is neither 0 nor 1.
    """
    offset = len(turns) - len(items)  # 1 if a system prompt from another field was added, else 0
    excluded = set[int]()
    for index, item in enumerate(items):
        for name in WEIGHTS if turns[index + offset]["role"] == "assistant" else ():
            if is_unrated(weight := item.get(name)):
                continue
            if (trained := is_good_label(weight)) is None:
                expected = "0 or 1, because this key excludes a turn from training"
                raise RowError("weight", f"{key}[{index}].{name}", show_json(weight), expected)
            if not trained:
                excluded.add(index + offset)
    assistant_turns = {index for index, turn in enumerate(turns) if turn["role"] == "assistant"}
    if excluded and assistant_turns <= excluded:
        raise RowError(
            "weight", key, "no assistant turn to train on", "an assistant turn without `weight: 0`"
        )
    return frozenset(excluded & assistant_turns)


DEMONSTRATIONS: Formats = {
    **dict.fromkeys(("messages", "conversations"), parse_conversation),
    **dict.fromkeys(("prompt+completion", "prompt+answer", "instruction+output"), parse_demonstration),
}


def parse_imitated(row: Row, parser: Parser, keys: tuple[str, ...]) -> Record:
    """Parses a demonstration, or raises RowError if its label means bad. A column is unread if its label means neither good nor
    bad."""
    labels = {name: is_good_label(row[name]) for name in sorted(LABEL_FIELDS & row.keys())}
    if bad_fields := [name for name, good in labels.items() if good is False]:
        found = f"{show_json(row[bad_fields[0]])}: a completion with a bad label"
        expected = "only good completions; data.on_error=skip skips bad ones; kto also learns from bad ones"
        raise RowError("label", bad_fields[0], found, expected)
    record = parser(row, *keys)
    record.unread = tuple(name for name, good in labels.items() if good is None)
    return record


# ---- preferences: a prompt, a chosen and a rejected completion -------------------------------------------------------

# Maximum margin of a pair. TRL's RewardTrainer minimizes -logsigmoid(score_chosen - score_rejected - margin). With a margin
# of several tens, the gradient no longer depends on the scores, so the scores diverge. Llama 2's margins are 1/3 to 3.
LARGEST_MARGIN = 100.0


def answer_lists(row: Row, prompt_key: str, *sides: str) -> Record:
    """Parses a row with lists `pos_answers` and `neg_answers` into one pair for each index."""
    prompt = prompt_in(row, prompt_key)
    good, bad = (
        [completion_text(answer, f"{side}[{i}]", prompt) for i, answer in enumerate(as_list(row[side], side))]
        for side in sides
    )
    if len(good) != len(bad):
        found = f"{len(good)} pos_answers and {len(bad)} neg_answers"
        raise RowError("unequal_answers", "neg_answers", found, "one pair for each index")
    pairs = enumerate(zip(good, bad, strict=True))
    return Record(prompt, [require_distinct(pair, f"pos_answers[{index}]") for index, pair in pairs])


def parse_pair(row: Row, prompt_key: str, *sides: str) -> Record:
    """Parses a prompt and two completions. Each completion may repeat the prompt."""
    if any(repeats_prompt(row[side]) for side in sides):  # as in UltraFeedback
        empty = isinstance(row[prompt_key], str) and not row[prompt_key].strip()  # contradicts nothing
        prompt, completions = split_transcripts(row, row.get("system") if empty else None)
        prompt = prompt if empty else agreed_prompt(prompt, prompt_in(row, prompt_key), prompt_key)
    else:
        prompt = prompt_in(row, prompt_key)
        completions = tuple(completion_text(row[side], side, prompt) for side in sides)
    return Record(prompt, [require_distinct(completions, "chosen")])


def parse_transcripts(row: Row, *sides: str) -> Record:
    """Parses two conversations with the same prompt."""
    prompt, completions = split_transcripts(row, row.get("system"))
    return Record(prompt, [require_distinct(completions, "chosen")])


def require_distinct(pair: tuple[Text, ...], key: str) -> tuple[Text, ...]:
    """Returns the pair (chosen, rejected), or raises RowError if both completions have the same text."""
    if comparable_text(pair[0]) == comparable_text(pair[1]):
        found = f"the same text in both completions: {show_json(comparable_text(pair[0]))}"
        raise RowError("equal_pair", key, found, "two different completions")
    return pair


def margin_in(row: Row) -> float | None:
    """Returns the margin of a row, or None if the row has no margin. Raises RowError if the margin is invalid for TRL."""
    margin = parse_json(row.get("margin"))  # CSV files store numbers and missing values as text
    if margin in (None, ""):
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise RowError("wrong_type", "margin", show_json(margin), "a number")
    if not 0 <= margin <= LARGEST_MARGIN:
        expected = f"a number from 0 to {LARGEST_MARGIN:g}; if it is negative, swap `chosen` and `rejected`"
        raise RowError("margin", "margin", show_json(margin), expected)
    return margin


def agreed_prompt(repeated: Text, prompt: Text, key: str) -> Text:
    """Returns the prompt of a row with a prompt in the field `key` (`prompt`) and a prompt in both completions (`repeated`).

    If one prompt ends with the other prompt, returns the longer prompt, because the shorter prompt may lack the system prompt or
    earlier turns. If the field's prompt is the first of several questions, returns the repeated prompt. Raises RowError if the
    prompts differ in another way.
    """

    def stripped(turns: Turns) -> list[tuple[str, str]]:
        return [(turn["role"], turn["content"].strip()) for turn in turns]

    prompts = as_turns(prompt), as_turns(repeated)
    for longer, shorter in (prompts[::-1], prompts):
        if stripped(longer[-len(shorter) :]) == stripped(shorter):
            return longer
    if isinstance(prompt, str) and stripped(prompts[0])[0] in stripped(prompts[1]):
        return repeated
    ends = [show_json(turns[-1]["content"]) for turns in prompts]
    found = f"{ends[0]}, but `chosen` and `rejected` begin with {ends[1]}"
    expected = "completions that repeat this prompt, or completions without a prompt"
    raise RowError("prompts_differ", key, found, expected)


def as_list(value: Any, key: str) -> list[Any]:
    """Converts a value to a list. A JSON text is parsed to a list. Any other text becomes the only element of a list."""
    items = list_in(value, key)
    check_values(items, key)
    if isinstance(items, str):
        return [items]
    if not isinstance(items, list) or not items:
        raise RowError("wrong_type", key, show_json(items), "a text, or a list that is not empty")
    return items


PREFERENCES: Formats = {
    "prompt+pos_answers+neg_answers": answer_lists,
    **{
        f"{key}+chosen+rejected": parse_pair for key in ("prompt", "conversations", "messages", "instruction")
    },
    "chosen+rejected": parse_transcripts,
}


# ---- rated completions: desirable or not; a pair becomes one of each --------------------------------------------------

RATED: Formats = {
    **{f"{key}+{name}": DEMONSTRATIONS[key] for name in ("label", "kto_tag") for key in DEMONSTRATIONS},
    **PREFERENCES,
}


def parse_rated(row: Row, parser: Parser, keys: tuple[str, ...]) -> Record:
    """Parses a completion with its label (the last field), or a pair into a desirable and an undesirable completion."""
    if (name := keys[-1]) not in LABEL_FIELDS:
        record = parser(row, *keys)
        record.labels = (True, False) * len(record.pairs)
        record.pairs = [(completion,) for pair in record.pairs for completion in pair]
        return record
    label = is_good_label(row[name])
    if label is None:
        raise unclear_label(row[name], name)
    record = parser(row, *keys[:-1])
    if record.untrained:
        expected = f"`{name}` alone, because the label applies only to the last turn"
        raise RowError("weight", "+".join(keys[:-1]), "turns with weight 0 next to a label", expected)
    record.all_turns, record.labels = False, (label,)
    return record


def unclear_label(label: Any, name: str) -> RowError:
    expected = "true or false, 1 or 0, 1 or -1, or a word such as up or down; for ratings set data.label={good: 4, bad: 2}"
    return RowError("unclear_label", name, show_json(label), expected)


# ---- completions to be scored ----------------------------------------------------------------------------------------


def parse_scored(row: Row, parser: Parser, keys: tuple[str, ...]) -> Record:
    """Parses a demonstration or a preference pair, and stores the row's columns for Python rewards."""
    record = parser(row, *keys)
    record.row = as_json({**row, "prompt": record.prompt})
    return record


# ---- benchmarks of reward models: a prompt and several completions, the correct ones first ---------------------------

STYLED = 3  # a row of RM-Bench has 3 correct and 3 wrong completions: concise, detailed, markdown


def parse_benchmark(row: Row, prompt_key: str, *sides: str) -> Record:
    """Parses a row of RewardBench 2 or RM-Bench, or a row with lists of correct and wrong completions.

    Keeps the other columns of the row. Adds `benchmark`, `subset`, the number of `correct` completions, and the number of
    `completions`.
    """
    good, bad = (
        [(f"{side}[{i}]", value) for i, value in enumerate(as_list(row[side], side))] for side in sides
    )
    if "domain" in row:
        name, subset = "rm_bench", row["domain"]
        if len(good) != STYLED or len(bad) != STYLED:
            found = f"{len(good)} correct and {len(bad)} wrong completions"
            raise RowError(
                "wrong_type", "chosen", found, f"{STYLED} of each, because RM-Bench has three styles"
            )
    else:
        name = "reward_bench_2" if "num_correct" in row else "best_of_k"
        subset = row.get("subset", "all")
    prompt = prompt_in(row, prompt_key)
    pairs: list[tuple[Text, ...]] = [(completion_text(value, key, prompt),) for key, value in good + bad]
    facts = {"benchmark": name, "subset": subset, "correct": len(good), "completions": len(pairs)}
    other_columns = {key: value for key, value in row.items() if key not in (prompt_key, *sides)}
    return Record(prompt, pairs, row=as_json({**other_columns, "prompt": prompt, **facts}))


BENCHMARKS: Formats = {"prompt+chosen+rejected": parse_benchmark}


# ---- prompts, for which completions are generated ------------------------------------------------------------------


def lone_prompt(row: Row, key: str) -> Record:
    """Parses a row with a prompt. Keeps the other columns of the row unchanged."""
    prompt = prompt_in(row, key)
    other_columns = {name: value for name, value in row.items() if name != key}
    return Record(prompt, row=as_json({"prompt": prompt, **other_columns}))


def shared_prompt(row: Row, *sides: str) -> Record:
    """Parses the common prompt of `chosen` and `rejected`. Keeps all columns of the row unchanged."""
    prompt, _ = split_transcripts(row, row.get("system"))
    return Record(prompt, row=as_json({"prompt": prompt, **row}))


PROMPTS: Formats = {
    **dict.fromkeys(("prompt", "conversations", "messages", "instruction"), lone_prompt),
    "chosen+rejected": shared_prompt,
}


def parse_answered(row: Row, parser: Parser, keys: tuple[str, ...]) -> Record:
    """Parses a prompt. If the row has a `completion`, also checks it, because evaluation computes the completion's likelihood."""
    record = parser(row, *keys)
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
_BOTH = {**PREFERENCES, **DEMONSTRATIONS}


def parse_plain(row: Row, parser: Parser, keys: tuple[str, ...]) -> Record:
    return parser(row, *keys)


KINDS = {
    "demonstrations": Kind(DEMONSTRATIONS, parse_imitated, _LABELS, "learned", frozenset(LABEL_FIELDS)),
    "preferences": Kind(PREFERENCES, parse_plain, _PAIR, "learned", _MARGIN),
    "whole_preferences": Kind(PREFERENCES, parse_plain, _WHOLE_PAIR, "scored", _MARGIN),
    "labels": Kind(RATED, parse_rated, _RATED, "learned", _MARGIN),
    "prompts": Kind(PROMPTS, parse_plain, _PROMPT, "written"),
    "answered_prompts": Kind(PROMPTS, parse_answered, _PROMPT, "written", frozenset({"completion"})),
    "completions": Kind(_BOTH, parse_scored, _SCORED, "scored"),
    "pairs": Kind(PREFERENCES, parse_scored, _SCORED, "scored"),
    "benchmarks": Kind(BENCHMARKS, parse_plain, _SCORED, "scored"),
}


def kind_of(stage: str) -> Kind:
    """Returns the kind of rows that a stage reads. `stage` may also be `pairs` or `benchmarks`, for data.pairs and
    data.benchmarks."""
    return replace(KINDS[row_kind_of(stage) or stage], stage=stage)


# ---- row -> Record ---------------------------------------------------------------------------------------------------


def parse_row(row: Any, kind: Kind) -> Record:
    """Parses a decoded JSON row. Raises RowError without file and line. The caller adds file and line."""
    formats = f"one of {' | '.join(kind.formats)} (stage {kind.stage})"
    if not isinstance(row, dict):
        raise RowError("not_object", "", show_json(row), f"a JSON object with {formats}")
    format = format_of(row, kind)
    if format is None:
        field_lists = map(field_names, kind.formats)
        closest = max(field_lists, key=lambda names: sum(name in row for name in names) / len(names))
        missing = next(name for name in closest if name not in row)
        found = fields_of(row) + suggest_key(missing, [key for key in row if key not in kind.needed])
        raise RowError("missing_field", missing, found, formats)
    fields, unread = {}, list[str]()
    for key in field_names(format):
        if row[key] is None:
            raise RowError("null", key, "null", "a value")
        fields[key] = without_unread(unpack_messages(key, row[key]), key, kind.message_keys, unread)
    keys = {*fields, *kind.further, "system"} | ({"input", "history"} if "instruction" in fields else set())
    row = row | fields
    check_values({key: value if key in keys else None for key, value in row.items()})
    parser = kind.formats[format]
    margin = margin_in(row) if parser in PREFERENCES.values() else None
    record = kind.parse(row, parser, field_names(format))
    record.margin = margin
    if "label" in record.unread and "label" in kind.preprocess.columns:
        raise unclear_label(row["label"], "label")
    record.tools = tool_schemas(row.get("tools"))
    record.template_kwargs = template_kwargs(row.get("chat_template_kwargs"))
    if isinstance(version := row.get("version"), str) and InputURI.parse(version).version:
        record.version = version
    reward_version = row.get("reward_version")
    judges = reward_version if isinstance(reward_version, list) else [reward_version]
    record.judges = tuple(uri for uri in judges if isinstance(uri, str) and InputURI.parse(uri).is_judge)
    optional: dict[str, Any] = {"tools": record.tools, "chat_template_kwargs": record.template_kwargs}
    optional |= {"version": record.version, "reward_version": list(record.judges)}
    check_values(optional)
    if "row" not in kind.columns:  # if the token table has the column `row`, Python rewards read all columns
        keys |= {key for key, value in optional.items() if value}
        unread += [key for key in row if key not in keys]
    record.unread += tuple(dict.fromkeys(unread))
    return record


def format_of(row: Row, kind: Kind) -> str | None:
    """Returns the first format whose fields all exist in a row, or None."""
    return next((format for format in kind.formats if all(key in row for key in field_names(format))), None)
