"""Which sets of rows are refused before anything is trained, and what the message says."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.data import report as reports
from pipeline.data.chunks import Chunk, locate
from pipeline.data.tasks import Options, Stats, note_bad, of_split
from pipeline.data.values import RowError
from pipeline.errors import InputError


def note_empty(stats: list[Stats], chunks: list[Chunk]) -> None:
    """A file without rows counts as a bad row, in the first of its chunks."""
    read: Counter = Counter()
    for stat, chunk in zip(stats, chunks, strict=True):
        read[chunk.path] += sum(split.read for split in stat.splits.values())
    for stat, chunk in zip(stats, chunks, strict=True):
        if chunk.start == 0 and not read[chunk.path]:
            expected = "one JSON object on each line" if chunk.format == "lines" else "at least one row"
            empty = RowError("empty_file", "", "no rows", expected)
            note_bad(stat, stat.split(chunk.split), 1, empty)
            locate([empty], chunk)


def check(stats: list[Stats], chunks: list[Chunk], options: Options, data: Any) -> None:
    """Raises InputError for bad rows, unless data.on_error skips them, and for a set of which no row is left."""
    for name in dict.fromkeys(chunk.split for chunk in chunks):
        part = of_split(name, stats, chunks)
        kinds = sum((stat.kinds for stat in part), Counter())
        splits = [split for stat in part for split in stat.splits.values()]
        read = sum(split.read for split in splits)
        if kinds and (options.on_error == "raise" or kinds["unclear_label"]):
            raise InputError(complaint(part, kinds, read), key=f"data.{name}")
        if unread := cut_at_once(stats, chunks, name):
            raise InputError(
                f"{unread}; no row of this file can be read: mend it, or take it out", key=f"data.{name}"
            )
        if not sum(split.kept for split in splits):
            raise InputError(none_left(part, read, options), key=f"data.{name}")
    kept = Counter(
        {
            name: sum(stat.splits[name].kept for stat in stats if name in stat.splits)
            for name in ("train", "eval")
        }
    )
    if options.eval_fraction and not (kept["train"] and kept["eval"]):
        empty = "eval" if kept["train"] else "train"
        raise InputError(
            f"{data.eval_fraction} of {kept.total()} rows, by prompt, leaves none for `{empty}`; "
            "set another share, or name held-out rows: data.eval=eval.jsonl",
            key="data.eval_fraction",
        )


def cut_at_once(stats: Sequence[Stats], chunks: Sequence[Chunk], name: str) -> RowError | None:
    """Why a file is not read to its end, of the files of a set of which no row is kept; None: there is no such file."""
    kept: Counter = Counter()
    for stat, chunk in zip(stats, chunks, strict=True):
        kept[chunk.path] += sum(split.kept for split in stat.splits.values())
    return next(
        (
            stat.cut
            for stat, chunk in zip(stats, chunks, strict=True)
            if chunk.split == name and stat.cut and not kept[chunk.path]
        ),
        None,
    )


def none_left(stats: Sequence[Stats], read: int, options: Options) -> str:
    """What to say of a set whose rows have all been dropped."""
    dropped: Counter = sum(
        (Counter(split.dropped) for stat in stats for split in stat.splits.values()), Counter()
    )
    why = ", ".join(f"{count} {reports.KINDS.get(kind, kind)}" for kind, count in dropped.most_common())
    first = next((f"; first: {error}" for stat in stats for error in stat.errors), "")
    advice = ""
    if "too_long" in dropped:
        advice = "; data.too_long=truncate or a larger data.max_length keeps long rows"
    elif "prompt_too_long" in dropped:
        advice = f"; their prompts alone fill the {options.max_length} tokens of data.max_length: raise it"
    return f"no row is left of {read} read ({why or 'the files are empty'}){first}{advice}"


def complaint(stats: Sequence[Stats], kinds: Counter, read: int) -> str:
    """What to say of a set with bad rows: how many of which kind, the first of them, and what to do."""
    counts = ", ".join(f"{count:,} {reports.KINDS.get(kind, kind)}" for kind, count in kinds.most_common())
    rows = kinds.total() - kinds["empty_file"]
    what = (
        f"{rows:,} of {reports.counted(read, 'row')} cannot be used ({counts})"
        if rows
        else f"nothing to read ({counts})"
    )
    ways: Counter = sum((stat.ways for stat in stats), Counter())
    if rows == read > 1 and len(ways) == 1:
        lines = [f"  rows 1-{read:,}, all in the same way: {first_errors(stats)[0]}"]
    else:
        lines = [f"  {line}" for line in one_of_each(stats)]
        if (
            named := sum(ways[way] for way in {error.way() for error in first_errors(stats)})
        ) < kinds.total():
            lines.append(f"  and {kinds.total() - named:,} more")
    lines += usable(stats)
    advice = "fix them, or type data.on_error=skip to leave them out"
    if "too_long" in kinds:
        advice += "; data.too_long=truncate (or drop) for long rows"
    return "\n".join([f"{what}:", *lines, advice + "; nothing was trained"])


def usable(stats: Sequence[Stats]) -> list[str]:
    """A line about the rows that are not wrong, if there are any."""
    splits = [split for stat in stats for split in stat.splits.values()]
    if not (kept := sum(split.kept for split in splits)):
        return []
    lengths = [
        reports.percentiles(sum((side[at] for stat in stats for side in stat.lengths.values()), Counter()))
        for at in (0, 1)
    ]
    shown = (
        f"{name} tokens p50 {length['p50']}, max {length['max']}"
        for name, length in zip(("prompt", "completion"), lengths, strict=True)
        if length.get("max")
    )
    return [
        f"  {reports.counted(kept, 'row')} can be used: {reports.counted(sum(split.tokens for split in splits), 'token')}; "
        + "; ".join(shown)
    ]


def one_of_each(stats: Sequence[Stats]) -> list[str]:
    """The first bad row of each way, with the number of those that are wrong in the same way."""
    ways: Counter = sum((stat.ways for stat in stats), Counter())
    alike: dict[tuple[str, str, str], list[RowError]] = {}
    for error in first_errors(stats):
        alike.setdefault(error.way(), []).append(error)
    lines = []
    for way, errors in alike.items():
        also = ", ".join(f"{error.line}" for error in errors[1:] if error.file == errors[0].file)
        count = max(ways[way], len(errors)) - 1
        more = (
            f" (and {count:,} more in the same way{': ' + errors[0].unit + ' ' + also if also else ''})"
            if count
            else ""
        )
        lines.append(f"{errors[0]}{more}")
    return lines


def first_errors(stats: Sequence[Stats]) -> list[RowError]:
    """The first bad rows in order, chosen so that no kind crowds out the others."""
    seen: Counter = Counter()
    ranked = []
    for at, error in enumerate(error for stat in stats for error in stat.errors):
        seen[error.kind] += 1
        ranked.append((seen[error.kind], at, error))
    chosen = sorted(ranked, key=lambda item: item[:2])[: reports.FIRST]
    return [error for _, _, error in sorted(chosen, key=lambda item: item[1])]
