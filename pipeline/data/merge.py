"""The statistics of all tasks -> the manifest of the set: parts, columns, digests and the report."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.data import report as reports
from pipeline.data import versions
from pipeline.data.chunks import Chunk, where
from pipeline.data.digest import joined
from pipeline.data.refusals import one_of_each
from pipeline.data.report import Report, SourceCounts, Split, counted
from pipeline.data.tasks import HASHES, Options, Stats, columns_of, encoder_of, of_split
from pipeline.data.values import show
from pipeline.models.template import is_plain, text_as_chat


def merge(stats: list[Stats], chunks: list[Chunk], options: Options) -> dict[str, Any]:
    """Manifest fields from the statistics of all chunks, which come in the order of the chunks."""
    report = Report(
        options.stage,
        options.max_length,
        text_as_chat=options.apply_template,
        special_tokens=options.special_tokens,
    )
    parts: dict[str, list[tuple[str, int]]] = {}
    for name in ("train", "eval"):
        with_split = [stat for stat in stats if name in stat.splits]
        if not with_split:
            continue
        split = merge_split(name, with_split)
        split.contradictions, split.contradictions_first = contradictions(
            [(stat, chunk) for stat, chunk in zip(stats, chunks, strict=True) if chunk.split == name]
        )
        report.splits[name] = split
        report.sources[name] = merge_sources(name, stats, chunks)
        parts[name] = [stat.parts[name] for stat in with_split if name in stat.parts]
    report.skipped = one_of_each(stats)
    report.samples = samples(stats, chunks)
    train, held_out = of_split("train", stats, chunks), of_split("eval", stats, chunks)
    counts = [duplicates([stat.hashes for stat in part]) for part in (train, held_out)]
    report.duplicates = None if None in counts else sum(filter(None, counts))
    if held_out:
        report.overlap = overlap(
            [stat.row_digests for stat in train], [stat.row_digests for stat in held_out]
        )
    report.packed = sum(rows for _, rows in parts["train"]) if options.packing else None
    margins = any(stat.margins for stat in stats)
    columns = [name for name in columns_of(options) if name != "margin" or margins]
    digests = {name: content_digest(name, stats, chunks, options) for name in parts}
    return {"parts": parts, "columns": columns, "digests": digests, "report": report.to_dict()}


def samples(stats: Sequence[Stats], chunks: Sequence[Chunk]) -> list[str]:
    """The first rows, of several sources in turn."""
    by_source: dict[int, list[str]] = {}
    for stat, chunk in zip(stats, chunks, strict=True):
        by_source.setdefault(chunk.source, []).extend(stat.samples)
    rounds = itertools.zip_longest(*by_source.values())
    return [text for some in rounds for text in some if text is not None][: reports.SAMPLES]


def merge_split(name: str, stats: list[Stats]) -> Split:
    """The counts of `train` or `eval` over all tasks that have rows of it."""
    splits = [stat.splits[name] for stat in stats]
    merged = Split(dropped=dict(sum((Counter(split.dropped) for split in splits), Counter())))
    for label in (
        "read",
        "kept",
        "truncated",
        "tokens",
        "text_rows",
        "chat_rows",
        "joined",
        "ended",
        "special_rows",
    ):
        setattr(merged, label, sum(getattr(split, label) for split in splits))
    if any(split.desirable is not None for split in splits):
        merged.desirable = sum(split.desirable or 0 for split in splits)
    merged.prompt_tokens, merged.completion_tokens = (
        reports.percentiles(sum((stat.lengths[name][side] for stat in stats), Counter())) for side in (0, 1)
    )
    special = sum((Counter(split.special_tokens) for split in splits), Counter())
    merged.special_tokens = dict(special.most_common())
    merged.unread = dict(sum((Counter(split.unread) for split in splits), Counter()))
    for split in splits:
        versions.add(merged.versions, split.versions)
    merged.joined_first = next((split.joined_first for split in splits if split.joined_first), "")
    merged.special_first = next((split.special_first for split in splits if split.special_first), "")
    return merged


def merge_sources(name: str, stats: list[Stats], chunks: list[Chunk]) -> list[SourceCounts]:
    """The counts of `train` or `eval` for each of the sources that have rows of it."""
    merged: dict[int, SourceCounts] = {}
    for stat, chunk in zip(stats, chunks, strict=True):
        if split := stat.splits.get(name):
            counts = merged.setdefault(chunk.source, SourceCounts(chunk.source))
            counts.read += split.read
            counts.kept += split.kept
            counts.tokens += split.tokens
            if split.desirable is not None:
                counts.desirable = (counts.desirable or 0) + split.desirable
            counts.dropped += sum(split.dropped.values())
            versions.add(counts.versions, split.versions)
            counts.rows += stat.parts[name][1] if name in stat.parts else 0
    return [merged[source] for source in sorted(merged)]


def contradictions(chunks: Sequence[tuple[Stats, Chunk]]) -> tuple[int, str]:
    """(pairs that occur in both orders, places of the first of them); 0 also where there are too many to compare."""
    import numpy as np

    parts = [stat.preferences for stat, _ in chunks]
    if None in parts or not 0 < sum(map(len, parts)) <= 16 * HASHES:  # type: ignore[arg-type]
        return 0, ""
    table = np.frombuffer(b"".join(parts), dtype=np.uint64).reshape(-1, 2)  # type: ignore[arg-type]
    pairs, upper = table[:, 0] >> np.uint64(1), (table[:, 0] & np.uint64(1)).astype(bool)
    both = np.intersect1d(pairs[upper], pairs[~upper])
    if not len(both):
        return 0, ""
    first = int(np.isin(pairs, both).argmax())
    other = int(((pairs == pairs[first]) & (upper != upper[first])).argmax())
    ends = np.cumsum([len(part) // 16 for part in parts])  # type: ignore[arg-type]
    names = []
    for at in (first, other):
        _, chunk = chunks[int(np.searchsorted(ends, at, side="right"))]
        names.append(where(chunk, int(table[at, 1])))
    return len(both), " and ".join(dict.fromkeys(names))


def duplicates(hashes: list[bytes | None]) -> int | None:
    """Rows equal to an earlier one; None: too many to compare."""
    import numpy as np

    if any(part is None for part in hashes) or sum(map(len, hashes)) > 8 * HASHES:  # type: ignore[arg-type]
        return None
    rows = np.frombuffer(b"".join(hashes), dtype=np.uint64)  # type: ignore[arg-type]
    return len(rows) - len(np.unique(rows))


def overlap(train: list[bytearray | None], held_out: list[bytearray | None]) -> tuple[int, int] | None:
    """(rows of `eval` whose prompt is in `train`, rows that are in it with their completions); None: too many rows."""
    import numpy as np

    if None in train or None in held_out or sum(map(len, train + held_out)) > 16 * HASHES:  # type: ignore[arg-type]
        return None
    train_keys, eval_keys = (
        np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2)  # type: ignore[arg-type]
        for digests in (train, held_out)
    )
    prompts, rows = (int(np.isin(eval_keys[:, side], train_keys[:, side]).sum()) for side in (0, 1))
    return prompts, rows


def content_digest(name: str, stats: list[Stats], chunks: list[Chunk], options: Options) -> str:
    """Of the rows in their order, however they were cut into chunks; both sides of a hold-out also carry how it was made."""
    origin = "train" if options.eval_fraction else name
    whole = joined(stat.digest for stat in of_split(origin, stats, chunks))
    held = f"{name}:{options.eval_fraction}:{options.seed}" if options.eval_fraction else ""
    return hashlib.sha256(f"{whole.count}:{whole.value}:{held}".encode()).hexdigest()


def notes(stats: list[Stats], tokenizer: Any, options: Options) -> list[str]:
    """What a user should know about the rows as a whole."""
    warnings = [f"{stat.cut}" for stat in stats if stat.cut]
    completions = options.kind.completions
    if completions == "learned" and any(stat.margins for stat in stats):
        warnings.append(f"{options.stage} does not use the column `margin`: only rm does")
    splits = [split for stat in stats for split in stat.splits.values()]
    messages = sum(split.chat_rows for split in splits)
    if messages and is_plain(tokenizer) and not text_as_chat(tokenizer, None):
        warnings.append(
            f"the base has no chat template: {counted(messages, 'row')} of messages go through the built-in one; set "
            "model.chat_template=plain in every stage, or a Jinja file"
        )
    chats = options.apply_template or messages
    if completions == "scored" or not chats:
        return warnings
    if unlearned := encoder_of(tokenizer, options).unlearned_end():
        end, stops = unlearned
        learned = completions == "learned"
        added = f": {tokenizer.eos_token} is added, but only at the end of a row" if learned else ""
        warnings.append(
            f"the chat template ends a completion with {show(end)}, generation stops on {stops}{added}; type "
            "model.chat_template=plain, or make the template's end the eos_token in the base's tokenizer_config.json"
        )
    return warnings
