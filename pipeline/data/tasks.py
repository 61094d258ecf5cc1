"""Runs a task, which reads the rows of one chunk, writes token rows into a part, and counts rows, tokens and labels.

The driver receives only `Counts`, which have two dozen bytes per row.
"""

import functools
import hashlib
import itertools
import pickle
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.chunks import FileChunk, chunk_rows, locate_errors
from pipeline.data.counts import Counts
from pipeline.data.encode import Encoder, Example
from pipeline.data.formats import Kind, Record, hash_text, parse_row
from pipeline.data.values import Dropped, RowError
from pipeline.system import storage

BATCH = 256  # maximum rows that are tokenized together
BATCH_BYTES = 16 << 20  # maximum bytes of a batch of rows, because single rows may be large
SAMPLES = 3  # number of token rows that the report shows
SAMPLE_CHARACTERS = 1200  # maximum characters of such a row
Read = Record | RowError | Dropped  # result of parsing a row


@dataclass(frozen=True)
class Options:
    """The settings of a task. All fields are part of the cache key."""

    kind: Kind  # the kind of all rows, without the job's preprocessing
    max_length: int
    overlong: str
    on_error: str
    apply_template: bool
    ends: tuple[int, ...]
    eval_fraction: float
    seed: int
    packing: bool
    parse_special_tokens: bool
    kinds: Mapping[str, Sequence[Kind]]  # {split: kind of the rows in each source}
    deduplicate: bool

    def cache_parts(self) -> list[tuple[str, Any]]:
        """Returns the settings for the cache key. A Kind cannot be hashed, so they have its stage and preprocessing instead."""
        preprocess = {split: [kind.preprocess for kind in kinds] for split, kinds in self.kinds.items()}
        settings = {name: value for name, value in vars(self).items() if name not in ("kind", "kinds")}
        return sorted((settings | {"stage": self.kind.stage, "preprocess": preprocess}).items())


def run_chunks(batch: dict[str, Any], shared: Any) -> Iterator[dict[str, Any]]:
    """Processes the chunks with the numbers in `batch`, for Ray Data. `shared` is an object reference to data for all tasks."""
    chunks, work = _fetched(shared)
    for index in map(int, batch["id"]):
        yield {"index": [index], "result": [pickle.dumps(work(chunks[index], index))]}


@functools.lru_cache(maxsize=2)
def _fetched(reference: Any) -> Any:
    """Returns data from Ray's object store. Each worker process unpickles the data only once."""
    import ray

    return ray.get(reference)


def hash_rows(chunk: FileChunk, index: int) -> bytes:
    """Returns an 8-byte hash of each row of a chunk."""
    return b"".join(row_hash(raw) for _, _, raw in chunk_rows(chunk))


def row_hash(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=8).digest()


def tokenize_chunk(
    chunk: FileChunk,
    index: int,
    tokenizer: Any,
    options: Options,
    folder: str,
    repeated: Mapping[int, Iterable[int]] | None = None,
) -> Counts:
    """Tokenizes chunk number `index`, and writes its parts, one per split, to `folder`.

    `repeated` has the positions of rows that data.deduplicate drops, as {number of a chunk: positions}.
    """
    left_out = set((repeated or {}).get(index, ()))
    task = ReadTask(chunk, index, encoder_of(tokenizer, options, chunk), options, folder)
    counts, kind = task.counts, task.encoder.kind
    batch: list[tuple[int, Read]] = []
    size = 0
    for place, (number, row, raw) in enumerate(chunk_rows(chunk)):
        if place in left_out and not isinstance(row, RowError):
            counts.add(chunk.split, "read")
            counts.add(chunk.split, "dropped", "duplicate")
            continue
        counts.digest.add(raw)
        if not isinstance(row, RowError):
            counts.keys["rows"] += row_hash(raw)
        for result in kind.rows(row, task.note_label):
            unusable = isinstance(result, RowError | Dropped)
            batch.append((number, result if unusable else parse_or_error(result, kind)))
        size += len(raw)
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            task.flush(batch)
            batch, size = [], 0
    task.flush(batch)
    for split, writer in task.writers.items():
        counts.parts[split] = writer.close()
        counts.add(split, "rows", number=counts.parts[split][1])
    # Line numbers of errors require a count of the lines before the chunk, which is made once for all errors.
    if errors := {id(error): error for error in (*counts.errors.values(), counts.unread) if error}:
        locate_errors([*errors.values()], chunk)
    return counts


def encoder_of(tokenizer: Any, options: Options, chunk: FileChunk | None = None) -> Encoder:
    return Encoder(
        tokenizer,
        options.kinds[chunk.split][chunk.source] if chunk else options.kind,
        options.max_length,
        options.overlong,
        options.apply_template,
        options.ends,
        options.parse_special_tokens,
    )


def parse_or_error(row: Any, kind: Kind) -> Record | RowError:
    """Parses a row. Returns a Record, or a RowError if the row is bad."""
    try:
        return parse_row(row, kind)
    except RowError as error:
        return error


class ReadTask:
    """Writes the parts of one chunk, and counts its rows."""

    def __init__(self, chunk: FileChunk, index: int, encoder: Encoder, options: Options, folder: str):
        self.chunk, self.index, self.encoder = chunk, index, encoder
        self.options, self.folder = options, folder
        self.counts = Counts(chunk)
        self.counts.add(chunk.split, "read", number=0)
        self.writers: dict[str, PartWriter] = {}  # by split
        self.placed = 0, chunk.split  # number and split of the previous row

    def flush(self, batch: list[tuple[int, Read]]) -> None:
        """Tokenizes, writes and counts the rows of a batch of (number, row)."""
        records = [record for _, record in batch if isinstance(record, Record)]
        outcomes = iter(self.encoder.encode(records))
        for number, record in batch:
            if isinstance(record, Record):
                self.add_record(number, record, next(outcomes))
            else:
                self.counts.add(self.chunk.split, "read")
                self.counts.leave_out(self.chunk.split, number, record)

    def add_record(
        self, number: int, record: Record, outcomes: Sequence[Example | Dropped | RowError]
    ) -> None:
        """Counts a successfully parsed row, and writes its examples."""
        counts, split = self.counts, self.split_of(number, record)
        counts.add(split, "read")
        if error := next((item for item in outcomes if isinstance(item, RowError)), None):
            counts.leave_out(split, number, error)
            return
        counts.keys["records"] += record.digests()
        counts.add(split, "text_rows" if isinstance(record.prompt, str) else "chat_rows")
        if record.margin is not None:
            counts.add(split, "margins")
        if special := self.encoder.special_in(record):
            counts.add(split, "special_rows")
        for token in special:
            counts.add(split, "special_tokens", token)
        for column in self.encoder.unread(record):
            counts.add(split, "unread", column)
        if not self.options.apply_template and record.joined():
            counts.add(split, "joined")
        for item in outcomes:
            if isinstance(item, Example):
                self.add_example(split, record, item)
            else:
                counts.leave_out(split, number, item)

    def note_label(self, column: str, meaning: str) -> None:
        self.counts.add(self.chunk.split, "labels", (column, meaning))

    def add_example(self, split: str, record: Record, example: Example) -> None:
        """Counts a token row of a split, and writes the row."""
        counts = self.counts
        counts.add(split, "kept")
        counts.add(split, "truncated", number=example.truncated)
        counts.add(split, "ended", number=example.ended)
        counts.add(split, "tokens", number=example.prompt_tokens + example.completion_tokens)
        counts.add(split, "prompt_tokens", example.prompt_tokens)
        counts.add(split, "completion_tokens", example.completion_tokens)
        if (desirable := example.columns.get("label")) is not None:
            counts.add(split, "desirable", number=desirable)
        if record.version:
            counts.add(split, "versions", record.version)
        for judge in record.judges:
            counts.add(split, "judges", judge)
        if split == "train" and len(counts.samples) < SAMPLES:
            counts.samples.append(
                decode_sample(self.encoder.tokenizer, example.columns, example.prompt_tokens)
            )
        if split not in self.writers:
            self.writers[split] = PartWriter(self.folder, f"{self.index:06d}-{split}", self.options)
        self.writers[split].add(example.columns)

    def split_of(self, number: int, record: Record) -> str:
        """Returns the split of a row. If data.transform returns several rows, all have the split of the first row."""
        if number != self.placed[0]:
            is_eval = held_out(record.split_key(), self.options)
            self.placed = number, "eval" if is_eval else self.chunk.split
        return self.placed[1]


def held_out(key: str, options: Any) -> bool:
    """Returns True if rows with this split key are eval rows, because a hash of seed and key is below data.eval_fraction."""
    return hash_text(f"{options.seed}:{key}") < options.eval_fraction * 2**64


# ---- Arrow files of token rows ---------------------------------------------------------------------------------------


GROUP_TOKENS = 1 << 18  # tokens per record batch
PACK_ROWS = 4096  # maximum number of rows that are packed at a time


class PartWriter:
    """Writes an Arrow file in batches of limited size. The file's name is unique, because a retried task writes a new file."""

    def __init__(self, folder: str, stem: str, options: Options):
        import pyarrow as pa

        self.name, self.options = f"{stem}-{uuid.uuid4().hex[:8]}.arrow", options
        self.rows: list[dict[str, Any]] = []
        self.tokens = self.count = 0
        fs, inner = storage.filesystem(storage.join(folder, self.name))
        self.schema = arrow_schema(options)
        self.stream = fs.open_output_stream(inner)
        self.writer = pa.ipc.new_file(self.stream, self.schema)  # uncompressed, for memory-mapping

    def add(self, columns: dict[str, Any]) -> None:
        self.rows.append(columns)
        self.tokens += sum(len(value) for value in columns.values() if isinstance(value, list | str))
        if self.tokens >= GROUP_TOKENS if not self.options.packing else len(self.rows) >= PACK_ROWS:
            self.write()

    def write(self) -> None:
        import pyarrow as pa

        rows = pack_rows(self.rows, self.options.max_length) if self.options.packing else self.rows
        self.writer.write_table(pa.Table.from_pylist(rows, schema=self.schema))
        self.count += len(rows)
        self.rows, self.tokens = [], 0

    def close(self) -> tuple[str, int]:
        """Closes the file. Returns the file's name and its number of rows."""
        if self.rows:
            self.write()
        self.writer.close()
        self.stream.close()
        return self.name, self.count


def columns_of(options: Options) -> tuple[str, ...]:
    """Returns the columns of the token table, in order."""
    return (*options.kind.columns, "seq_lengths") if options.packing else options.kind.columns


def arrow_schema(options: Options) -> Any:
    import pyarrow as pa

    types = {"label": pa.bool_(), "margin": pa.float32(), "row": pa.string()}  # other columns have token ids
    return pa.schema([(name, types.get(name, pa.list_(pa.int32()))) for name in columns_of(options)])


def pack_rows(rows: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Packs rows into bins of at most `size` tokens (best-fit decreasing). `seq_lengths` has the lengths of the rows in a bin."""
    free = defaultdict[int, list[list[dict[str, Any]]]](list)  # {number of free tokens: bins}
    bins: list[list[dict[str, Any]]] = []
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        length = len(row["input_ids"])
        space = min((tokens for tokens, group in free.items() if tokens >= length and group), default=size)
        if not free[space]:
            bins.append([])
            free[space].append(bins[-1])
        target = free[space].pop()
        target.append(row)
        free[space - length].append(target)
    return [
        {
            "input_ids": [token for row in group for token in row["input_ids"]],
            "labels": [label for row in group for label in row["labels"]],
            "seq_lengths": [len(row["input_ids"]) for row in group],
        }
        for group in bins
    ]


# ---- a token row as text --------------------------------------------------------------------------------------------


def decode_sample(tokenizer: Any, columns: dict[str, Any], prompt_tokens: int = 0) -> str:
    """Decodes a token row. Trained tokens, or both completions of a pair, are shown between ⟦ and ⟧.

    `prompt_tokens` is the length of the prompt that both completions of a pair share.
    """
    decode, limit = tokenizer.decode, SAMPLE_CHARACTERS

    def begun(ids: list[int]) -> str:
        """Returns the text of a row's first tokens, without an incomplete UTF-8 character at the end."""
        texts = (str(decode(ids[: max(0, len(ids) - cut)])) for cut in range(4))
        return next((text for text in texts if not text.endswith("\ufffd")), "")

    if "labels" in columns:
        ids, text, shown, stop = columns["input_ids"], "", 0, 0
        for trained, run in itertools.groupby(columns["labels"], lambda label: label != -100):
            stop += len([*run])
            # decode from the start, because decoders drop the first space of a text
            prefix = decode(ids) if stop == len(ids) else begun(ids[:stop])
            piece, shown = prefix[shown:], max(shown, len(prefix))
            text += f"⟦{piece}⟧" if trained else piece
        return clip_text(text, limit)
    if "input_ids" in columns:
        return clip_text(decode(columns["input_ids"]), limit)
    names = ("completion_ids", "chosen_ids", "rejected_ids")
    sides = [columns[name] for name in names if columns.get(name) is not None]
    prompt = columns.get("prompt_ids", [])
    head = begun((prompt + sides[0])[: len(prompt) or prompt_tokens])
    texts = [decode(prompt + side)[len(head) :] for side in sides]
    if len(texts) == 1:
        return clip_text(f"{head}⟦{texts[0]}⟧", limit)
    head, chosen, rejected = (clip_text(text, limit // 3) for text in (head, *texts))
    return f"{head}\n  chosen   ⟦{chosen}⟧\n  rejected ⟦{rejected}⟧"


def clip_text(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - limit} characters ...] {text[-half:]}"
