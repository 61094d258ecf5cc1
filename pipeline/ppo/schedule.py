"""The rollouts of one trainer, in the order of its updates: sampled here, or by rollout workers, `staleness` updates ahead.

The episodes of update u are sampled by version max(0, u - staleness) of the policy, exactly, whoever samples them and
whenever. So a run is a function of its seed, asynchronous or not, whatever the number, speed and deaths of its rollout workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.ppo.batch import Episodes, collate
from pipeline.ppo.chunks import Chunk, Sampled
from pipeline.ppo.clock import Span
from pipeline.ppo.sampler import Sampler
from pipeline.ppo.versions import Tensors, Versions


class RolloutWorkers(Protocol):
    """Processes elsewhere that sample and score chunks, as the trainer needs them."""

    def publish(self, version: int, tensors: Tensors) -> None:
        """Makes a version of the policy known; called on rank 0 alone, once for each."""

    def request(self, chunks: Sequence[Chunk]) -> None:
        """Asks for chunks, in the order in which they will be collected. Returns at once."""

    def collect(self, chunk: Chunk) -> Sampled | None:
        """A chunk that was asked for, sampled and scored, when it is; None: there is nobody to do it any more."""

    def metrics(self) -> dict[str, float]:
        """What was observed since the last call, as metrics of an update."""

    def spans(self) -> list[Span]:
        """Who did what when between the last two calls of `metrics`."""


@dataclass
class Rollout:
    """One trainer's share of an update."""

    chunks: list[Chunk]
    sampled: list[Sampled]  # of each chunk
    episodes: Episodes


class Rollouts:
    """Hands out one update's chunks after another, and has the next ones sampled meanwhile.

    Args:
        sampler: samples here, what nobody else does.
        versions: of the policy; None without staleness and without workers: the policy as it is is all there is.
        workers: rollout workers; None: there are none.
        chunks_of: the chunks of this trainer's share of an update, by its number.
        total: updates of the run.
        publishes: whether this trainer is the one whose policy the workers get.
    """

    def __init__(
        self,
        sampler: Sampler,
        versions: Versions | None,
        workers: RolloutWorkers | None,
        chunks_of: Callable[[int], list[Chunk]],
        total: int,
        publishes: bool,
    ) -> None:
        self.sampler, self.versions, self.workers = sampler, versions, workers
        self.chunks_of, self.total, self.publishes = chunks_of, total, publishes
        self.ahead = versions.staleness if versions else 0
        self.published: set[int] = set()
        self.synced: tuple[int, int] | None = None  # (update, version) that the decoder here samples from
        self.asked: dict[int, list[Chunk]] = {}

    def of(self, update: int) -> tuple[list[Chunk], list[Sampled]]:
        """The chunks of an update and what was sampled; by rollout workers they are also scored. Updates come in order."""
        if self.versions:
            self.versions.add(update)
        if self.workers:
            self._ask(self.workers, update)
        chunks = self.asked.pop(update, None) or self.chunks_of(update)
        return chunks, [self._sampled(chunk, update) for chunk in chunks]

    def _ask(self, workers: RolloutWorkers, update: int) -> None:
        """For this update and those that the policy's versions allow already."""
        assert self.versions
        for version in sorted(self.versions.held.keys() - self.published):
            if self.publishes:
                workers.publish(version, self.versions.held[version])
            self.published.add(version)
        for coming in range(update, min(update + self.ahead + 1, self.total)):
            if coming not in self.asked:
                self.asked[coming] = self.chunks_of(coming)
                workers.request(self.asked[coming])

    def _sampled(self, chunk: Chunk, update: int) -> Sampled:
        sampled = self.workers.collect(chunk) if self.workers else None
        if sampled is not None:
            return sampled
        older = (
            self.versions.use(chunk.version) if self.versions and chunk.version != update else nullcontext()
        )
        with older:
            # vLLM, which has a copy, gets each adapter once.
            if self.synced != (update, chunk.version):
                self.sampler.decoder.changed("policy")
                self.synced = (update, chunk.version)
            if self.workers and self.versions:
                return self.sampler.whole(chunk, self.versions.digests[chunk.version])
            return self.sampler.sample(chunk)


def assembled(
    chunks: Sequence[Chunk],
    sampled: Sequence[Sampled],
    indices: Sequence[int],
    pad: int,
    device: torch.device,
) -> Rollout:
    """The chunks of a share as episodes, in the order of the share.

    Args:
        indices: of the share's completions in the global batch.
        pad: token id that fills rows up.
    """
    each = chunks[0].generations
    prompts: list[list[int]] = [[]] * len(indices)
    completions: list = [None] * len(indices)
    for chunk, one in zip(chunks, sampled, strict=True):
        for i, place in enumerate(chunk.places):
            here, there = slice(i * each, (i + 1) * each), slice(place * each, (place + 1) * each)
            prompts[there], completions[there] = [chunk.prompt_ids[i]] * each, one.completions[here]
    return Rollout(list(chunks), list(sampled), collate(prompts, completions, indices, pad, device))


def rows_of(chunk: Chunk) -> list[int]:
    """The rows that the chunk's completions have among the episodes of its share."""
    each = chunk.generations
    return [place * each + g for place in chunk.places for g in range(each)]
