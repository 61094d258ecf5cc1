"""Reads, validates and tokenizes a job's rows once, and writes them to Arrow files ("parts") in a cache folder.

For each chunk of a file, a task reads the rows one after another and writes a part, an Arrow file of token rows (tasks.py).
The driver receives counts and two dozen bytes of hashes per row, which find duplicates. It makes the report from the counts
(report.py), rejects unusable data, and loads the parts as tables. Later runs with the same files, tokenizer, template and
options reuse the parts.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data.chunks import FileChunk, plan_chunks
from pipeline.data.counts import Counts, RowsDigest, of_split, sum_counts
from pipeline.data.files import File, find_files, map_file
from pipeline.data.formats import kind_of
from pipeline.data.mixture import Mixture, mix_sources
from pipeline.data.preview import resolve_labels, source_kinds
from pipeline.data.report import Report, check_rows_are_usable, report_of
from pipeline.data.tasks import Options, columns_of, hash_rows, run_chunks, tokenize_chunk
from pipeline.data.template import DATE
from pipeline.errors import InputError
from pipeline.job.job import sources_of
from pipeline.system import storage

VERSION = 20  # version of the parts; increase it if the same rows now produce different tokens or reports
SMALL = 64 << 20  # maximum bytes of files to tokenize without Ray, which takes seconds to start


@dataclass
class Prepared:
    """The tokenized rows in file order, as Arrow tables or materialized Ray Data datasets, and the report on the rows."""

    train: Any
    eval: Any
    report: Report
    digests: dict[str, str]  # {split: SHA-256 digest of the rows}
    fingerprints: dict[str, str]  # {split: fingerprint of the token table, the same on all workers}
    mixture: Mixture | None = None  # mixture of the sources of `train`, or None without weights


def prepare_rows(
    stage: str,
    data: Any,
    tokenizer: Any,
    context_length: int | None,
    cache_root: str,
    packing: bool = False,
    ray_for_rows: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> Prepared:
    """Returns the job's train and eval rows as token tables.

    Args:
        stage: the job's stage, or `pairs` for data.pairs, or `benchmarks` for data.benchmarks.
        data: the job's `data` section.
        context_length: maximum tokens of the model's context, or None if unknown.
        packing: whether to pack the rows. Only demonstrations can be packed.
        ray_for_rows: a function that starts Ray to tokenize files above SMALL bytes, for a job in this process, which gets
            pyarrow tables. None for a job on Ray, which gets Ray Data datasets.

    Raises InputError if files are missing, if the rows are unusable, or if no row is left.
    """
    begin = time.monotonic()
    unread = dict[str, str]()
    files, options = plan_reading(stage, data, tokenizer, context_length, packing, unread)
    key = cache_key(files, tokenizer, options)
    folder = storage.join(storage.absolute(cache_root), key[:32])
    manifest = read_manifest(folder)
    reused = manifest is not None
    if manifest is None:
        chunks = [
            chunk
            for split, listing in files.items()
            for file in listing
            for chunk in plan_chunks(file, split, options.kinds[split][file.source])
        ]
        storage.require_writable(folder, "data.cache_dir", "./cache")
        on_ray = not ray_for_rows or sum(file.size for listing in files.values() for file in listing) > SMALL
        with ray_for_rows() if on_ray and ray_for_rows else contextlib.nullcontext():
            repeated = repeated_rows(run_tasks(hash_rows, chunks, on_ray), chunks) if data.deduplicate else {}
            shared = {"tokenizer": tokenizer, "options": options, "folder": folder, "repeated": repeated}
            work = functools.partial(tokenize_chunk, **shared)
            counts = run_tasks(work, chunks, on_ray)
        check_rows_are_usable(counts, options)
        manifest = {"key": key, **manifest_of(counts, tokenizer, options)}
        storage.write_json(storage.join(folder, "manifest.json"), manifest)
    report = Report.from_dict(manifest["report"])
    in_process = ray_for_rows is not None
    if not in_process:
        set_up_ray_data()
    tables = {
        split: load_parts(folder, parts, manifest["columns"], in_process)
        for split, parts in manifest["parts"].items()
    }
    mixture = describe_sources(report, data, files)
    read_paths = {file.path for listing in files.values() for file in listing}
    report.not_read = {path: reason for path, reason in unread.items() if path not in read_paths}
    report = replace(report, reused=reused, seconds=round(time.monotonic() - begin, 3))
    return Prepared(
        tables.get("train"),
        tables.get("eval"),
        report,
        manifest["digests"],
        {split: hashlib.sha256(f"{key}:{split}".encode()).hexdigest()[:32] for split in tables},
        mixture,
    )


def plan_reading(
    stage: str,
    data: Any,
    tokenizer: Any,
    context_length: int | None,
    packing: bool = False,
    unread: Any = None,
) -> tuple[dict[str, list[File]], Options]:
    """Returns the files of each split and the options for tasks, with label rules from the first rows, without using Ray.

    Adds the unread files of folders to `unread`, as {path: reason}.
    Raises InputError if files or columns are missing, rows fit another stage, or keys contradict the model.
    """
    options = options_of(stage, data, tokenizer, context_length, packing)
    splits = [(key, spec) for key in ("train", "eval") if (spec := getattr(data, key))]
    files = {key: find_files(spec, f"data.{key}", unread) for key, spec in splits}
    return files, replace(options, kinds=resolve_labels(options.kinds, files))


def describe_sources(report: Report, data: Any, files: dict[str, list[File]]) -> Mixture | None:
    """Adds settings and rows per epoch of each source to the report. Returns the mixture of data.train."""
    for split, entries in report.sources.items():
        origin = "eval" if "eval" in files and split == "eval" else "train"
        sources = sources_of(getattr(data, origin))
        for entry in entries:
            source = sources[entry.source]
            entry.path, entry.columns, entry.transform = source.path, source.columns, source.transform
            entry.revision = next(file.revision for file in files[origin] if file.source == entry.source)
    sizes = {entry.source: entry.rows for entry in report.sources.get("train", ())}
    sources = sources_of(data.train)
    mixture = mix_sources(
        sources, [sizes.get(index, 0) for index in range(len(sources))], data.stopping_strategy
    )
    if mixture:
        for entry in report.sources["train"]:
            entry.drawn = mixture.draws[entry.source]
    return mixture


def options_of(stage: str, data: Any, tokenizer: Any, context_length: int | None, packing: bool) -> Options:
    """Returns the options for tasks. Raises InputError if keys of `data` contradict each other or the model."""
    from pipeline.models.template import text_as_chat
    from pipeline.models.tokenizer import eos_ids

    kind, max_length = kind_of(stage), data.max_length or context_length
    if not max_length:
        raise InputError(
            "the model's configuration has no context length; set data.max_length=1024", key="data.max_length"
        )
    return Options(
        kind,
        max_length,
        data.overlong,
        data.on_error,
        text_as_chat(tokenizer, data.apply_chat_template),
        tuple(eos_ids(tokenizer)),
        data.eval_fraction,
        data.seed,
        packing and "labels" in kind.columns,
        data.parse_special_tokens,
        source_kinds(stage, data),
        data.deduplicate,
    )


def manifest_of(counts: list[Counts], tokenizer: Any, options: Options) -> dict[str, Any]:
    """Returns the manifest: parts, columns, digests and report. `counts` must be in the order of the chunks."""
    report = report_of(counts, tokenizer, options)
    margins = sum_counts(counts)["margins"]
    return {
        "parts": {split: [c.parts[split] for c in counts if split in c.parts] for split in report.splits},
        "columns": [name for name in columns_of(options) if name != "margin" or margins],
        "digests": {split: content_digest(split, counts, options) for split in report.splits},
        "report": report.to_dict(),
    }


def content_digest(split: str, counts: list[Counts], options: Options) -> str:
    """Returns a digest of a split's rows in their order. The digest includes data.eval_fraction, if set, and the seed."""
    digest = RowsDigest()
    for chunk_counts in of_split("train" if options.eval_fraction else split, counts):
        digest.extend(chunk_counts.digest)
    held_out = f"{split}:{options.eval_fraction}:{options.seed}" if options.eval_fraction else ""
    return hashlib.sha256(f"{digest.count}:{digest.value}:{held_out}".encode()).hexdigest()


def repeated_rows(hashes: list[bytes], chunks: list[FileChunk]) -> dict[int, Any]:
    """Returns {index of a chunk: positions of rows that equal an earlier row of the split}, from 8-byte hashes of all rows."""
    import numpy as np

    repeated = {}
    for split in ("train", "eval"):
        indices = [index for index, chunk in enumerate(chunks) if chunk.split == split]
        arrays = [np.frombuffer(hashes[index], dtype=np.uint64) for index in indices]
        all_hashes = np.concatenate([*arrays, np.empty(0, np.uint64)])
        repeats = np.ones(len(all_hashes), dtype=bool)
        repeats[np.unique(all_hashes, return_index=True)[1]] = False
        ends = np.cumsum([len(array) for array in arrays], dtype=int)
        for index, mask in zip(indices, np.split(repeats, ends[:-1]), strict=False):
            repeated[index] = np.flatnonzero(mask)
    return repeated


def run_tasks(work: Callable[[FileChunk, int], Any], chunks: list[FileChunk], on_ray: bool) -> list[Any]:
    """Runs work(chunk, number) for all chunks, in Ray Data tasks or in this process. Returns the results in chunk order."""
    if not on_ray:
        return [work(chunk, index) for index, chunk in enumerate(chunks)]
    import ray

    set_up_ray_data()
    task = functools.partial(run_chunks, shared=ray.put((chunks, work)))
    indices = ray.data.range(len(chunks), override_num_blocks=len(chunks))
    rows = indices.map_batches(task, batch_size=None, batch_format="numpy").take_all()
    rows.sort(key=lambda row: row["index"])
    return [pickle.loads(row["result"]) for row in rows]


def set_up_ray_data() -> None:
    """Configures Ray Data in this process to keep the order of blocks, and to print nothing."""
    import ray

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.print_on_execution_start = False
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)  # Ray Data would print a line for each execution
    # Ray's progress logger would print a warning that there are no progress bars.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)


# ---- the cache: a folder of parts. It is complete when its manifest, the last file, is written -----------------------


def cache_key(files: dict[str, list[File]], tokenizer: Any, options: Options) -> str:
    """Returns the cache key, a digest of all inputs that determine the parts.

    The key depends on the path, size and modification time of each file, but not on the content, because reading all files would
    take too long. Therefore, a copy of a file is tokenized again.
    """
    from pipeline.models.tokenizer import template_digest, tokenizer_digest

    listed = {
        split: [(storage.absolute(file.path), file.size, file.mtime, file.source) for file in listing]
        for split, listing in files.items()
    }
    digests = tokenizer_digest(tokenizer), template_digest(tokenizer)
    parts = [VERSION, DATE, listed, *digests, options.cache_parts()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def read_manifest(folder: str) -> dict[str, Any] | None:
    """Returns the manifest of a complete cache folder, or None if the folder is unfinished, damaged or incomplete."""
    import pyarrow as pa

    try:
        manifest: dict[str, Any] = storage.read_json(storage.join(folder, "manifest.json"))
        for name, _ in itertools.chain.from_iterable(manifest["parts"].values()):
            # reads the end of the file, to detect a truncated file
            pa.ipc.open_file(map_file(storage.join(folder, name)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the caller tokenizes the rows again
        return None
    return manifest


def load_parts(folder: str, parts: list[list[Any]], columns: list[str], in_process: bool) -> Any:
    """Returns the rows in the order of the parts: one Arrow table, or a materialized ray.data.Dataset of Arrow blocks."""
    names = [storage.join(folder, name) for name, _ in parts]
    if in_process:
        import pyarrow as pa

        return pa.concat_tables(_read_part({"id": range(len(names))}, names, columns))
    import ray

    task = functools.partial(_read_part, names=names, columns=columns)
    blocks = ray.data.range(len(names), override_num_blocks=len(names))
    return blocks.map_batches(task, batch_size=None, batch_format="numpy").materialize()


def _read_part(batch: dict[str, Any], names: list[str], columns: list[str]) -> Iterator[Any]:
    import pyarrow as pa

    for index in batch["id"]:
        part = pa.ipc.open_file(map_file(names[int(index)]))
        for number in range(part.num_record_batches):
            yield pa.Table.from_batches([part.get_batch(number)]).select(columns)


def to_hf(shard: Any, fingerprint: str) -> Any:
    """Converts an Arrow table or a Ray Data dataset to a datasets.Dataset that shares its memory.

    `fingerprint` identifies the table. Without `fingerprint`, the datasets library would copy and hash the full table.
    """
    import datasets
    import pyarrow as pa

    if not isinstance(shard, pa.Table):
        shard = pa.concat_tables(list(shard.iter_batches(batch_size=None, batch_format="pyarrow")))
    table = shard.replace_schema_metadata(None)
    return datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint=fingerprint)
