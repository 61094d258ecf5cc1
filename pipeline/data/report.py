"""What became of the rows: counts, reasons, token lengths and a few samples, merged from the data tasks."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.data import versions
from pipeline.data.shapes import kind_of
from pipeline.data.values import show
from pipeline.errors import visible

FIRST = 10  # bad rows that are named one by one
SAMPLES = 3  # token rows that are shown as text
PERCENTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
KINDS = {
    "not_json": "not JSON",
    "not_object": "not a JSON object",
    "not_utf8": "not UTF-8",
    "not_finite": "number that is not finite",
    "margin": "margin out of range",
    "weight": "weight that cannot be used",
    "label": "labelled as bad",
    "repeated_key": "repeated key",
    "nested": "nested too deep",
    "too_large": "too large",
    "special_tokens": "special tokens that cannot be kept apart",
    "not_csv": "not CSV",
    "ragged": "with another number of values than the header",
    "truncated_gzip": "truncated or damaged gzip",
    "damaged": "truncated or damaged file",
    "missing_field": "wrong or missing field",
    "null": "null",
    "wrong_type": "wrong type",
    "empty_prompt": "empty prompt",
    "empty_completion": "empty completion",
    "equal_pair": "chosen equal to rejected",
    "equal_after_truncation": "equal only after truncation",
    "unequal_answers": "pos_answers and neg_answers of unequal length",
    "prompts_differ": "prompts differ inside the row",
    "wrong_role": "wrong role",
    "template": "refused by the chat template",
    "transform": "failed in data.transform",
    "left_out": "left out by data.transform",
    "tie": "tie, or without a clear label",
    "unknown_label": "label that data.label does not know",
    "unclear_label": "label whose meaning is not known",
    "too_long": "too long",
    "prompt_too_long": "whose prompt alone is too long: nothing of the completion is left",
    "empty_file": "empty file",
}


@dataclass
class Split:
    """Counts of `train` or `eval`: JSON rows `read`; token rows `kept` (several for pos/neg answers)."""

    read: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    tokens: int = 0
    desirable: int | None = None  # of the rows kept, those with a thumb up; None: rows without thumbs
    prompt_tokens: dict[str, int] = field(default_factory=dict)  # p5 p50 p95 max
    completion_tokens: dict[str, int] = field(default_factory=dict)
    text_rows: int = 0  # whose prompt is plain text, not messages
    chat_rows: int = 0  # whose prompt is messages
    # Of them, whose prompt and completion meet without white space, and no template parts them.
    joined: int = 0
    joined_first: str = ""  # the border of the first of these
    unread: dict[str, int] = field(default_factory=dict)  # column that the model does not see -> rows
    versions: dict[str, int] = field(
        default_factory=dict
    )  # models:/NAME/NUMBER whose conversations rows are from -> rows
    ended: int = 0  # whose trained tokens include one that generation stops on
    contradictions: int = 0  # pairs of completions that stand in both orders; completions with both labels
    contradictions_first: str = ""  # file:line of two such rows
    special_rows: int = 0  # whose text contains special tokens
    special_tokens: dict[str, int] = field(default_factory=dict)  # token -> rows
    special_first: str = ""  # file:line of the first of these rows


@dataclass
class SourceCounts:
    """Counts of one source of `train` or `eval`: JSON rows `read` and `dropped`, token rows `kept`, rows of the table."""

    source: int
    path: str = ""
    revision: str = ""  # the commit, of a set on the hub
    # What the job says of this source alone: the columns of its fields, and the function that its rows go through.
    columns: dict[str, Any] | None = None
    transform: str | None = None
    read: int = 0
    kept: int = 0
    dropped: int = 0
    tokens: int = 0
    desirable: int | None = None  # of the rows kept, those with a thumb up
    versions: dict[str, int] = field(default_factory=dict)  # as in Split
    rows: int = 0  # of the token table: those kept, or packed
    drawn: int | None = None  # of them in an epoch; None: each once


@dataclass
class Report:
    """The outcome of preparing the data of one job; `to_dict()` is plain JSON, `render()` a text for a terminal."""

    stage: str
    max_length: int
    splits: dict[str, Split] = field(default_factory=dict)
    sources: dict[str, list[SourceCounts]] = field(default_factory=dict)  # by split, in the job's order
    # rows equal to an earlier one of the same set; None: too many rows to count
    duplicates: int | None = None
    skipped: list[str] = field(default_factory=list)  # the first bad rows, file:line each
    samples: list[str] = field(default_factory=list)
    packed: int | None = None  # packed training rows
    # rows of eval whose prompt is in train too, and rows that are there with their completions; None: not compared
    overlap: tuple[int, int] | None = None
    text_as_chat: bool = True  # whether the chat template is applied to prompts of plain text
    special_tokens: str = "text"  # what they are in the text of a row: text, or control
    notes: list[str] = field(default_factory=list)  # warnings about the set as a whole
    reused: bool = False
    seconds: float = 0.0

    def row_format(self) -> str | None:
        """Returns what a model sees of the rows: chat, text, or both. None: there are no rows."""
        splits = list(self.splits.values())
        chat = any(split.chat_rows or (split.text_rows and self.text_as_chat) for split in splits)
        text = any(split.text_rows and not self.text_as_chat for split in splits)
        return "both" if chat and text else "chat" if chat else "text" if text else None

    def labels(self) -> tuple[int, int]:
        """(desirable, undesirable) rows of an epoch of thumbs; of a source with a weight as many as are drawn, on average."""
        desirable = drawn = 0.0
        for one in self.sources["train"]:
            share = 1 if one.drawn is None else one.drawn / max(1, one.rows)
            desirable, drawn = desirable + share * (one.desirable or 0), drawn + share * one.kept
        return round(desirable), round(drawn) - round(desirable)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Report":
        splits = {name: Split(**split) for name, split in value["splits"].items()}
        sources = {name: [SourceCounts(**one) for one in counts] for name, counts in value["sources"].items()}
        overlap = tuple(value["overlap"]) if value["overlap"] else None
        return cls(**{**value, "splits": splits, "sources": sources, "overlap": overlap})

    def render(self, samples: bool = True) -> str:
        did = "loaded from the cache into Ray" if self.reused else "read and tokenised"
        lines = [
            f"data for stage {self.stage}: at most {self.max_length} tokens a row, {did} in {self.seconds:.1f} s"
        ]
        for name, split in self.splits.items():
            lines += ["", *self._split(name, split), *self._sources(name), *self._warnings(name, split)]
        if self.packed is not None:
            lines.append(f"  packed      {counted(self.packed, 'row')} of up to {self.max_length} tokens")
        if self.duplicates:
            verb = "repeats" if self.duplicates == 1 else "repeat"
            lines += [
                "",
                f"duplicates    {counted(self.duplicates, 'row')} {verb} an earlier row (not removed)",
            ]
        lines += [f"  warning     {visible(note, lines=False)}" for note in self.notes]
        if self.skipped:
            lines += ["", "first rows left out:", *(f"  {visible(row, lines=False)}" for row in self.skipped)]
        if self.samples and samples:
            marks = {
                "learned": ", the trained tokens between ⟦ and ⟧",
                "scored": ", the completions between ⟦ and ⟧",
            }
            lines += ["", f"samples{marks.get(kind_of(self.stage).completions, '')}:"]
            for index, sample in enumerate(self.samples, 1):
                lines += [f"--- {index} " + "-" * 66, visible(sample)]
        return "\n".join(lines)

    def _warnings(self, name: str, split: Split) -> list[str]:
        lines = []
        if split.special_rows:
            tokens = ", ".join(f"{token} in {rows:,}" for token, rows in [*split.special_tokens.items()][:5])
            ways = {"text": "ordinary text", "control": "control tokens"}
            other = "text" if self.special_tokens == "control" else "control"
            single = split.special_rows == 1
            lines.append(
                f"{counted(split.special_rows, 'row')} {'contains' if single else 'contain'} special tokens in "
                f"{'its' if single else 'their'} text ({tokens}); they are encoded as {ways[self.special_tokens]} "
                f"(data.special_tokens={other} encodes them as {ways[other]}); first: {split.special_first}"
            )
        if split.joined:
            lines.append(
                f"{counted(split.joined, 'row')} of plain text {'joins' if split.joined == 1 else 'join'} prompt and completion "
                f"without white space ({show(split.joined_first)}): model.chat_template=plain puts them into a dialogue"
            )
        if tools := split.unread.get("tools"):
            lines.append(
                f"the model does not see the `tools` of {counted(tools, 'row')}: the chat template does not write them; one that "
                "does is named as model.chat_template=FILE"
            )
        long = split.dropped.get("too_long", 0) + split.dropped.get("prompt_too_long", 0)
        if long > split.kept:
            lines.append(
                f"most rows ({long:,} of {split.read:,}) are left out as longer than {self.max_length} tokens: a larger "
                "data.max_length keeps them"
            )
        completions = kind_of(self.stage).completions
        if completions == "learned" and name == "train" and split.kept and not split.ended:
            why = (
                "all of them are truncated"
                if split.truncated == split.kept
                else "the chat template leaves it out"
            )
            lines.append(
                "no completion is trained with a token that generation stops on, so the model does not learn to stop: "
                f"{why} ({'data.max_length' if split.truncated == split.kept else 'model.chat_template'})"
            )
        if split.contradictions and split.desirable is not None:
            lines.append(
                f"{counted(split.contradictions, 'completion')} with both labels for the same prompt: the rows work against each "
                f"other; first: {split.contradictions_first}"
            )
        elif split.contradictions:
            lines.append(
                f"{counted(split.contradictions, 'pair')} of completions in both orders, A preferred to B and B to A for the "
                f"same prompt: the rows work against each other; first: {split.contradictions_first}"
            )
        if name == "eval" and self.overlap and self.overlap[0]:
            prompts, rows = self.overlap
            same = f" ({rows:,} with the same completion)" if completions != "written" else ""
            verb = "has a prompt that is" if prompts == 1 else "have prompts that are"
            lines.append(
                f"{counted(prompts, 'row')} of data.eval {verb} also in data.train{same}: metrics on them measure "
                "memorisation, not generalisation"
            )
        return [f"  warning     {visible(line, lines=False)}" for line in lines]

    def _sources(self, name: str) -> list[str]:
        """A line for each source, where there are several: what it has, and its share of an epoch."""
        sources = self.sources.get(name, [])
        if len(sources) < 2 and not any(one.revision for one in sources):
            return []
        total = max(1, sum(one.rows if one.drawn is None else one.drawn for one in sources))
        lines = []
        for one in sources:
            drawn = one.rows if one.drawn is None else one.drawn
            draws = "" if one.drawn is None else f", {drawn:,} of {one.rows:,} drawn an epoch"
            counts = f"read {one.read:,}, kept {one.kept:,}, dropped {one.dropped:,} ({counted(one.tokens, 'token')})"
            through = f" through {one.transform}" if one.transform else ""
            mapped = f" with columns {json.dumps(one.columns, ensure_ascii=False)}" if one.columns else ""
            written = f"; {versions.in_words(one.versions, one.kept)}" if one.versions else ""
            commit = f" at commit {one.revision[:12]}" if one.revision else ""
            lines.append(
                f"  source      {one.path}{commit}{through}{mapped}: {counts}{draws}, {drawn / total:.2%} of the rows{written}"
            )
        return [visible(line, lines=False) for line in lines]

    def _template(self, rows: int) -> str:
        what = f"{counted(rows, 'row')} of plain text"
        if self.text_as_chat:
            return f"the chat template is applied to {what}"
        return f"no chat template is applied to {what} (model.chat_template=plain or data.apply_chat_template=true does)"

    def _split(self, name: str, split: Split) -> list[str]:
        lines = [
            f"{name}",
            f"  read        {counted(split.read, 'row')}",
            f"  kept        {split.kept:,} ({counted(split.tokens, 'token')})",
        ]
        if split.desirable is not None:
            lines.append(
                f"  labels      {split.desirable:,} desirable, {split.kept - split.desirable:,} undesirable"
            )
        if split.versions:
            lines.append(
                f"  versions    {visible(versions.in_words(split.versions, split.kept), lines=False)}"
            )
        if split.text_rows:
            lines.append(f"  template    {self._template(split.text_rows)}")
        if split.unread:
            lines.append(f"  not read    {visible(columns_of(split.unread), lines=False)}")
        lines += [
            f"  dropped     {count:,} {KINDS.get(why, why)}" for why, count in sorted(split.dropped.items())
        ]
        if split.truncated:
            lines.append(f"  truncated   {split.truncated:,}")
        for label, lengths in (("prompt", split.prompt_tokens), ("completion", split.completion_tokens)):
            if lengths.get("max"):
                values = "   ".join(f"{key} {value}" for key, value in lengths.items())
                lines.append(f"  {label + ' tokens':<18}{values}")
        return lines


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def columns_of(rows: dict[str, int]) -> str:
    """The columns that nothing reads, most frequent first."""
    names = [name[:40] for name, _ in Counter(rows).most_common()]
    more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
    return f"column{'s' * (len(names) > 1)} {', '.join(names[:8])}{more}"


def percentiles(histogram: Counter[int]) -> dict[str, int]:
    """{length: rows} -> the lengths that 5, 50, 95 and 100 percent of the rows do not exceed."""
    total, seen, lengths = histogram.total(), 0, {}
    if not total:
        return {}
    wanted = iter(PERCENTILES.items())
    name, share = next(wanted)
    for length in sorted(histogram):
        seen += histogram[length]
        while seen >= share * total:
            lengths[name] = length
            name, share = next(wanted, ("", 2.0))
    return lengths


def sample(tokenizer: Any, columns: dict[str, Any], prompt_tokens: int = 0, limit: int = 1200) -> str:
    """A token row as text, its trained tokens (of a pair: the two completions) between ⟦ and ⟧.

    `prompt_tokens` is the length of the prompt that both sides of a pair begin with.
    """
    if "labels" in columns:
        return clip(
            marked(tokenizer, columns["input_ids"], [label != -100 for label in columns["labels"]]), limit
        )
    if "input_ids" in columns:
        return clip(tokenizer.decode(columns["input_ids"]), limit)
    sides: tuple[Any, ...] = (
        columns.get("completion_ids", columns.get("chosen_ids")),
        columns.get("rejected_ids"),
    )
    prompt = columns.get("prompt_ids", sides[0][:prompt_tokens])
    if "prompt_ids" not in columns:
        sides = sides[0][prompt_tokens:], sides[1][prompt_tokens:]
    if cut := len(prompt) - whole_characters(tokenizer, prompt, len(prompt)):
        prompt, sides = prompt[:-cut], tuple(ids and prompt[-cut:] + ids for ids in sides)
    if sides[1] is None:
        return clip(tokenizer.decode(prompt) + f"⟦{tokenizer.decode(sides[0])}⟧", limit)
    texts = [clip(tokenizer.decode(ids), limit // 3) for ids in (prompt, *sides)]
    return f"{texts[0]}\n  chosen   ⟦{texts[1]}⟧\n  rejected ⟦{texts[2]}⟧"


def whole_characters(tokenizer: Any, ids: list[int], at: int) -> int:
    """The last border of two characters up to token `at`: bytes of a character that is cut decode to nothing readable."""
    borders = range(at, max(at - 4, 0), -1)  # UTF-8 has at most 4 bytes, each perhaps a token
    return next((one for one in borders if not tokenizer.decode(ids[:one]).endswith("\ufffd")), at)


def marked(tokenizer: Any, ids: list[int], trained: list[bool]) -> str:
    """Text of the tokens with ⟦...⟧ around each run of trained ones."""
    pieces, start = [], 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or trained[at] != trained[start]:
            text = tokenizer.decode(ids[start:at])
            pieces.append(f"⟦{text}⟧" if trained[start] else text)
            start = at
    return "".join(pieces)


def clip(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - limit} characters ...] {text[-half:]}"
