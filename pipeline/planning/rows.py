"""How many rows a job's data has, and how long they are: estimated from a few of its chunks, without Ray."""

import os
import tempfile
from dataclasses import dataclass

from pipeline.config import Job
from pipeline.data.chunks import Chunk, plan
from pipeline.data.files import find
from pipeline.data.read import options_of
from pipeline.data.tasks import tokenise
from pipeline.errors import InputError
from pipeline.models.tokenizer import load_tokenizer
from pipeline.system import storage

# What is tokenised of a large set: so many chunks of so many bytes, spread over it.
CHUNKS = 8
CHUNK = 256 << 10
# Bytes of a zipped file or a JSON array above which it is not looked at: it is no range of lines.
WHOLE = 32 << 20


@dataclass(frozen=True)
class Rows:
    """The training rows of an epoch."""

    count: int
    tokens: float  # mean of a row; of a pair, of prompt and chosen completion


def look(job: Job, context: int | None) -> tuple[Rows | None, str]:
    """(rows of data.train, how they were found); (None, why they are not known).

    Args:
        context: tokens that the base has for a row (inputs.room_for_prompts).
    """
    given = job.data.train or []
    paths = [given] if isinstance(given, str) else given
    if any(storage.is_remote(path) for path in paths):
        return None, "data.train is not on this machine"
    try:
        files = find(paths, "data.train")
        model = job.model
        tokenizer = load_tokenizer(
            model.name_or_path, model.revision, model.chat_template, model.trust_remote_code
        )
        options = options_of(job.stage, job.data, tokenizer, context, packing=False)
        chunks = plan(files, "train", options.kind, CHUNK)
        seen = chunks[:: max(1, -(-len(chunks) // CHUNKS))]
        if any(size(chunk) > WHOLE for chunk in seen):
            return None, "data.train is one large zipped file or array"
        with tempfile.TemporaryDirectory() as folder:
            stats = [tokenise(chunk, i, tokenizer, options, folder) for i, chunk in enumerate(seen)]
    except InputError as error:
        return None, str(error)
    splits = [stat.split("train") for stat in stats]
    kept, tokens = sum(split.kept for split in splits), sum(split.tokens for split in splits)
    if not kept:
        return None, "none of its first rows can be used: `validate` says why"
    share = sum(map(size, seen)) / sum(map(size, chunks))
    rows = Rows(round(kept / share), tokens / kept)
    labelled = [split.desirable for split in splits if split.desirable is not None]
    labels = f", {sum(labelled) / kept:.0%} desirable" if labelled else ""
    return rows, f"{rows.count:,} rows, {rows.tokens:.0f} tokens on average{labels}" + (
        ", estimated" if share < 1 else ""
    )


def size(chunk: Chunk) -> int:
    """Bytes of its file that a chunk covers."""
    return os.path.getsize(chunk.path) if chunk.stop < 0 else chunk.stop - chunk.start
