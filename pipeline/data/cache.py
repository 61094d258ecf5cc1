"""The cache: tokenised parts and the manifest that, written last, makes their folder usable.

A later run on the same files, tokenizer, template and options reads the parts instead of making them again.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from pipeline.data.files import File
from pipeline.data.tasks import Options
from pipeline.data.template import DATE
from pipeline.system import storage

VERSION = 9  # of the parts: raise it if the same rows become other tokens or are reported differently


def cache_key(files: dict[str, list[File]], tokenizer: Any, options: Options) -> str:
    """A digest of all that the parts depend on.

    Files are told apart by path, size and time of change, not by content as in digests (merge.content_digest): to know that, all
    of them would have to be read before the cache could save it. A copy of a file is tokenised again.
    """
    from pipeline.models.tokenizer import template_digest, tokenizer_digest

    listed = {
        name: [(storage.absolute(file.path), file.size, file.mtime, file.source) for file in listing]
        for name, listing in files.items()
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
    """The manifest of a finished cache folder; None where it is not finished, damaged or lacks a part."""
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
    """Whether a part exists and, if it is local, is not cut short."""
    if storage.is_remote(path) or not storage.exists(path):
        return storage.exists(path)
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 4))
        return file.read() == b"PAR1"


def load(folder: str, parts: list[list[Any]], columns: list[str], in_process: bool) -> Any:
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
    import pyarrow.parquet as pq

    for index in batch["id"]:
        fs, inner = storage.filesystem(names[int(index)])
        with fs.open_input_file(inner) as file:
            for records in pq.ParquetFile(file).iter_batches(batch_size=1 << 14, columns=columns):
                yield pa.Table.from_batches([records])
