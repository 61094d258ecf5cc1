"""One Ray Data task: reads the rows of a chunk, writes the good ones as a part of token rows, counts the rest.

Only `Stats` come back to the driver: they are small, however long the chunk.
"""

import functools
import hashlib
import pickle
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.data import report as reports
from pipeline.data import versions
from pipeline.data.chunks import Chunk, locate, rows, where
from pipeline.data.digest import RowsDigest
from pipeline.data.encode import Dropped, Encoder, Example
from pipeline.data.record import Record
from pipeline.data.report import Split
from pipeline.data.reshape import NOTHING, Preprocess
from pipeline.data.shapes import Kind, as_json, kind_of, parse
from pipeline.data.values import RowError
from pipeline.system import storage

BATCH = 256  # rows tokenised together
BATCH_BYTES = 16 << 20  # of them, at most: a row may be a book
Read = Record | RowError | Dropped  # what becomes of a row before it is tokenised
ENOUGH = 10_000  # bad rows of a chunk after which the rest is not read
# Rows up to which duplicates are counted: 8 bytes a row come to the driver, 16 for those of train and eval.
HASHES = 1 << 21


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
    # split -> what becomes of the raw rows of each of its sources; of none: they stay as they are
    preprocess: Mapping[str, Sequence[Preprocess]] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """The kind of all rows, whatever becomes of them first."""
        return kind_of(self.stage)

    def kind_in(self, split: str, source: int) -> Kind:
        """The kind of the rows of a source."""
        sources = self.preprocess.get(split, ())
        return kind_of(self.stage, sources[source] if sources else NOTHING)


@dataclass
class Stats:
    """What one task has counted."""

    splits: dict[str, Split] = field(default_factory=dict)
    # split -> histograms of the lengths in tokens: of prompts, of completions
    lengths: dict[str, tuple[Counter, Counter]] = field(default_factory=dict)
    # split -> (file, rows)
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)
    # kind of error -> rows
    kinds: Counter = field(default_factory=Counter)
    # the first bad rows of each kind
    errors: list[RowError] = field(default_factory=list)
    # why the chunk is not read to its end; None: it is
    cut: RowError | None = None
    # RowError.way of the bad rows -> rows; the first hundred of them
    ways: Counter = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)
    # of the rows of the chunk
    digest: RowsDigest = field(default_factory=RowsDigest)
    # 8 bytes for each row; None: too many rows
    hashes: bytes | None = b""
    # 16 bytes for each row that is kept, Record.digests; None: too many rows
    row_digests: bytearray | None = field(default_factory=bytearray)
    # 16 bytes for each pair: Record.preferences, and the number of its row; None: too many rows
    preferences: bytearray | None = field(default_factory=bytearray)
    # whether a row that is kept has a margin
    margins: bool = False

    def split(self, name: str) -> Split:
        self.lengths.setdefault(name, (Counter(), Counter()))
        return self.splits.setdefault(name, Split())


def of_split(name: str, stats: Sequence[Stats], chunks: Sequence[Chunk]) -> list[Stats]:
    """The statistics of those chunks that were read for `train` or `eval`."""
    return [stat for stat, chunk in zip(stats, chunks, strict=True) if chunk.split == name]


def make_part(batch: dict[str, Any], shared: Any) -> Iterator[dict[str, Any]]:
    """What Ray Data maps over the numbers of chunks; `shared` is a reference to what run_tasks ships once."""
    chunks, tokenizer, options, folder = _fetched(shared)
    for index in batch["id"]:
        stats = tokenise(chunks[int(index)], int(index), tokenizer, options, folder)
        yield {"index": [int(index)], "stats": [pickle.dumps(stats)]}


@functools.lru_cache(maxsize=2)
def _fetched(reference: Any) -> tuple[list[Chunk], Any, Options, str]:
    """What the driver shipped, unpickled once in each worker process."""
    import ray

    return ray.get(reference)


def tokenise(chunk: Chunk, index: int, tokenizer: Any, options: Options, folder: str) -> Stats:
    """Makes the parts of chunk number `index` in `folder`, one for each split."""
    task = Task(chunk, index, encoder_of(tokenizer, options, chunk), options, folder)
    stats, kind, hashes = task.stats, task.encoder.kind, bytearray()
    batch: list[tuple[int, Read]] = []
    size = 0
    stats.split(chunk.split)
    for number, row, raw in rows(chunk):
        stats.digest.add(raw)
        if len(hashes) <= 8 * HASHES:
            hashes += hashlib.blake2b(raw, digest_size=8).digest()
        for made in kind.rows(row):
            left_out = isinstance(made, RowError | Dropped)
            batch.append((number, made if left_out else checked(made, kind, chunk.format)))
        size += len(raw)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            task.flush(batch)
            batch, size = [], 0
            if hopeless(stats, options):
                break
    task.flush(batch)
    task.close()
    stats.hashes = bytes(hashes) if len(hashes) <= 8 * HASHES else None
    return stats


def encoder_of(tokenizer: Any, options: Options, chunk: Chunk | None = None) -> Encoder:
    return Encoder(
        tokenizer,
        options.kind_in(chunk.split, chunk.source) if chunk else options.kind,
        options.max_length,
        options.too_long,
        options.apply_template,
        options.ends,
        options.special_tokens,
    )


def checked(row: Any, kind: Kind, format: str) -> Record | RowError:
    """Returns the row of a file of this format as a Record, or what is wrong with it."""
    try:
        return parse(as_json(row, kind, format), kind)
    except RowError as error:
        return error


class Task:
    """The parts that are made of one chunk, and what has been counted so far."""

    def __init__(self, chunk: Chunk, index: int, encoder: Encoder, options: Options, folder: str):
        self.chunk, self.index, self.encoder = chunk, index, encoder
        self.options, self.folder = options, folder
        self.stats = Stats()
        self.writers: dict[str, PartWriter] = {}  # by split
        self.placed = 0, chunk.split  # the number of the row that came last, and the split that it went to

    def flush(self, batch: list[tuple[int, Read]]) -> None:
        """Tokenises a batch of (number, row) and writes it; bad rows are counted, the first few with their numbers."""
        records = [record for _, record in batch if isinstance(record, Record)]
        outcomes = iter(self.encoder.encode(records))
        for number, record in batch:
            if isinstance(record, RowError):
                split = self.stats.split(self.chunk.split)
                split.read += 1
                note_bad(self.stats, split, number, record)
                continue
            if isinstance(record, Dropped):
                split = self.stats.split(self.chunk.split)
                split.read += 1
                split.dropped[record.reason] = split.dropped.get(record.reason, 0) + 1
                continue
            name = self.split_of(number, record)
            split = self.stats.split(name)
            split.read += 1
            examples = next(outcomes)
            error = next((item for item in examples if isinstance(item, RowError)), None)
            if error is not None:
                note_bad(self.stats, split, number, error)
                continue
            note_record(self.stats, split, number, record, self.encoder.special_in(record))
            for column in self.encoder.unread(record):
                split.unread[column] = split.unread.get(column, 0) + 1
            if not self.options.apply_template and (border := record.joined()):
                split.joined += 1
                split.joined_first = split.joined_first or border
            for item in examples:
                if isinstance(item, Dropped):
                    split.dropped[item.reason] = split.dropped.get(item.reason, 0) + 1
                elif isinstance(item, Example):
                    note_example(self.stats, name, item, self.encoder.tokenizer)
                    versions.add(split.versions, {record.version: 1} if record.version else {})
                    self.write(name, item)

    def split_of(self, number: int, record: Record) -> str:
        """Where a row goes: what data.transform made of one row stays together, with its first."""
        if number != self.placed[0]:
            away = held_out(record.prompt_content(), self.options)
            self.placed = number, "eval" if away else self.chunk.split
        return self.placed[1]

    def write(self, name: str, example: Example) -> None:
        if name not in self.writers:
            self.writers[name] = PartWriter(self.folder, f"{self.index:06d}-{name}", self.options)
        self.writers[name].add(example.columns)

    def close(self) -> None:
        """Ends the parts, and finds the lines in the file of the rows that are named."""
        for name, writer in self.writers.items():
            self.stats.parts[name] = writer.close()
        locate_named(self.stats, self.chunk)


def hopeless(stats: Stats, options: Options) -> bool:
    """Whether enough is known to refuse the file: hundreds of thousands of bad rows take minutes."""
    if options.on_error == "raise":
        return stats.kinds.total() > ENOUGH
    return stats.kinds.total() > 10 * ENOUGH and not any(split.kept for split in stats.splits.values())


def held_out(prompt: str, options: Options) -> bool:
    """Whether the rows of a prompt go to the hold-out: a hash of seed and prompt against data.eval_fraction."""
    if not options.eval_fraction:
        return False
    digest = hashlib.blake2b(
        f"{options.seed}:{prompt}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") < options.eval_fraction * 2**64


# ---- counting --------------------------------------------------------------------------------------------------


def note_bad(stats: Stats, split: Split, number: int, error: RowError) -> None:
    split.dropped[error.kind] = split.dropped.get(error.kind, 0) + 1
    stats.kinds[error.kind] += 1
    if error.rest:
        error.line, stats.cut = number, error
    if error.way() in stats.ways or len(stats.ways) < 100:
        stats.ways[error.way()] += 1
    if stats.kinds[error.kind] <= reports.FIRST:
        error.line = number
        stats.errors.append(error)


def note_record(stats: Stats, split: Split, number: int, record: Record, special: list[str]) -> None:
    """Counts a good row; `special` are the special tokens in its text."""
    stats.margins = stats.margins or record.margin is not None
    split.text_rows += isinstance(record.prompt, str)
    split.chat_rows += not isinstance(record.prompt, str)
    if special:
        split.special_rows += 1
        split.special_first = split.special_first or str(number)  # its place is found at the end of the chunk
        for token in special:
            split.special_tokens[token] = split.special_tokens.get(token, 0) + 1
    if stats.row_digests is not None:
        stats.row_digests += record.digests()
        stats.row_digests = stats.row_digests if len(stats.row_digests) <= 16 * HASHES else None
    if stats.preferences is not None:
        for preferred in record.preferences():
            stats.preferences += preferred.to_bytes(8, "little") + number.to_bytes(8, "little")
        stats.preferences = stats.preferences if len(stats.preferences) <= 16 * HASHES else None


def note_example(stats: Stats, name: str, example: Example, tokenizer: Any) -> None:
    """Counts a token row of the split `name`."""
    split = stats.split(name)
    split.kept += 1
    split.truncated += example.truncated
    split.ended += example.ended
    if (desirable := example.columns.get("label")) is not None:
        split.desirable = (split.desirable or 0) + desirable
    split.tokens += example.prompt_tokens + example.completion_tokens
    prompts, completions = stats.lengths[name]
    prompts[example.prompt_tokens] += 1
    completions[example.completion_tokens] += 1
    if name == "train" and len(stats.samples) < reports.SAMPLES:
        stats.samples.append(reports.sample(tokenizer, example.columns, example.prompt_tokens))


def locate_named(stats: Stats, chunk: Chunk) -> None:
    """Gives the rows that are named their file:line: the lines before the chunk are counted only now."""
    named = [*stats.errors, *([stats.cut] if stats.cut and stats.cut not in stats.errors else [])]
    if named:
        locate(named, chunk)
    for split in stats.splits.values():
        if split.special_first:
            split.special_first = where(chunk, int(split.special_first))


# ---- parquet files of token rows -------------------------------------------------------------------------------------


GROUP_TOKENS = 1 << 18  # of a parquet row group
PACK_ROWS = 4096  # rows packed together: bounded, and importing TRL for its packing costs 6 s in every task


class PartWriter:
    """One parquet file, written a bounded row group at a time. Its name is unique: a retried task writes another file."""

    def __init__(self, folder: str, stem: str, options: Options):
        import pyarrow.parquet as pq

        self.name, self.options = f"{stem}-{uuid.uuid4().hex[:8]}.parquet", options
        self.rows: list[dict[str, Any]] = []
        self.tokens = self.count = 0
        fs, inner = storage.filesystem(storage.join(folder, self.name))
        self.schema = schema(options)
        self.stream = fs.open_output_stream(inner)
        self.writer = pq.ParquetWriter(self.stream, self.schema, compression="lz4")

    def add(self, columns: dict[str, Any]) -> None:
        self.rows.append(columns)
        self.tokens += sum(len(value) for value in columns.values() if isinstance(value, list | str))
        if self.tokens >= GROUP_TOKENS if not self.options.packing else len(self.rows) >= PACK_ROWS:
            self.write()

    def write(self) -> None:
        import pyarrow as pa

        rows = pack(self.rows, self.options.max_length) if self.options.packing else self.rows
        columns = [
            pa.array([row.get(name) for row in rows], type)
            for name, type in zip(self.schema.names, self.schema.types, strict=True)
        ]
        if "margin" in self.schema.names:
            columns[-1] = columns[-1].fill_null(0.0)  # what a row without a margin means
        self.writer.write_table(pa.table(columns, schema=self.schema))
        self.count += len(rows)
        self.rows, self.tokens = [], 0

    def close(self) -> tuple[str, int]:
        """(name of the file, rows in it)."""
        if self.rows:
            self.write()
        self.writer.close()
        self.stream.close()
        return self.name, self.count


def columns_of(options: Options) -> dict[str, type]:
    """Columns of the token table, in order."""
    return {**options.kind.columns, **({"seq_lengths": list} if options.packing else {})}


def schema(options: Options) -> Any:
    import pyarrow as pa

    types = {list: pa.list_(pa.int32()), float: pa.float32(), str: pa.string(), bool: pa.bool_()}
    return pa.schema([(name, types[kind]) for name, kind in columns_of(options).items()])


def pack(rows: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Best-fit decreasing: whole rows joined into bins of at most `size` tokens; `seq_lengths` keeps the borders."""
    free: dict[int, list[list[dict[str, Any]]]] = {}  # room left -> bins
    bins: list[list[dict[str, Any]]] = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        need = len(row["input_ids"])
        room = min((space for space in free if space >= need), default=None)
        if room is None:
            room = size
            target: list[dict[str, Any]] = []
            bins.append(target)
        else:
            target = free[room].pop()
            if not free[room]:
                del free[room]
        target.append(row)
        free.setdefault(room - need, []).append(target)
    return [
        {
            "input_ids": [token for row in group for token in row["input_ids"]],
            "labels": [label for row in group for label in row["labels"]],
            "seq_lengths": [len(row["input_ids"]) for row in group],
        }
        for group in bins
    ]
