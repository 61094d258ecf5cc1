"""Reports what became of the rows: counts, reasons, token lengths, samples. Rejects sets of rows that cannot be used."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pipeline.data import reshape
from pipeline.data.chunks import locate
from pipeline.data.counts import (
    Counts,
    count,
    duplicates,
    first_errors,
    of_split,
    overlap,
    totals,
    versions_in_words,
)
from pipeline.data.shapes import kind_of
from pipeline.data.tasks import SAMPLES, Options, encoder_of
from pipeline.data.values import RowError, show
from pipeline.errors import InputError, visible
from pipeline.models.template import is_plain, text_as_chat

PERCENTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
# Kind of a row's error -> what is wrong with the row, if the kind itself does not say it
ERROR_NAMES = {
    "not_json": "not JSON",
    "not_object": "not a JSON object",
    "not_utf8": "not UTF-8",
    "not_finite": "number that is not finite",
    "margin": "margin out of range",
    "weight": "weight that cannot be used",
    "label": "labelled as bad",
    "nested": "nested too deep",
    "special_tokens": "special tokens that cannot be kept apart",
    "not_csv": "not CSV",
    "ragged": "with another number of values than the header",
    "truncated_gzip": "truncated or damaged gzip",
    "damaged": "truncated or damaged file",
    "missing_field": "wrong or missing field",
    "equal_pair": "chosen equal to rejected",
    "equal_after_truncation": "equal only after truncation",
    "unequal_answers": "pos_answers and neg_answers of unequal length",
    "prompts_differ": "prompts differ inside the row",
    "template": "refused by the chat template",
    "transform": "failed in data.transform",
    "left_out": "left out by data.transform",
    "duplicate": "equal to an earlier row",
    "tie": "tie, or without a clear label",
    "unknown_label": "label that data.label does not know",
    "unclear_label": "label whose meaning is not known",
    "prompt_too_long": "whose prompt alone is too long: nothing of the completion is left",
}
MAX_LABELS = 8  # different values of a label that are shown one by one


@dataclass
class Counted:
    """Counts of rows: `read` counts JSON rows, `kept` the token rows made of them (several for pos/neg answers)."""

    read: int = 0
    kept: int = 0
    tokens: int = 0
    desirable: int | None = None  # kept rows that are labeled as good, or None without labels
    versions: dict[str, int] = field(default_factory=dict)  # models:/NAME/NUMBER that generated rows -> rows

    def filled(self, total: Mapping[str, Counter[Any]]) -> Self:
        """Copies the tasks' totals that have the name of a field, as {detail: number} or as a sum. Returns itself."""
        for name in vars(self).keys() & total.keys():
            by_detail = isinstance(getattr(self, name), dict)
            setattr(self, name, dict(total[name].most_common()) if by_detail else total[name].total())
        return self


@dataclass
class Split(Counted):
    """Counts of `train` or `eval`."""

    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    # column of labels -> {"VALUE = MEANING": rows}, such as {"winner": {"a = first": 268, "tie": 51}}
    label_values: dict[str, dict[str, int]] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)  # p5 p50 p95 max
    completion_tokens: dict[str, int] = field(default_factory=dict)
    text_rows: int = 0  # rows whose prompt is plain text
    chat_rows: int = 0  # rows whose prompt is messages
    unread: dict[str, int] = field(default_factory=dict)  # column that the model does not see -> rows
    ended: int = 0  # rows whose trained tokens include an end token


@dataclass
class SourceCounts(Counted):
    """Counts of one source of `train` or `eval`."""

    source: int = 0
    path: str = ""
    revision: str = ""  # the commit of a dataset on the Hub
    # The job's columns and transform for this source.
    columns: dict[str, Any] | None = None
    transform: str | None = None
    dropped: int = 0
    rows: int = 0  # rows of the token table: the kept rows, or packs of them
    drawn: int | None = None  # rows drawn per epoch, or None if each is drawn once


@dataclass
class Report:
    """The outcome of preparing the data of one job; `to_dict()` is plain JSON, `render()` a text for a terminal."""

    stage: str
    max_length: int
    splits: dict[str, Split] = field(default_factory=dict)
    # Split -> its sources, in the job's order
    sources: dict[str, list[SourceCounts]] = field(default_factory=dict)
    # rows equal to an earlier row of the same split, or None if there are too many rows to count
    duplicates: int | None = None
    skipped: list[str] = field(default_factory=list)  # the first rows left out, file:line each
    samples: list[str] = field(default_factory=list)
    packed: int | None = None  # packed training rows
    # (eval rows whose prompt is also in train, eval rows also there with completions), or None if not compared
    overlap: tuple[int, int] | None = None
    text_as_chat: bool = True  # whether the chat template is applied to prompts of plain text
    notes: list[str] = field(default_factory=list)  # warnings about the dataset
    reused: bool = False
    seconds: float = 0.0

    def row_format(self) -> str | None:
        """Returns what a model sees of the rows: chat, text, or both. None: there are no rows."""
        splits = list(self.splits.values())
        chat = any(split.chat_rows or (split.text_rows and self.text_as_chat) for split in splits)
        text = any(split.text_rows and not self.text_as_chat for split in splits)
        return "both" if chat and text else "chat" if chat else "text" if text else None

    def labels(self) -> tuple[int, int]:
        """Returns (desirable, undesirable) rows of an epoch; a source with a weight counts as it is drawn, on average."""
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
        did = "loaded from the cache into Ray" if self.reused else "read and tokenized"
        lines = [
            f"data for stage {self.stage}: at most {self.max_length} tokens a row, {did} in {self.seconds:.1f} s"
        ]
        for name, split in self.splits.items():
            lines += ["", name, *(line(*entry) for entry in self._split(name, split))]
        if self.packed is not None:
            lines.append(line("packed", f"{count(self.packed)} of up to {self.max_length} tokens"))
        if self.duplicates:
            repeats = f"{count(self.duplicates)} equal to an earlier row (data.deduplicate=true removes them)"
            lines += ["", f"duplicates    {repeats}"]
        lines += [line("warning", note) for note in self.notes]
        if self.skipped:
            lines += ["", "first rows left out:", *(f"  {visible(row, lines=False)}" for row in self.skipped)]
        if self.samples and samples:
            marked = {"learned": "trained tokens", "scored": "completions"}.get(
                kind_of(self.stage).completions
            )
            lines += ["", f"samples{f', the {marked} between ⟦ and ⟧' if marked else ''}:"]
            for index, sample in enumerate(self.samples, 1):
                lines += [f"--- {index} " + "-" * 66, visible(sample)]
        return "\n".join(lines)

    def headline(self) -> str:
        """Returns the numbers of rows, on one line."""
        parts = []
        for name, split in self.splits.items():
            kept = f"{split.kept:,}" + (f" of {split.read:,}" if split.kept < split.read else "")
            cut = f" ({split.truncated:,} truncated)" if split.truncated else ""
            parts.append(f"{kept} {ROWS_OF[name]}{cut}")
        repeated = f"{self.duplicates:,} duplicate{'s' * (self.duplicates > 1)}" if self.duplicates else ""
        return ", ".join(filter(None, [*parts, repeated]))

    def _split(self, name: str, split: Split) -> list[tuple[str, str]]:
        """Returns the table of a split: (title, text)."""
        plain = f"{count(split.text_rows)} of plain text"
        template = f"the chat template is applied to {plain}"
        if not self.text_as_chat:
            template = f"no chat template is applied to {plain} (model.chat_template=plain or data.apply_chat_template=true does)"
        good, lengths = split.desirable or 0, (split.prompt_tokens, split.completion_tokens)
        unread = [name[:40] for name, _ in Counter(split.unread).most_common()]
        more = f" and {len(unread) - 8:,} more" if len(unread) > 8 else ""
        entries = [
            (True, "read", count(split.read)),
            (True, "kept", f"{split.kept:,} ({count(split.tokens, 'token')})"),
            (split.desirable is not None, "labels", f"{good:,} desirable, {split.kept - good:,} undesirable"),
            *((True, "label", labels_in_words(*entry)) for entry in split.label_values.items()),
            (split.versions, "versions", versions_in_words(split.versions, split.kept)),
            (split.text_rows, "template", template),
            (split.unread, "not read", f"column{'s' * (len(unread) > 1)} {', '.join(unread[:8])}{more}"),
            *((True, "dropped", f"{rows:,} {name_of(why)}") for why, rows in sorted(split.dropped.items())),
            (split.truncated, "truncated", f"{split.truncated:,}"),
            *(
                (one.get("max"), title, "   ".join(f"{key} {value}" for key, value in one.items()))
                for title, one in zip(("prompt tokens", "completion tokens"), lengths, strict=True)
            ),
            *((True, "source", text) for text in self._sources(name)),
            *((shown, "warning", text) for shown, text in self._warnings(name, split)),
        ]
        return [(title, text) for shown, title, text in entries if shown]

    def _sources(self, name: str) -> Iterator[str]:
        """Yields for each source, if there are several or one is on the Hub, its counts and its share of an epoch."""
        sources = self.sources.get(name, [])
        if len(sources) < 2 and not any(one.revision for one in sources):
            return
        total = max(1, sum(one.rows if one.drawn is None else one.drawn for one in sources))
        for one in sources:
            drawn = one.rows if one.drawn is None else one.drawn
            yield "".join((
                one.path,
                f" at commit {one.revision[:12]}" if one.revision else "",
                f" through {one.transform}" if one.transform else "",
                f" with columns {json.dumps(one.columns, ensure_ascii=False)}" if one.columns else "",
                f": read {one.read:,}, kept {one.kept:,}, dropped {one.dropped:,} ({count(one.tokens, 'token')})",
                "" if one.drawn is None else f", {drawn:,} of {one.rows:,} drawn an epoch",
                f", {drawn / total:.2%} of the rows",
                f"; {versions_in_words(one.versions, one.kept)}" if one.versions else "",
            ))  # fmt: skip

    def _warnings(self, name: str, split: Split) -> Iterator[tuple[Any, str]]:
        """Yields (whether it concerns this split, warning)."""
        yield (
            split.unread.get("tools"),
            (
                f"the model does not see the `tools` of {count(split.unread.get('tools', 0))}, because the chat template does not "
                "write them; for a template that does, set model.chat_template=FILE"
            ),
        )
        long = split.dropped.get("too_long", 0) + split.dropped.get("prompt_too_long", 0)
        yield (
            long > split.kept,
            (
                f"most rows ({long:,} of {split.read:,}) are left out as longer than {self.max_length} tokens: a larger "
                "data.max_length keeps them"
            ),
        )
        completions = kind_of(self.stage).completions
        why = "the chat template leaves it out (model.chat_template)"
        if split.truncated == split.kept:
            why = "all of them are truncated (data.max_length)"
        yield (
            completions == "learned" and name == "train" and split.kept and not split.ended,
            (
                "no completion is trained with a token that generation stops on, so the model does not learn to stop: "
                + why
            ),
        )
        prompts, same = self.overlap if name == "eval" and self.overlap else (0, 0)
        same_too = f" ({same:,} with the same completion)" if completions != "written" else ""
        yield (
            prompts,
            (
                f"{count(prompts)} of data.eval with a prompt that is also in data.train{same_too}: metrics on them measure "
                "memorization, not generalization"
            ),
        )


# {split: name of its rows in the headline}
ROWS_OF = {
    "train": "training rows",
    "eval": "eval rows",
    "pairs": "eval pairs",
    "benchmarks": "completions of benchmarks",
}


def line(title: str, text: str) -> str:
    return f"  {title:<{11 if len(title) < 12 else 17}} {visible(text, lines=False)}"


def labels_in_words(column: str, values: dict[str, int]) -> str:
    """Returns `winner: a = first 268, b = second 281, tie 51`; of many values, such as a scale, only the meanings."""
    if len(values) > MAX_LABELS:
        meanings = Counter[str]()
        for value, rows in values.items():
            meanings[value.rpartition(" = ")[2]] += rows
        values = dict(meanings)
    return f"{column}: {', '.join(f'{value} {rows:,}' for value, rows in values.items())}"


# ---- counts -> report ------------------------------------------------------------------------------------------------


def report_of(counts: Sequence[Counts], tokenizer: Any, options: Options) -> Report:
    """Makes the report from the counts of all chunks, which come in the order of the chunks."""
    report = Report(options.stage, options.max_length, text_as_chat=options.apply_template)
    for name in ("train", "eval"):
        with_split = [one for one in counts if any(split == name for split, *_ in one.tally)]
        if with_split:
            report.splits[name] = split_of(name, with_split)
            sources = (
                (one, totals(with_split, name, one))
                for one in sorted({one.chunk.source for one in with_split})
            )
            report.sources[name] = [SourceCounts(source=one).filled(total) for one, total in sources]
    report.skipped = [named(*one) for one in first_errors(counts)]
    by_source: dict[int, list[str]] = {}
    for one in counts:
        by_source.setdefault(one.chunk.source, []).extend(one.samples)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_source.values()))
    report.samples = [text for text in in_turn if text is not None][:SAMPLES]
    report.duplicates, report.overlap = duplicates(counts), overlap(counts)
    report.packed = totals(counts, "train")["rows"].total() if options.packing else None
    report.notes = notes(counts, tokenizer, options)
    return report


def split_of(name: str, counts: Sequence[Counts]) -> Split:
    """Returns the counts of `train` or `eval` over all tasks."""
    split = Split().filled(total := totals(counts, name))
    split.prompt_tokens, split.completion_tokens = (
        percentiles(total[f"{part}_tokens"]) for part in ("prompt", "completion")
    )
    for (column, meaning), rows in sorted(total["labels"].items()):
        split.label_values.setdefault(column, {})[meaning] = rows
    return split


def percentiles(histogram: Counter[int]) -> dict[str, int]:
    """Returns the lengths that 5, 50, 95 and 100 percent of the rows do not exceed, from {length: rows}."""
    import numpy as np

    lengths = sorted(histogram)
    seen = np.cumsum([histogram[length] for length in lengths])
    return {
        name: lengths[np.searchsorted(seen, share * seen[-1])]
        for name, share in PERCENTILES.items()
        if lengths
    }


def notes(counts: Sequence[Counts], tokenizer: Any, options: Options) -> list[str]:
    warnings = [f"{one.unread}" for one in counts if one.unread]
    completions, total = options.kind.completions, totals(counts)
    if completions == "learned" and total["margins"]:
        warnings.append(f"{options.stage} does not use the column `margin`: only rm does")
    if special := total["special_tokens"]:
        ways = ("ordinary text", "text"), ("control tokens", "control")
        (way, _), (other, value) = ways if options.special_tokens == "text" else reversed(ways)
        names = ", ".join(f"{token} in {rows:,}" for token, rows in special.most_common(5))
        warnings.append(
            f"{count(total['special_rows'].total())} with special tokens in the text ({names}): they are encoded as {way} "
            f"(data.special_tokens={value} encodes them as {other})"
        )
    if joined := total["joined"].total():
        warnings.append(
            f"{count(joined)} of plain text without white space between prompt and completion: model.chat_template=plain puts "
            "them into a dialogue"
        )
    messages = total["chat_rows"].total()
    if messages and is_plain(tokenizer) and not text_as_chat(tokenizer, None):
        warnings.append(
            f"the base has no chat template, so {count(messages)} of messages use the built-in one; set "
            "model.chat_template=plain in every stage, or a Jinja file"
        )
    if completions == "scored" or not (options.apply_template or messages):
        return warnings
    if unlearned := encoder_of(tokenizer, options).unlearned_end():
        end, stops = unlearned
        learned = completions == "learned"
        added = f": {tokenizer.eos_token} is added, but only at the end of a row" if learned else ""
        warnings.append(
            f"the chat template ends a completion with {show(end)}, generation stops on {stops}{added}; set "
            "model.chat_template=plain, or make the template's end the eos_token in the base's tokenizer_config.json"
        )
    return warnings


# ---- sets of rows that are rejected ----------------------------------------------------------------------------------


def add_empty_files(counts: Sequence[Counts]) -> None:
    """Counts a file without rows as a bad row in its first chunk."""
    read = Counter[str]()
    for one in counts:
        read[one.chunk.path] += totals([one])["read"].total()
    for one in counts:
        if one.chunk.start == 0 and not read[one.chunk.path]:
            expected = "one JSON object on each line" if one.chunk.format == "lines" else "at least one row"
            empty = RowError("empty_file", "", "no rows", expected)
            one.add_error(one.chunk.split, 1, empty)
            locate([empty], one.chunk)


def check(counts: Sequence[Counts], options: Options) -> None:
    """Raises InputError for bad rows, unless data.on_error skips them, and for a set of which no row is left."""
    for name in dict.fromkeys(one.chunk.split for one in counts):
        part = of_split(name, counts)
        total = totals(part)
        if total["bad"] and (options.on_error == "raise" or unclear_labels(total)):
            raise InputError(complaint(part), key=f"data.{name}")
        read_files = {one.chunk.path for one in part if totals([one])["kept"]}
        for one in part:
            if one.unread and one.chunk.path not in read_files:
                raise InputError(
                    f"{one.unread}; no row of this file can be read; repair it, or remove it from data.{name}",
                    key=f"data.{name}",
                )
        if not total["kept"]:
            raise InputError(none_left(part, options), key=f"data.{name}")
    kept = {name: totals(counts, name)["kept"].total() for name in ("train", "eval")}
    if options.eval_fraction and not all(kept.values()):
        empty = "eval" if kept["train"] else "train"
        raise InputError(
            f"{options.eval_fraction} of {sum(kept.values())} rows, by prompt, leaves none for `{empty}`; "
            "set another share, or name held-out rows: data.eval=eval.jsonl",
            key="data.eval_fraction",
        )


def unclear_labels(total: Mapping[str, Counter[str]]) -> bool:
    """Returns True if too many labels have no known meaning, so that the rule is probably wrong."""
    return total["bad"]["unclear_label"] > reshape.RARE * total["read"].total()


def none_left(counts: Sequence[Counts], options: Options) -> str:
    """Returns the message for a set whose rows have all been dropped."""
    total = totals(counts)
    dropped = total["dropped"]
    first = "".join(f"; first: {error}" for error, _ in first_errors(counts)[:1])
    advice = ""
    if "too_long" in dropped:
        advice = "; data.too_long=truncate or a larger data.max_length keeps long rows"
    elif "prompt_too_long" in dropped:
        advice = f"; their prompts alone fill the {options.max_length} tokens of data.max_length: raise it"
    why = in_words(dropped) or "the files are empty"
    return f"no row is left of {total['read'].total()} read ({why}){first}{advice}"


def complaint(counts: Sequence[Counts]) -> str:
    """Returns the message for a set with bad rows: how many of which kind, the first of them, and what to do."""
    total = totals(counts)
    kinds, read = total["bad"], total["read"].total()
    numbers = in_words(kinds)
    bad = kinds.total() - kinds["empty_file"]
    what = f"{bad:,} of {count(read)} cannot be used ({numbers})" if bad else f"nothing to read ({numbers})"
    first = [(error, rows) for error, rows in first_errors(counts) if error.kind in kinds]
    if bad == read > 1 and first[0][1] == read:
        lines = [f"  all {read:,} rows have the same problem: {first[0][0]}"]
    else:
        lines = [f"  {named(*one)}" for one in first]
        if left := kinds.total() - sum(rows for _, rows in first):
            lines.append(f"  and {left:,} more")
    advice = "fix them, or set data.on_error=skip to leave them out"
    if unclear_labels(total):
        advice = "set data.label to what the labels mean"
    if "too_long" in kinds:
        advice += "; data.too_long=truncate (or drop) for long rows"
    return "\n".join([f"{what}:", *lines, advice + "; nothing was trained"])


def in_words(kinds: Counter[str]) -> str:
    return ", ".join(f"{rows:,} {name_of(kind)}" for kind, rows in kinds.most_common())


def name_of(kind: str) -> str:
    """Returns in a few words what is wrong with a row, by the kind of its error."""
    return ERROR_NAMES.get(kind, kind.replace("_", " "))


def named(error: RowError, rows: int) -> str:
    """Returns the error of a row, and how many other rows have the same problem."""
    more = f" (and {rows - 1:,} more with the same problem)" if rows > 1 else ""
    return f"{error}{more}"
