"""Estimates how many rows a job's data has and how long they are, from a few of its chunks, without Ray."""

import tempfile
from dataclasses import dataclass, replace

from pipeline.config import Job
from pipeline.config.job import sources_of
from pipeline.data.chunks import Chunk, plan
from pipeline.data.files import find
from pipeline.data.mixture import mixture_of
from pipeline.data.preview import resolve_labels
from pipeline.data.read import options_of
from pipeline.data.report import split_of
from pipeline.data.tasks import tokenize
from pipeline.errors import InputError
from pipeline.models.tokenizer import load_tokenizer
from pipeline.system import storage

CHUNKS = 8  # chunks of a large dataset that are tokenized, spread evenly
CHUNK = 256 << 10  # bytes
MAX_UNSPLITTABLE = 32 << 20  # bytes of a file that has to be read as one (zipped, a JSON array, CSV)


@dataclass(frozen=True)
class Rows:
    """The training rows of an epoch."""

    count: int
    tokens: float  # mean of a row; of a pair, of prompt and chosen completion


def look(job: Job, context: int | None) -> tuple[Rows | None, str]:
    """Returns (rows of data.train, a description), or (None, why they are unknown).

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
        options = replace(options, preprocess=resolve_labels(options.preprocess, {"train": files}, job.stage))
        chunks = [
            chunk
            for file in files
            for chunk in plan(file, "train", options.kind_in("train", file.source), CHUNK)
        ]
        sources = [
            [chunk for chunk in chunks if chunk.source == index]
            for index in range(len(sources_of(job.data.train)))
        ]
        seen = [some[:: max(1, -(-len(some) * len(sources) // CHUNKS))] for some in sources]
        if any(chunk.size > MAX_UNSPLITTABLE for some in seen for chunk in some):
            return None, "data.train is one large file that cannot be split"
        with tempfile.TemporaryDirectory() as folder:
            parts = [
                split_of(
                    "train", [tokenize(chunk, i, tokenizer, options, folder) for i, chunk in enumerate(some)]
                )
                for some in seen
            ]
        shares = [_bytes(some) / max(1, _bytes(whole)) for some, whole in zip(seen, sources, strict=True)]
        sizes = [round(part.kept / share) if share else 0 for part, share in zip(parts, shares, strict=True)]
        if not sum(sizes):
            return None, "none of its first rows can be used; `validate` shows why"
        mixture = mixture_of(job.data, sizes)
        drawn = mixture.draws if mixture else sizes
    except InputError as error:
        return None, str(error)
    means = [(part.tokens / max(1, part.kept), (part.desirable or 0) / max(1, part.kept)) for part in parts]
    tokens, desirable = (
        sum(count * mean[at] for count, mean in zip(drawn, means, strict=True)) / sum(drawn) for at in (0, 1)
    )
    rows = Rows(sum(drawn), tokens)
    labels = f", {desirable:.0%} desirable" if any(part.desirable is not None for part in parts) else ""
    return rows, f"{rows.count:,} rows, {rows.tokens:.0f} tokens on average{labels}" + (
        ", estimated" if min(shares) < 1 else ""
    )


def _bytes(chunks: list[Chunk]) -> int:
    return sum(chunk.size for chunk in chunks)
