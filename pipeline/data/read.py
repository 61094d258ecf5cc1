"""Ray Data reads, validates, templates and tokenises a job's rows once, into parquet parts in a cache folder.

One task for each chunk of a file streams its rows and writes its part; only small statistics come back to the driver,
whose memory does not grow with the data. A manifest, written last, makes the folder usable: a later run on the same
files, tokenizer, template and options reads the parts instead of making them again.
"""

import functools
import hashlib
import json
import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.data import report as reports
from pipeline.data import source
from pipeline.data.encode import Dropped, Encoder, Example
from pipeline.data.formats import Record, RowError, parse, shape_of, show
from pipeline.data.parts import PartWriter
from pipeline.data.report import Report, Split
from pipeline.data.source import Chunk
from pipeline.data.template import DATE
from pipeline.errors import InputError
from pipeline.system import storage

VERSION = 3  # of the parts: raise it when the same rows would become other tokens
BATCH = 256  # rows tokenised together
ENOUGH = 10_000  # bad rows of a file after which the rest is not read
BATCH_BYTES = 16 << 20  # of them, at most: a row may be a book
HASHES = (
    1 << 21
)  # rows up to which duplicates are counted: 8 bytes a row come to the driver, 16 for those of train and eval


@dataclass
class Prepared:
    """The tokenised sets, materialised in Ray's object store as Arrow blocks in file order, and what was found."""

    train: Any
    eval: Any
    report: Report
    digests: dict[str, str]  # split -> sha256 of the rows it was made from
    fingerprints: dict[str, str]  # split -> name of the token table, the same on all workers


@dataclass(frozen=True)
class Options:
    """What a task needs to know; all of it is part of the cache key."""

    stage: str
    max_length: int
    too_long: str
    on_error: str
    apply_template: bool
    ends: tuple[int, ...]
    eval_fraction: float
    seed: int
    packing: bool
    special_tokens: str = "text"


@dataclass
class Stats:
    """What one task found; small, however long its chunk."""

    splits: dict[str, Split] = field(default_factory=dict)
    # split -> histograms: prompt, completion
    lengths: dict[str, tuple[Counter, Counter]] = field(default_factory=dict)
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)  # split -> (file, rows)
    kinds: Counter = field(default_factory=Counter)  # of bad rows
    errors: list[RowError] = field(default_factory=list)  # the first few
    samples: list[str] = field(default_factory=list)
    digest: str = ""
    hashes: bytes | None = b""  # 8 bytes for each row
    row_digests: bytearray | None = field(
        default_factory=bytearray
    )  # 16 bytes for each row that is kept: of its prompt, and of all of it
    preferences: bytearray | None = field(
        default_factory=bytearray
    )  # 16 bytes for each pair of completions: which one is preferred, and the number of its row
    margins: bool = False

    def split(self, name: str) -> Split:
        self.lengths.setdefault(name, (Counter(), Counter()))
        return self.splits.setdefault(name, Split())


def prepare(
    stage: str, data: Any, tokenizer: Any, context_length: int | None, cache_root: str, packing: bool = False
) -> Prepared:
    """The job's train and eval rows as token tables; Ray is already initialised.

    Raises:
        InputError: files that are missing, rows that cannot be used (all counted, the first named by file:line),
            a `max_length` beyond the context, nothing left to train on.
    """
    begin = time.monotonic()
    options = options_of(stage, data, tokenizer, context_length, packing)
    files = {
        key: source.find(spec, f"data.{key}") for key in ("train", "eval") if (spec := getattr(data, key))
    }
    if not files:
        raise InputError(f"stage {stage} needs rows; name a file: data.train=rows.jsonl", key="data.train")
    key = cache_key(files, tokenizer, options)
    folder = storage.join(storage.absolute(cache_root), key[:32])
    manifest = read_manifest(folder)
    reused = manifest is not None
    if manifest is None:
        chunks = [chunk for name, found in files.items() for chunk in source.plan(found, name, stage)]
        stats = run_tasks(chunks, tokenizer, options, folder)
        note_empty(stats, chunks)
        check(stats, chunks, options, data)
        manifest = {"key": key, **merge(stats, chunks, options)}
        manifest["report"]["notes"] = notes(stats, tokenizer, options)
        storage.write_json(storage.join(folder, "manifest.json"), manifest)
    report = Report.from_dict(manifest["report"])
    sets = {name: load(folder, parts, manifest["columns"]) for name, parts in manifest["parts"].items()}
    report = replace(report, reused=reused, seconds=round(time.monotonic() - begin, 3))
    return Prepared(
        sets.get("train"),
        sets.get("eval"),
        report,
        manifest["digests"],
        {name: hashlib.sha256(f"{key}:{name}".encode()).hexdigest()[:32] for name in sets},
    )


def options_of(stage: str, data: Any, tokenizer: Any, context_length: int | None, packing: bool) -> Options:
    from pipeline.models.template import text_as_chat
    from pipeline.models.tokenizer import eos_ids

    if data.max_length is not None and context_length is not None and data.max_length > context_length:
        raise InputError(
            f"{data.max_length} is more than the model's context of {context_length} tokens; "
            f"type data.max_length={context_length} or less",
            key="data.max_length",
        )
    max_length = data.max_length or context_length
    if not max_length:
        raise InputError(
            "the model's configuration states no context; type data.max_length=1024", key="data.max_length"
        )
    if not 0 <= data.eval_fraction < 1:
        raise InputError(
            f"{data.eval_fraction} is not a share; expected a number from 0 to below 1",
            key="data.eval_fraction",
        )
    if data.eval_fraction and data.eval:
        raise InputError(
            "data.eval names the held-out rows already; set one of the two", key="data.eval_fraction"
        )
    return Options(
        stage,
        max_length,
        data.too_long,
        data.on_error,
        text_as_chat(tokenizer, data.apply_chat_template),
        tuple(eos_ids(tokenizer)),
        data.eval_fraction,
        data.seed,
        packing and stage == "sft",
        data.special_tokens,
    )


def cache_key(files: dict[str, list[source.File]], tokenizer: Any, options: Options) -> str:
    from pipeline.models.tokenizer import template_digest, tokenizer_digest

    listed = {
        name: [(storage.absolute(file.path), file.size, file.mtime) for file in found]
        for name, found in files.items()
    }
    parts = [
        VERSION,
        DATE,
        listed,
        tokenizer_digest(tokenizer),
        template_digest(tokenizer),
        sorted(vars(options).items()),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def read_manifest(folder: str) -> dict[str, Any] | None:
    """The manifest of a finished cache folder whose parts are all there; None: make them."""
    path = storage.join(folder, "manifest.json")
    if not storage.exists(path):
        return None
    try:
        manifest = storage.read_json(path)
        names = [name for parts in manifest["parts"].values() for name, _ in parts]
    except (ValueError, KeyError, TypeError, AttributeError):  # damaged: the cache can always be made again
        return None
    return manifest if all(is_whole(storage.join(folder, name)) for name in names) else None


def is_whole(path: str) -> bool:
    """Whether a part is there, and, where that costs no request, has its end."""
    if storage.is_remote(path) or not storage.exists(path):
        return storage.exists(path)
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 4))
        return file.read() == b"PAR1"


# ---- driver: tasks out, tables back ----------------------------------------------------------------------------


def run_tasks(chunks: list[Chunk], tokenizer: Any, options: Options, folder: str) -> list[Stats]:
    """The statistics of all chunks, in their order."""
    import ray

    fs, inner = storage.filesystem(folder)
    try:
        fs.create_dir(inner, recursive=True)
    except OSError as error:
        raise InputError(
            f"{folder!r} cannot be written ({error}); choose a folder or bucket that this user and all "
            "workers may write to, e.g. data.cache_dir=./cache",
            key="data.cache_dir",
        ) from error
    task = functools.partial(make_part, shared=ray.put((chunks, tokenizer, options, folder)))
    ordered_context()
    plan = ray.data.range(len(chunks), override_num_blocks=len(chunks))
    found = plan.map_batches(task, batch_size=None, batch_format="numpy").take_all()
    found.sort(key=lambda row: row["index"])
    return [pickle.loads(row["stats"]) for row in found]


def ordered_context() -> None:
    import ray

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.print_on_execution_start = False
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # one line for each execution otherwise


def load(folder: str, parts: list[list[Any]], columns: list[str]) -> Any:
    """The parts as a materialised ray.data.Dataset of Arrow blocks, in the order of the parts."""
    import ray

    ordered_context()
    names = [storage.join(folder, name) for name, _ in parts]
    task = functools.partial(read_part, names=names, columns=columns)
    blocks = ray.data.range(len(names), override_num_blocks=len(names))
    return blocks.map_batches(task, batch_size=None, batch_format="numpy").materialize()


def read_part(batch: dict[str, Any], names: list[str], columns: list[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for index in batch["id"]:
        fs, inner = storage.filesystem(names[int(index)])
        with fs.open_input_file(inner) as file:
            for records in pq.ParquetFile(file).iter_batches(batch_size=1 << 14, columns=columns):
                yield pa.Table.from_batches([records])


def note_empty(stats: list[Stats], chunks: list[Chunk]) -> None:
    """A file without rows is as bad as a bad row, in the first of its chunks."""
    read: Counter = Counter()
    for stat, chunk in zip(stats, chunks, strict=True):
        read[chunk.path] += sum(split.read for split in stat.splits.values())
    for stat, chunk in zip(stats, chunks, strict=True):
        if chunk.start == 0 and not read[chunk.path]:
            bad(
                stat,
                stat.split(chunk.split),
                1,
                RowError("empty_file", "", "no rows", "one JSON object on each line"),
            )
            place(stat, chunk)


def check(stats: list[Stats], chunks: list[Chunk], options: Options, data: Any) -> None:
    """Raises InputError for bad rows (unless they are to be skipped), and for a set of which nothing is left."""
    for name in dict.fromkeys(chunk.split for chunk in chunks):
        mine = [stat for stat, chunk in zip(stats, chunks, strict=True) if chunk.split == name]
        kinds = sum((stat.kinds for stat in mine), Counter())
        read = sum(split.read for stat in mine for split in stat.splits.values())
        if kinds and options.on_error == "raise":
            raise InputError(complaint(mine, kinds, read), key=f"data.{name}")
        if not sum(split.kept for stat in mine for split in stat.splits.values()):
            dropped = sum(
                (Counter(split.dropped) for stat in mine for split in stat.splits.values()), Counter()
            )
            why = ", ".join(
                f"{count} {reports.KINDS.get(kind, kind)}" for kind, count in dropped.most_common()
            )
            first = next((f"; first: {error}" for stat in mine for error in stat.errors), "")
            advice = ""
            if "too_long" in dropped:
                advice = "; data.too_long=truncate or a larger data.max_length keeps long rows"
                if options.too_long == "truncate":
                    advice = f"; their prompts alone fill the {options.max_length} tokens of data.max_length: raise it"
            raise InputError(
                f"no row is left of {read} read ({why or 'the files are empty'}){first}{advice}",
                key=f"data.{name}",
            )
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


def complaint(stats: list[Stats], kinds: Counter, read: int) -> str:
    errors = first_errors(stats)
    counts = ", ".join(f"{count:,} {reports.KINDS.get(kind, kind)}" for kind, count in kinds.most_common())
    rows = kinds.total() - kinds["empty_file"]
    what = (
        f"{rows:,} of {reports.counted(read, 'row')} cannot be used ({counts})"
        if rows
        else f"nothing to read ({counts})"
    )
    lines = [f"{what}:"]
    lines += [f"  {error}" for error in errors]
    if kinds.total() > len(errors):
        lines.append(f"  and {kinds.total() - len(errors):,} more")
    advice = "fix them, or type data.on_error=skip to leave them out"
    if kinds["missing_field"] == read > 1:
        advice = "no row has the fields of this stage; is it another stage's file? (sft: demonstrations, rm and dpo: pairs)"
    if "too_long" in kinds:
        advice += "; data.too_long=truncate (or drop) for long rows"
    return "\n".join([*lines, advice + "; nothing was trained"])


def first_errors(stats: list[Stats]) -> list[RowError]:
    """The first bad rows, in order, so chosen that no kind crowds out the others."""
    rank: Counter = Counter()
    turns = []
    for at, error in enumerate(error for stat in stats for error in stat.errors):
        rank[error.kind] += 1
        turns.append((rank[error.kind], at, error))
    chosen = sorted(turns, key=lambda turn: turn[:2])[: reports.FIRST]
    return [error for _, _, error in sorted(chosen, key=lambda turn: turn[1])]


def merge(stats: list[Stats], chunks: list[Chunk], options: Options) -> dict[str, Any]:
    """Manifest fields from the statistics of all chunks."""
    report = Report(
        options.stage,
        options.max_length,
        text_as_chat=options.apply_template,
        special_tokens=options.special_tokens,
    )
    parts: dict[str, list[tuple[str, int]]] = {}
    for name in ("train", "eval"):
        mine = [stat for stat in stats if name in stat.splits]
        if not mine:
            continue
        split = Split(dropped=dict(sum((Counter(stat.splits[name].dropped) for stat in mine), Counter())))
        for label in ("read", "kept", "truncated", "tokens", "text_rows", "ended"):
            setattr(split, label, sum(getattr(stat.splits[name], label) for stat in mine))
        split.prompt_tokens, split.completion_tokens = (
            reports.percentiles(sum((stat.lengths[name][side] for stat in mine), Counter()))
            for side in (0, 1)
        )
        merge_special(split, [stat.splits[name] for stat in mine])
        found = [(stat, chunk) for stat, chunk in zip(stats, chunks, strict=True) if chunk.split == name]
        split.contradictions, split.contradictions_first = contradictions(found)
        report.splits[name] = split
        parts[name] = [stat.parts[name] for stat in mine if name in stat.parts]
    report.skipped = [str(error) for error in first_errors(stats)]
    report.samples = [text for stat in stats for text in stat.samples][: reports.SAMPLES]
    sets = [
        duplicates([s.hashes for s, c in zip(stats, chunks, strict=True) if c.split == name])
        for name in ("train", "eval")
    ]
    report.duplicates = None if None in sets else sum(filter(None, sets))
    if "eval" in (chunk.split for chunk in chunks):
        report.overlap = overlap(
            *(
                [s.row_digests for s, c in zip(stats, chunks, strict=True) if c.split == n]
                for n in ("train", "eval")
            )
        )
    report.packed = sum(rows for _, rows in parts["train"]) if options.packing else None
    columns = {
        "sft": ["input_ids", "labels", *(["seq_lengths"] if options.packing else [])],
        "rm": ["chosen_ids", "rejected_ids", *(["margin"] if any(stat.margins for stat in stats) else [])],
        "dpo": ["prompt_ids", "chosen_ids", "rejected_ids"],
        "score": (judged := ["prompt_ids", "chosen_ids", "rejected_ids", "row"]),
        "pairs": judged,
    }.get(options.stage, ["input_ids", "row"])
    digests = {name: content_digest(name, stats, chunks, options) for name in parts}
    return {"parts": parts, "columns": columns, "digests": digests, "report": report.to_dict()}


def merge_special(whole: Split, splits: list[Split]) -> None:
    whole.special_rows = sum(split.special_rows for split in splits)
    whole.special_tokens = dict(
        sum((Counter(split.special_tokens) for split in splits), Counter()).most_common()
    )
    whole.special_first = next((split.special_first for split in splits if split.special_first), "")


def contradictions(chunks: Sequence[tuple[Stats, Chunk]]) -> tuple[int, str]:
    """How many pairs stand in both orders, and where the first one does; 0 too where there are too many to compare."""
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


def notes(stats: list[Stats], tokenizer: Any, options: Options) -> list[str]:
    """What a user should know about the rows as a whole."""
    found = []
    if options.stage == "dpo" and any(stat.margins for stat in stats):
        found.append("dpo does not use the column `margin`: only rm does")
    rows = sum((Counter(r=s.read, t=s.text_rows) for stat in stats for s in stat.splits.values()), Counter())
    chats = options.apply_template or rows["r"] > rows["t"]
    if options.stage in ("rm", "score", "pairs") or not chats:
        return found
    if unlearned := encoder_of(tokenizer, options).unlearned_end():
        end, stops = unlearned
        added = (
            f": {tokenizer.eos_token} is added, but only at the end of a row"
            if options.stage in ("sft", "dpo")
            else ""
        )
        found.append(
            f"the chat template ends a completion with {show(end)}, generation stops on {stops}{added}; type "
            "model.chat_template=plain, or make the template's end the eos_token in the base's tokenizer_config.json"
        )
    return found


def encoder_of(tokenizer: Any, options: Options) -> Encoder:
    return Encoder(
        tokenizer,
        options.stage,
        options.max_length,
        options.too_long,
        options.apply_template,
        options.ends,
        options.special_tokens,
    )


def content_digest(name: str, stats: list[Stats], chunks: list[Chunk], options: Options) -> str:
    """sha256 over the bytes of the rows, by chunk; both sides of a hold-out also carry how it was made."""
    origin = "train" if options.eval_fraction else name
    digests = [stat.digest for stat, chunk in zip(stats, chunks, strict=True) if chunk.split == origin]
    held = f"{name}:{options.eval_fraction}:{options.seed}" if options.eval_fraction else ""
    return hashlib.sha256("".join([*digests, held]).encode()).hexdigest()


def duplicates(hashes: list[bytes | None]) -> int | None:
    import numpy as np

    if any(part is None for part in hashes) or sum(map(len, hashes)) > 8 * HASHES:  # type: ignore[arg-type]
        return None
    rows = np.frombuffer(b"".join(hashes), dtype=np.uint64)  # type: ignore[arg-type]
    return len(rows) - len(np.unique(rows))


def overlap(train: list[bytearray | None], held_out: list[bytearray | None]) -> tuple[int, int] | None:
    """Rows of `eval` whose prompt also stands in `train`, and those that stand there as they are; None: too many to compare."""
    import numpy as np

    if None in train or None in held_out or sum(map(len, train + held_out)) > 16 * HASHES:  # type: ignore[arg-type]
        return None
    known, asked = (
        np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(-1, 2)  # type: ignore[arg-type]
        for digests in (train, held_out)
    )
    prompts, rows = (int(np.isin(asked[:, side], known[:, side]).sum()) for side in (0, 1))
    return prompts, rows


# ---- task: one chunk -> one part for each split ----------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def fetched(reference: Any) -> tuple[list[Chunk], Any, Options, str]:
    """What the driver shipped, unpickled once in each worker process."""
    import ray

    return ray.get(reference)


def make_part(batch: dict[str, Any], shared: Any) -> Iterator[dict[str, Any]]:
    chunks, tokenizer, options, folder = fetched(shared)
    for index in batch["id"]:
        stats = tokenise(chunks[int(index)], int(index), tokenizer, options, folder)
        yield {"index": [int(index)], "stats": [pickle.dumps(stats)]}


def tokenise(chunk: Chunk, index: int, tokenizer: Any, options: Options, folder: str) -> Stats:
    """Reads the rows of a chunk, writes the good ones as tokens, counts the rest."""
    stats, digest, hashes = Stats(), hashlib.sha256(), bytearray()
    encoder = encoder_of(tokenizer, options)
    writers: dict[str, PartWriter] = {}
    shape, size = (chunk.shape, chunk.shape_line), 0
    batch: list[tuple[int, Record | RowError]] = []
    stats.split(chunk.split)
    for number, row, raw in source.rows(chunk, digest):
        if len(hashes) <= 8 * HASHES:
            hashes += hashlib.blake2b(raw, digest_size=8).digest()
        found = row
        if not isinstance(row, RowError):
            if shape[0] is None and isinstance(row, dict):
                shape = shape_of(row, options.stage), number
            found = checked(row, options.stage, *shape)
        batch.append((number, found))
        size += len(raw)
        if len(batch) == BATCH or size >= BATCH_BYTES:
            flush(batch, encoder, stats, chunk, options, writers, index, folder)
            batch, size = [], 0
            if hopeless(stats, options):
                break
    flush(batch, encoder, stats, chunk, options, writers, index, folder)
    for name, writer in writers.items():
        stats.parts[name] = writer.close()
    place(stats, chunk)
    stats.digest = digest.hexdigest()
    stats.hashes = bytes(hashes) if len(hashes) <= 8 * HASHES else None
    return stats


def hopeless(stats: Stats, options: Options) -> bool:
    """Whether enough is known of a file to refuse it: not after the minutes that hundreds of thousands of bad rows take."""
    if options.on_error == "raise":
        return stats.kinds.total() > ENOUGH
    return stats.kinds.total() > 10 * ENOUGH and not any(split.kept for split in stats.splits.values())


def checked(row: Any, stage: str, shape: str | None, line: int) -> Any:
    """The row as a Record, or the RowError of it."""
    try:
        record = parse(row, stage)
    except RowError as error:
        return error
    other = shape_of(row, stage)
    if shape is not None and other != shape:
        return RowError(
            "mixed_shapes",
            "",
            f"a row of shape {other}",
            f"shape {shape}, as in row {line}; one shape in a file",
        )
    return record


def flush(
    batch: list[tuple[int, Any]],
    encoder: Encoder,
    stats: Stats,
    chunk: Chunk,
    options: Options,
    writers: dict[str, "PartWriter"],
    index: int,
    folder: str,
) -> None:
    """Tokenises a batch and writes it; what is bad is counted, the first few with their numbers."""
    outcomes = iter(encoder.encode([record for _, record in batch if not isinstance(record, RowError)]))
    for number, record in batch:
        if isinstance(record, RowError):
            split = stats.split(chunk.split)
            split.read += 1
            bad(stats, split, number, record)
            continue
        name = "eval" if held_out(record.prompt_key(), options) else chunk.split
        split = stats.split(name)
        split.read += 1
        examples = next(outcomes)
        error = next((item for item in examples if isinstance(item, RowError)), None)
        if error is not None:
            bad(stats, split, number, error)
            continue
        stats.margins = stats.margins or record.margin is not None
        split.text_rows += isinstance(record.prompt, str)
        note_special(split, number, encoder.special_in(record))
        if stats.row_digests is not None:
            stats.row_digests += record.digests()
            stats.row_digests = stats.row_digests if len(stats.row_digests) <= 16 * HASHES else None
        if stats.preferences is not None:
            for preferred in record.preferences():
                stats.preferences += preferred.to_bytes(8, "little") + number.to_bytes(8, "little")
            stats.preferences = stats.preferences if len(stats.preferences) <= 16 * HASHES else None
        for item in examples:
            if isinstance(item, Dropped):
                split.dropped[item.reason] = split.dropped.get(item.reason, 0) + 1
            elif isinstance(item, Example):
                keep(item, name, split, stats, encoder.tokenizer)
                if name not in writers:
                    writers[name] = PartWriter(folder, f"{index:06d}-{name}", options)
                writers[name].add(item.columns)


def note_special(split: Split, number: int, names: list[str]) -> None:
    """Counts a row whose text contains special tokens; where the first one stands is its number until `place`."""
    if names:
        split.special_rows += 1
        split.special_first = split.special_first or str(number)
        for name in names:
            split.special_tokens[name] = split.special_tokens.get(name, 0) + 1


def keep(item: Example, name: str, split: Split, stats: Stats, tokenizer: Any) -> None:
    split.kept += 1
    split.truncated += item.truncated
    split.ended += item.ended
    split.tokens += item.prompt_tokens + item.completion_tokens
    prompts, completions = stats.lengths[name]
    prompts[item.prompt_tokens] += 1
    completions[item.completion_tokens] += 1
    if name == "train" and len(stats.samples) < reports.SAMPLES:
        stats.samples.append(reports.sample(tokenizer, item.columns))


def bad(stats: Stats, split: Split, number: int, error: RowError) -> None:
    split.dropped[error.kind] = split.dropped.get(error.kind, 0) + 1
    stats.kinds[error.kind] += 1
    if stats.kinds[error.kind] <= reports.FIRST:
        error.line = number
        stats.errors.append(error)


def where(chunk: Chunk, number: int) -> str:
    """file:line of a row by its number in the chunk."""
    name = chunk.path if storage.is_remote(chunk.path) else source.shown(chunk.path)
    line = number + source.lines_before(chunk)
    return RowError("", "", "", "", name, line, source.unit(chunk)).where()


def place(stats: Stats, chunk: Chunk) -> None:
    """File, and line in the whole file, of what is named: the lines before the chunk are counted only now."""
    noted = [split for split in stats.splits.values() if split.special_first]
    if not stats.errors and not noted:
        return
    before, unit = source.lines_before(chunk), source.unit(chunk)
    name = chunk.path if storage.is_remote(chunk.path) else source.shown(chunk.path)
    for error in stats.errors:
        error.file, error.line, error.unit = name, error.line + before, unit
    for split in noted:
        split.special_first = where(chunk, int(split.special_first))


def held_out(prompt: str, options: Options) -> bool:
    """Whether the rows of a prompt go to the hold-out: a hash of the prompt and the seed against the share."""
    if not options.eval_fraction:
        return False
    digest = hashlib.blake2b(
        f"{options.seed}:{prompt}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") < options.eval_fraction * 2**64
