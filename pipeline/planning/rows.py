"""How many rows a job's data has, and how long they are: estimated from a few of its chunks, without Ray."""

import tempfile
from dataclasses import dataclass, replace

from pipeline.config import Job
from pipeline.config.sources import sources_of
from pipeline.data.chunks import plan
from pipeline.data.files import find
from pipeline.data.lookahead import settled
from pipeline.data.read import options_of
from pipeline.data.tasks import tokenise
from pipeline.errors import InputError
from pipeline.models.tokenizer import load_tokenizer
from pipeline.system import storage

# What is tokenised of a large set: so many chunks of so many bytes, spread over it.
CHUNKS = 8
CHUNK = 256 << 10
# Bytes of a file that cannot be cut (zipped, a JSON array, CSV) above which it is not looked at.
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
    if any(storage.is_remote(source.path) for source in sources_of(job.data.train)):
        return None, "data.train is not on this machine"
    try:
        files = find(job.data.train, "data.train")
        model = job.model
        tokenizer = load_tokenizer(
            model.name_or_path, model.revision, model.chat_template, model.trust_remote_code
        )
        options = options_of(job.stage, job.data, tokenizer, context, packing=False)
        options = replace(options, preprocess=settled(options.preprocess, {"train": files}, job.stage))
        chunks = plan(files, "train", options.kind, CHUNK)
        seen = chunks[:: max(1, -(-len(chunks) // CHUNKS))]
        if any(chunk.size > WHOLE for chunk in seen):
            return None, "data.train is one large file that cannot be cut"
        with tempfile.TemporaryDirectory() as folder:
            stats = [tokenise(chunk, i, tokenizer, options, folder) for i, chunk in enumerate(seen)]
    except InputError as error:
        return None, str(error)
    splits = [stat.split("train") for stat in stats]
    kept, tokens = sum(split.kept for split in splits), sum(split.tokens for split in splits)
    if not kept:
        return None, "none of its first rows can be used: `validate` says why"
    share = sum(chunk.size for chunk in seen) / max(1, sum(chunk.size for chunk in chunks))
    rows = Rows(round(kept / share), tokens / kept)
    labelled = [split.desirable for split in splits if split.desirable is not None]
    labels = f", {sum(labelled) / kept:.0%} desirable" if labelled else ""
    return rows, f"{rows.count:,} rows, {rows.tokens:.0f} tokens on average{labels}" + (
        ", estimated" if share < 1 else ""
    )
