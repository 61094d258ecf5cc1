"""Reports how many rows were read, how many were dropped and why, their lengths, and samples. Rejects unusable datasets."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

from pipeline.data.chunks import locate_errors
from pipeline.data.counts import (
    Counts,
    count_duplicates,
    count_overlap,
    first_errors,
    of_split,
    sum_counts,
    versions_in_words,
    with_unit,
)
from pipeline.data.formats import kind_of
from pipeline.data.labels import RARE
from pipeline.data.messages import THOUGHTS
from pipeline.data.tasks import SAMPLES, Options, encoder_of
from pipeline.data.values import RowError, show_json
from pipeline.errors import InputError, escape_controls
from pipeline.models.template import is_plain, text_as_chat

PERCENTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
# {kind of error: description in the report}. The report shows the names of all other kinds.
ERROR_NAMES = {
    "not_json": "not JSON",
    "not_utf8": "not UTF-8",
    "not_csv": "not CSV",
    "overlong": "too long",
    "label": "labeled as bad",
    "ragged": "with a different number of values than the header",
    "missing_field": "wrong or missing field",
    "equal_pair": "chosen equal to rejected",
    "python_text": "with a list in Python's notation",
    "template": "rejected by the chat template",
    "transform": "failed in data.transform",
    "left_out": "dropped by data.transform",
    "duplicate": "equal to an earlier row",
    "tie": "tie, or without a clear label",
    "unlabeled": "without a label",
    "unknown_label": "with a label that is not in data.label",
}
MAX_FILES = 8  # maximum number of unread files that the report names
MANY = 0.05  # fraction of dropped rows above which the headline shows the most frequent reason
MAX_LABELS = 8  # maximum number of label values that the report lists
# {split: name of the rows in the headline}
ROWS_OF = {
    "train": "training rows",
    "eval": "eval rows",
    "pairs": "eval pairs",
    "benchmarks": "completions of benchmarks",
}


@dataclass
class Split:
    """Counts the rows of the split `train` or `eval`, or of one source of the split.

    `read` is the number of rows in files, `kept` the number of token rows. A row with several answers becomes several token rows.
    """

    read: int = 0
    kept: int = 0
    tokens: int = 0
    truncated: int = 0
    rows: int = 0  # rows of the token table; a packed row contains several kept rows
    desirable: int | None = None  # kept rows with a good label, or None if the rows have no labels
    dropped: dict[str, int] = field(default_factory=dict)  # {reason: rows}
    versions: dict[str, int] = field(default_factory=dict)  # {version (models:/NAME/NUMBER): generated rows}
    judges: dict[str, int] = field(default_factory=dict)  # {judge (judge:FILE@DIGEST): scored rows}
    # {column of labels: {"VALUE = MEANING": rows}}, such as {"winner": {"a = first": 268, "tie": 51}}
    label_values: dict[str, dict[str, int]] = field(default_factory=dict)
    prompt_tokens: dict[str, int] = field(default_factory=dict)  # percentiles: p5, p50, p95 and max
    completion_tokens: dict[str, int] = field(default_factory=dict)
    text_rows: int = 0  # rows whose prompt is plain text
    chat_rows: int = 0  # rows whose prompt is a list of messages
    unread: dict[str, int] = field(default_factory=dict)  # {column that the model does not see: rows}
    ended: int = 0  # rows whose trained tokens include an end token
    # only for a source: index and settings of the source in the job
    source: int = 0
    path: str = ""
    revision: str = ""  # the commit of a dataset on the Hub
    columns: dict[str, Any] | None = None
    transform: str | None = None
    drawn: int | None = None  # rows drawn per epoch, or None if each row is drawn once


@dataclass
class Report:
    """Describes the rows of a job. `to_dict()` returns plain JSON, and `render()` returns a text for a terminal."""

    stage: str
    max_length: int
    splits: dict[str, Split] = field(default_factory=dict)
    # {split: sources in the order of the job}
    sources: dict[str, list[Split]] = field(default_factory=dict)
    duplicates: int = 0  # rows equal to an earlier row of the same split
    skipped: list[str] = field(default_factory=list)  # location (file:line) of the first dropped rows
    samples: list[str] = field(default_factory=list)
    packed: int | None = None  # number of packed training rows, or None
    # (eval rows whose prompt is also in train, eval rows whose prompt and completions are in train), or None without eval
    overlap: tuple[int, int] | None = None
    text_as_chat: bool = True  # whether the chat template is applied to prompts of plain text
    notes: list[str] = field(default_factory=list)  # warnings about the dataset
    not_read: dict[str, str] = field(default_factory=dict)  # {unread file of a folder: reason}
    reused: bool = False
    seconds: float = 0.0

    def row_format(self) -> str | None:
        """Returns the form in which the model reads the rows: chat, text, or both. Returns None if there are no rows."""
        rows = {"chat": 0, "text": 0}
        for split in self.splits.values():
            rows["chat"] += split.chat_rows
            rows["chat" if self.text_as_chat else "text"] += split.text_rows
        return "both" if all(rows.values()) else next((name for name in rows if rows[name]), None)

    def labels(self) -> tuple[int, int]:
        """Returns the numbers of desirable and undesirable rows in an epoch. For weighted sources, the numbers are averages."""
        desirable = drawn = 0.0
        for source in self.sources["train"]:
            share = 1 if source.drawn is None else source.drawn / max(1, source.rows)
            desirable, drawn = desirable + share * (source.desirable or 0), drawn + share * source.kept
        return round(desirable), round(drawn) - round(desirable)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Report":
        splits = {split: Split(**counts) for split, counts in value["splits"].items()}
        sources = {split: [Split(**source) for source in group] for split, group in value["sources"].items()}
        overlap = tuple(value["overlap"]) if value["overlap"] else None
        return cls(**{**value, "splits": splits, "sources": sources, "overlap": overlap})

    def render(self, samples: bool = True) -> str:
        action = "loaded from the cache" if self.reused else "read and tokenized"
        lines = [
            f"data for stage {self.stage}: at most {self.max_length} tokens per row, {action} in {self.seconds:.1f} s"
        ]
        for name, split in self.splits.items():
            lines += ["", name, *(report_line(*entry) for entry in self._entries(name, split))]
        if self.packed is not None:
            lines.append(report_line("packed", f"{with_unit(self.packed)} of up to {self.max_length} tokens"))
        if self.duplicates:
            duplicates = (
                f"{with_unit(self.duplicates)} equal to an earlier row (data.deduplicate=true removes them)"
            )
            lines += ["", f"duplicates    {duplicates}"]
        lines += [report_line("warning", note) for note in (*self.notes, *self._not_read())]
        if self.skipped:
            lines += [
                "",
                "first dropped rows:",
                *(f"  {escape_controls(row, lines=False)}" for row in self.skipped),
            ]
        if self.samples and samples:
            markings = {"learned": "trained tokens", "scored": "completions"}
            marking = markings.get(kind_of(self.stage).completions)
            lines += ["", f"samples{f', the {marking} between ⟦ and ⟧' if marking else ''}:"]
            for index, sample in enumerate(self.samples, 1):
                lines += [f"--- {index} " + "-" * 66, escape_controls(sample)]
        return "\n".join(lines)

    def headline(self) -> str:
        """Returns one line with the numbers of rows, and the columns that the model does not see."""
        parts = []
        for name, split in self.splits.items():
            kept = f"{split.kept:,}" + (f" of {split.read:,}" if split.kept < split.read else "")
            notes = [f"{split.truncated:,} truncated"] if split.truncated else []
            if split.read - split.kept > MANY * split.read and split.dropped:
                kind, rows = max(split.dropped.items(), key=itemgetter(1))
                notes = [f"{rows:,} {error_kind_name(kind)}", *notes]
            parts.append(f"{kept} {ROWS_OF[name]}" + (f" ({', '.join(notes)})" if notes else ""))
        parts += [with_unit(self.duplicates, "duplicate")] if self.duplicates else []
        columns = [f"not read: {text}" for text in map(unread_columns, self.splits.values()) if text]
        return "; ".join([", ".join(parts), *columns[:1], *self._not_read()])

    def _not_read(self) -> list[str]:
        """Returns a list with one text about unread files in folders, or an empty list."""
        files = [f"{path} ({reason})" for path, reason in self.not_read.items()]
        more = [f"{len(files) - MAX_FILES:,} more"] if len(files) > MAX_FILES else []
        return [f"not read: {', '.join(files[:MAX_FILES] + more)}"] if files else []

    def _entries(self, name: str, split: Split) -> Iterator[tuple[str, str]]:
        """Yields (title, text) for each line of a split's table."""
        yield "read", with_unit(split.read)
        yield "kept", f"{split.kept:,} ({with_unit(split.tokens, 'token')})"
        if split.desirable is not None:
            yield "labels", f"{split.desirable:,} desirable, {split.kept - split.desirable:,} undesirable"
        for column, values in split.label_values.items():
            if len(values) > MAX_LABELS:  # for many values, such as a scale, show only the meanings
                meanings = Counter[str]()
                for value, rows in values.items():
                    meanings[value.rpartition(" = ")[2]] += rows
                values = meanings
            yield "label", f"{column}: {', '.join(f'{value} {rows:,}' for value, rows in values.items())}"
        if split.versions:
            yield "versions", versions_in_words(split.versions, split.kept)
        if split.judges:
            yield "judges", ", ".join(f"{with_unit(rows)} by {judge}" for judge, rows in split.judges.items())
        if split.text_rows:
            plain = f"{with_unit(split.text_rows)} of plain text"
            hint = " (to apply one, set model.chat_template=plain or data.apply_chat_template=true)"
            applied = ("the", "") if self.text_as_chat else ("no", hint)
            yield "template", f"{applied[0]} chat template is applied to {plain}{applied[1]}"
        if split.unread:
            yield "not read", unread_columns(split)
        for reason, rows in sorted(split.dropped.items()):
            yield "dropped", f"{rows:,} {error_kind_name(reason)}"
        if split.truncated:
            yield "truncated", f"{split.truncated:,}"
        for part in ("prompt", "completion"):
            lengths = getattr(split, f"{part}_tokens")
            if lengths.get("max"):
                yield f"{part} tokens", "   ".join(f"{key} {value}" for key, value in lengths.items())
        sources = self.sources.get(name, [])
        if len(sources) > 1 or any(source.revision for source in sources):
            epoch = [source.rows if source.drawn is None else source.drawn for source in sources]
            for source, drawn in zip(sources, epoch, strict=True):
                yield "source", "".join((
                    source.path,
                    f" at commit {source.revision[:12]}" if source.revision else "",
                    f" through {source.transform}" if source.transform else "",
                    f" with columns {json.dumps(source.columns, ensure_ascii=False)}" if source.columns else "",
                    f": read {source.read:,}, kept {source.kept:,}, dropped {sum(source.dropped.values()):,}",
                    f" ({with_unit(source.tokens, 'token')})",
                    "" if source.drawn is None else f", {drawn:,} of {source.rows:,} drawn per epoch",
                    f", {drawn / max(1, sum(epoch)):.2%} of the rows",
                    f"; {versions_in_words(source.versions, source.kept)}" if source.versions else "",
                ))  # fmt: skip
        yield from (("warning", text) for text in self._warnings(name, split))

    def _warnings(self, name: str, split: Split) -> Iterator[str]:
        completions = kind_of(self.stage).completions
        for column, count in split.unread.items():
            if column == "tools" or column.rpartition(".")[2] in THOUGHTS:
                yield (
                    f"the model does not see the `{column}` of {with_unit(count)}, because the chat template omits this key; "
                    "for a template with this key, set model.chat_template=FILE"
                )
        if completions == "learned" and name == "train" and split.kept and not split.ended:
            cause = "all completions are truncated (data.max_length)"
            if split.truncated < split.kept:
                cause = "the chat template omits such a token (model.chat_template)"
            problem = "no training completion contains a token that ends generation"
            yield f"{problem}, so the model does not learn to stop, because {cause}"
        prompts, same = self.overlap if name == "eval" and self.overlap else (0, 0)
        if prompts:
            same_too = f" ({same:,} with the same completion)" if completions != "written" else ""
            rows = f"{with_unit(prompts)} of data.eval with a prompt that is also in data.train{same_too}"
            yield f"{rows}; metrics on these rows measure memorization, not generalization"


def unread_columns(split: Split) -> str:
    """Returns a text about the columns that the model does not see, or ""."""
    names = sorted(split.unread, key=lambda column: -split.unread[column])
    more = f" and {len(names) - 8:,} more" if len(names) > 8 else ""
    notes = {name: f" ({with_unit(rows)})" for name, rows in split.unread.items() if rows < split.kept}
    shown = ", ".join(column[:60] + notes.get(column, "") for column in names[:8])
    return f"column{'s' * (len(names) > 1)} {shown}{more}" if names else ""


def report_line(title: str, text: str) -> str:
    return f"  {title:<{11 if len(title) < 12 else 17}} {escape_controls(text, lines=False)}"


# ---- counts -> report ------------------------------------------------------------------------------------------------


def report_of(counts: Sequence[Counts], tokenizer: Any, options: Options) -> Report:
    """Creates the report from the counts of all chunks, which must be in the order of the chunks."""
    report = Report(options.kind.stage, options.max_length, text_as_chat=options.apply_template)
    for split in ("train", "eval"):
        if split_counts := [c for c in counts if any(name == split for name, *_ in c.tally)]:
            report.splits[split] = split_of(split, split_counts)
            sources = sorted({chunk_counts.chunk.source for chunk_counts in split_counts})
            report.sources[split] = [split_of(split, split_counts, source) for source in sources]
    report.skipped = [error_with_count(*entry) for entry in first_errors(counts)]
    by_source: dict[int, list[str]] = {}
    for chunk_counts in counts:
        by_source.setdefault(chunk_counts.chunk.source, []).extend(chunk_counts.samples)
    interleaved = itertools.chain.from_iterable(itertools.zip_longest(*by_source.values()))
    report.samples = [text for text in interleaved if text is not None][:SAMPLES]
    report.duplicates, report.overlap = count_duplicates(counts), count_overlap(counts)
    report.packed = report.splits["train"].rows if options.packing and "train" in report.splits else None
    report.notes = list(row_warnings(counts, tokenizer, options))
    return report


def split_of(name: str, counts: Sequence[Counts], source: int | None = None) -> Split:
    """Returns the counts of `train` or `eval` over all tasks, or over the tasks of one source."""
    split, total = Split(source=source or 0), sum_counts(counts, name, source)
    for label, default in vars(split).items():
        if label in ("prompt_tokens", "completion_tokens"):
            setattr(split, label, length_percentiles(total[label]))
        elif label in total:
            by_detail = isinstance(default, dict)
            setattr(split, label, dict(total[label].most_common()) if by_detail else total[label].total())
    for (column, meaning), rows in sorted(total["labels"].items()):
        split.label_values.setdefault(column, {})[meaning] = rows
    return split


def length_percentiles(histogram: Counter[int]) -> dict[str, int]:
    """Returns the percentiles 5, 50, 95 and 100 of row lengths, from a histogram {length: rows}."""
    import numpy as np

    lengths = sorted(histogram)
    cumulative = np.cumsum([histogram[length] for length in lengths])
    return {
        name: lengths[np.searchsorted(cumulative, share * cumulative[-1])]
        for name, share in PERCENTILES.items()
        if lengths
    }


def row_warnings(counts: Sequence[Counts], tokenizer: Any, options: Options) -> Iterator[str]:
    """Yields warnings about the rows of all splits."""
    completions, total = options.kind.completions, sum_counts(counts)
    yield from (str(chunk_counts.unread) for chunk_counts in counts if chunk_counts.unread)
    if completions == "learned" and total["margins"]:
        yield f"{options.kind.stage} ignores the column `margin`, which only rm uses"
    if special := total["special_tokens"]:
        current, other, value = "ordinary text", "control tokens", "true"
        if options.apply_template:
            other += "; rows that contain the chat template's markup also need data.apply_chat_template=false"
        if options.parse_special_tokens:
            current, other, value = "control tokens", "ordinary text", "false"
        names = ", ".join(f"{token} in {rows:,}" for token, rows in special.most_common(5))
        yield (
            f"{with_unit(total['special_rows'].total())} with special tokens in the text ({names}), which are encoded as {current} "
            f"(data.parse_special_tokens={value} encodes them as {other})"
        )
    if joined := total["joined"].total():
        problem = f"{with_unit(joined)} of plain text without white space between prompt and completion"
        yield f"{problem}; to separate prompt and completion, set model.chat_template=plain"
    messages = total["chat_rows"].total()
    if messages and is_plain(tokenizer) and not text_as_chat(tokenizer, None):
        problem = (
            f"the base has no chat template, so {with_unit(messages)} of messages use the built-in template"
        )
        yield f"{problem}; set model.chat_template=plain in every stage, or a Jinja file"
    has_template = completions != "scored" and (options.apply_template or messages)
    if has_template and (unlearned := encoder_of(tokenizer, options).unlearned_end()):
        end, stops = unlearned
        learned = completions == "learned"
        added = f" ({tokenizer.eos_token} is added only at the end of a row)" if learned else ""
        yield (
            f"the chat template ends a completion with {show_json(end)}, but generation stops on {stops}{added}; set "
            "model.chat_template=plain, or set the template's end as eos_token in the base's tokenizer_config.json"
        )


# ---- datasets that are rejected --------------------------------------------------------------------------------------


def check_rows_are_usable(counts: Sequence[Counts], options: Options) -> None:
    """Raises InputError if a split has no usable rows, or if it has bad rows and data.on_error does not skip them.

    A file without rows counts as one bad row.
    """
    rows_read = Counter[str]()
    for chunk_counts in counts:
        rows_read[chunk_counts.chunk.path] += sum_counts([chunk_counts])["read"].total()
    for chunk_counts in counts:
        if chunk_counts.chunk.start == 0 and not rows_read[chunk_counts.chunk.path]:
            error = RowError("empty_file", "", "no rows", "at least one row")
            chunk_counts.leave_out(chunk_counts.chunk.split, 1, error)
            locate_errors([error], chunk_counts.chunk)
    for split in dict.fromkeys(chunk_counts.chunk.split for chunk_counts in counts):
        part, key = of_split(split, counts), f"data.{split}"
        total = sum_counts(part)
        if total["bad"] and (options.on_error == "raise" or unclear_labels(total)):
            raise InputError(describe_bad_rows(part), key=key)
        read_files = {chunk_counts.chunk.path for chunk_counts in part if sum_counts([chunk_counts])["kept"]}
        for chunk_counts in part:
            if chunk_counts.unread and chunk_counts.chunk.path not in read_files:
                problem = f"no row of this file can be read; repair the file, or remove it from {key}"
                raise InputError(f"{chunk_counts.unread}; {problem}", key=key)
        if not total["kept"]:
            advice = "".join(f"; first: {error}" for error, _ in first_errors(part)[:1])
            if "overlong" in total["dropped"]:
                advice += "; to keep long rows, raise data.max_length, or set data.overlong=truncate (not for chat prompts)"
            elif "prompt_too_long" in total["dropped"]:
                tokens = f"the {options.max_length} tokens of data.max_length"
                advice += f"; the prompts alone fill {tokens}; raise this limit"
            problem = error_kinds_in_words(total["dropped"]) or "the files are empty"
            raise InputError(f"none of {total['read'].total()} rows is usable ({problem}){advice}", key=key)
    kept = {split: sum_counts(counts, split)["kept"].total() for split in ("train", "eval")}
    if options.eval_fraction and not all(kept.values()):
        raise InputError(
            f"a split of {options.eval_fraction} of {sum(kept.values())} rows, by the beginnings of their prompts, leaves no rows for "
            f"`{'eval' if kept['train'] else 'train'}`; set another share, or use held-out rows: data.eval=eval.jsonl",
            key="data.eval_fraction",
        )


def unclear_labels(total: Mapping[str, Counter[str]]) -> bool:
    """Returns True if so many labels have no known meaning that the label rule is probably wrong."""
    return total["bad"]["unclear_label"] > RARE * total["read"].total()


def describe_bad_rows(counts: Sequence[Counts]) -> str:
    """Returns the message for a dataset with bad rows: the number of rows per kind of error, the first rows, and what to do."""
    total = sum_counts(counts)
    kinds, read = total["bad"], total["read"].total()
    bad = kinds.total() - kinds["empty_file"]
    intro = f"{bad:,} of {with_unit(read)} cannot be used" if bad else "nothing to read"
    errors = [(error, rows) for error, rows in first_errors(counts) if error.kind in kinds]
    lines = [f"  {error_with_count(*entry)}" for entry in errors]
    if remaining := kinds.total() - sum(rows for _, rows in errors):
        lines.append(f"  and {remaining:,} more")
    advice = "fix these rows, or set data.on_error=skip to skip them"
    if unclear_labels(total):
        advice = "set data.label to the meanings of the labels"
    if "overlong" in kinds:
        advice += "; for long rows, set data.overlong=truncate (or drop)"
    return "\n".join([f"{intro} ({error_kinds_in_words(kinds)}):", *lines, advice + "; nothing was trained"])


def error_kinds_in_words(kinds: Counter[str]) -> str:
    return ", ".join(f"{rows:,} {error_kind_name(kind)}" for kind, rows in kinds.most_common())


def error_kind_name(kind: str) -> str:
    """Describes the kind of a RowError in a few words."""
    return ERROR_NAMES.get(kind, kind.replace("_", " "))


def error_with_count(error: RowError, rows: int) -> str:
    """Returns the error of a row as text, with the number of other rows that have the same error."""
    more = f" (and {rows - 1:,} more with the same problem)" if rows > 1 else ""
    return f"{error}{more}"
