"""An update's completions in chunks: the unit of sampling and scoring, whoever does it, and however many do.

How an update is cut depends on the job alone, not on the memory of a worker. All sums over several completions that
sampling and the frozen roles make lie within a chunk. So a chunk has the same bits from every sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeline.inference.rows import Completion

Key = tuple[
    int, int, int
]  # of a chunk in the run: update, rank, and number among the rank's chunks of that update


@dataclass(frozen=True)
class Chunk:
    """Prompts of one trainer's share of an update, for one sampler."""

    update: int
    rank: int  # of the trainer that learns with it
    number: int
    version: int  # of the policy that samples it: the number of updates it has had
    places: list[int]  # of the prompts in the rank's share
    prompt_ids: list[list[int]]  # token ids of each prompt
    data: list[str]  # JSON text of each prompt's data row
    episodes: list[
        int
    ]  # numbers in the run of the completions, those to one prompt together: what sampling is keyed by

    @property
    def key(self) -> Key:
        return (self.update, self.rank, self.number)

    @property
    def generations(self) -> int:
        """Completions to each prompt."""
        return len(self.episodes) // len(self.prompt_ids)


@dataclass
class Greedy:
    """One greedy completion to each prompt of a chunk, for remax."""

    completions: list[Completion]
    raw: dict[str, list[float]] | None = None


@dataclass
class Sampled:
    """What a sampler made of a chunk. `raw` and `ref_logprobs` are None until they are computed."""

    key: Key
    version: int  # that sampled
    digest: str  # of that version's parameters, as the sampler held them
    completions: list[Completion]
    greedy: Greedy | None = None
    raw: dict[str, list[float]] | None = None  # each reward's scores of the completions, by its name
    ref_logprobs: Tensor | None = None  # (completions, actions) of the reference, on the CPU


def cut(lengths: Sequence[int], rows: int, generations: int) -> list[list[int]]:
    """Prompts in chunks of at most `rows` completions, as indices into `lengths`: of like lengths, and a prompt never in two.

    Args:
        lengths: tokens of each prompt.
        rows: completions of a chunk, at most, but those to one prompt are never parted.
        generations: completions to each prompt.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    prompts = max(1, rows // generations)
    return [sorted(order[start : start + prompts]) for start in range(0, len(order), prompts)]
