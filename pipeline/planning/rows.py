"""Estimates the number and length of a job's training rows from a few chunks of its data, without Ray."""

import tempfile
from dataclasses import dataclass, replace

from pipeline.data.chunks import FileChunk, plan_chunks
from pipeline.data.mixture import mix_sources
from pipeline.data.read import plan_reading
from pipeline.data.report import split_of
from pipeline.data.tasks import tokenize_chunk
from pipeline.errors import InputError
from pipeline.job.job import sources_of
from pipeline.models.tokenizer import load_tokenizer
from pipeline.settle.work import Sections
from pipeline.system import storage

CHUNKS = 8  # number of chunks, spread evenly over a large dataset, that are tokenized
CHUNK = 256 << 10  # bytes of a chunk
MAX_UNSPLITTABLE = 32 << 20  # maximum bytes of a file that cannot be split (compressed, a JSON array, or CSV)


@dataclass(frozen=True)
class Rows:
    """The number and the mean length of the training rows in an epoch."""

    count: int
    tokens: float  # mean tokens of a row; a preference pair counts its prompt and the chosen completion


def estimate_rows(work: Sections, context: int | None) -> tuple[Rows | None, str]:
    """Returns Rows for data.train and a description, or None and the reason why no estimate is possible.

    Args:
        context: maximum tokens of a row (inputs.room_for_prompts).
    """
    if any(storage.is_remote(source.path) for source in sources_of(work.data.train)):
        return None, "data.train is not on this machine"
    try:
        model = work.model
        tokenizer = load_tokenizer(
            model.name_or_path, model.revision, model.chat_template, model.trust_remote_code
        )
        files, options = plan_reading(work.identity.stage, replace(work.data, eval=None), tokenizer, context)
        sources: list[list[FileChunk]] = [[] for _ in sources_of(work.data.train)]
        for file in files["train"]:
            for chunk in plan_chunks(file, "train", options.kinds["train"][file.source], CHUNK):
                sources[chunk.source].append(chunk)
        samples = [chunks[:: max(1, -(-len(chunks) * len(sources) // CHUNKS))] for chunks in sources]
        if any(chunk.size > MAX_UNSPLITTABLE for chunks in samples for chunk in chunks):
            return None, "data.train is one large file that cannot be split"
        parts = []
        with tempfile.TemporaryDirectory() as folder:
            for chunks in samples:
                tallies = [
                    tokenize_chunk(chunk, i, tokenizer, options, folder) for i, chunk in enumerate(chunks)
                ]
                parts.append(split_of("train", tallies))
        sizes, estimated = [], False
        for part, chunks, all_chunks in zip(parts, samples, sources, strict=True):
            share = sum(chunk.size for chunk in chunks) / max(1, sum(chunk.size for chunk in all_chunks))
            sizes.append(round(part.kept / share) if share else 0)
            estimated |= share < 1
        if not sum(sizes):
            return None, "none of the first rows of data.train can be used; `validate` shows why"
        mixture = mix_sources(sources_of(work.data.train), sizes, work.data.stopping_strategy)
        counts = mixture.draws if mixture else sizes
    except InputError as error:
        return None, str(error)
    tokens = desirable = 0.0
    for part, count in zip(parts, counts, strict=True):
        tokens += count / sum(counts) * part.tokens / max(1, part.kept)
        desirable += count / sum(counts) * (part.desirable or 0) / max(1, part.kept)
    labels = f", {desirable:.0%} desirable" if any(part.desirable is not None for part in parts) else ""
    description = f"{sum(counts):,} rows, {tokens:.0f} tokens on average{labels}" + ", estimated" * estimated
    return Rows(sum(counts), tokens), description
