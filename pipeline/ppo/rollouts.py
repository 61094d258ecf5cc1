"""Manages the rollouts of one trainer. Either the trainer's own process or rollout workers sample the completions.

Rollout workers sample up to `staleness` updates ahead of the trainer. All episodes of update u are sampled from version
max(0, u - staleness) of the policy, no matter which process samples them, and when. The result of a run therefore depends only on
the seed, and not on the number and speed of rollout workers, even if some die.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline.models.adapters import SharedBase
from pipeline.models.fsdp_sync import gather, world
from pipeline.ppo.episodes import Episodes, collate
from pipeline.ppo.sampler import Chunk, Sampled, Sampler
from pipeline.writing.rows import Completion

VERSIONS_FILE = "versions.pt"
Tensors = Mapping[str, Tensor]  # the tensors of an adapter, by their names in peft's files


class Versions:
    """Keeps the most recent versions of the policy's parameters. Version u is the policy after u updates.

    Args:
        staleness: number of older versions that may still be requested.
    """

    def __init__(self, shared: SharedBase, staleness: int) -> None:
        self.shared, self.staleness = shared, staleness
        self.tensors: dict[int, dict[str, Tensor]] = {}
        self.digests: dict[int, str] = {}

    def add(self, version: int) -> None:
        """Keeps a copy of the policy's current weights as `version`, and drops versions that can no longer be requested."""
        self._keep(version, self._copy())
        for outdated in [v for v in self.tensors if v < version - self.staleness]:
            del self.tensors[outdated], self.digests[outdated]

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.shared.tensors_of("policy").items()}

    def _keep(self, version: int, tensors: dict[str, Tensor]) -> None:
        # Every rank uses the digest of rank 0, because adapters on different processors may differ by rounding.
        self.tensors[version], self.digests[version] = tensors, gather(digest_tensors(tensors))[0]

    @contextmanager
    def use(self, version: int) -> Iterator[None]:
        """Within the block, the policy has the weights of `version`. Restores the policy's weights after the block."""
        current = self._copy()
        self.shared.fill("policy", self.tensors[version])
        try:
            yield
        finally:
            self.shared.fill("policy", current)

    def save(self, folder: str | Path, newest: int) -> None:
        """Writes the older policy versions that may still be requested. Does not write `newest`, the policy's current version."""
        older = {v: tensors for v, tensors in self.tensors.items() if newest - self.staleness <= v < newest}
        if older:
            torch.save(older, Path(folder) / VERSIONS_FILE)

    def load(self, folder: str | Path) -> None:
        """Reads the file that `save` wrote, if the file exists."""
        self.tensors, self.digests = {}, {}
        path = Path(folder) / VERSIONS_FILE
        stored = torch.load(path, weights_only=True, map_location="cpu") if path.exists() else {}
        for version, tensors in stored.items():
            self._keep(version, tensors)


def digest_tensors(tensors: Tensors) -> str:
    """Returns a hash of the names and bits of tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class RolloutWorkers(Protocol):
    """The trainer's interface to rollout workers, which sample and score chunks."""

    def publish(self, version: int, tensors: Tensors) -> None:
        """Publishes a version of the policy. Only rank 0 calls this, once per version."""

    def request(self, chunks: Sequence[Chunk]) -> None:
        """Requests chunks, in the order in which they will be collected. Returns at once."""

    def collect(self, chunk: Chunk) -> Sampled | None:
        """Waits for a requested chunk. Returns the sampled and scored chunk, or None if no worker is left."""

    def measured(self) -> dict[str, float]:
        """Returns the metrics since the last call."""


@dataclass
class Rollout:
    """The sampled and scored episodes of one trainer's share of an update."""

    parts: list[tuple[Chunk, Sampled]]
    episodes: Episodes
    # {name of a reward: its raw score of each episode}
    raw: dict[str, list[float]] = field(default_factory=dict)


class Rollouts:
    """Returns the sampled chunks of each update. Rollout workers may sample chunks ahead of the trainer.

    Args:
        sampler: samples chunks in this process if no rollout worker does.
        staleness: how many updates rollout workers may sample ahead of the trainer.
        workers: rollout workers, if there are any.
        chunks_of: function from an update's number to the chunks of this trainer's share.
        total: number of updates of the run.
    """

    def __init__(
        self,
        sampler: Sampler,
        staleness: int,
        workers: RolloutWorkers | None,
        chunks_of: Callable[[int], list[Chunk]],
        total: int,
    ) -> None:
        self.sampler, self.workers, self.chunks_of = sampler, workers, chunks_of
        self.staleness, self.total = staleness, total
        self.versions = Versions(sampler.shared, staleness) if workers else None
        self.published: set[int] = set()
        self.synced: tuple[int, int] | None = None  # (update, version) of this process's decoder
        self.requested: dict[int, list[Chunk]] = {}

    def chunks_for(self, update: int) -> list[tuple[Chunk, Sampled]]:
        """Returns the sampled chunks of an update. Rollout workers also score the chunks. Callers request updates in order."""
        if self.workers and self.versions:
            self.versions.add(update)
            self._request(self.workers, self.versions, update)
        chunks = self.requested.pop(update, None) or self.chunks_of(update)
        return [(chunk, self._sampled(chunk, update)) for chunk in chunks]

    def _request(self, workers: RolloutWorkers, versions: Versions, update: int) -> None:
        """Requests the chunks of this update, and of later updates whose policy version exists already."""
        for version in sorted(versions.tensors.keys() - self.published):
            if world()[0] == 0:
                workers.publish(version, versions.tensors[version])
            self.published.add(version)
        for next_update in range(update, min(update + self.staleness + 1, self.total)):
            if next_update not in self.requested:
                self.requested[next_update] = self.chunks_of(next_update)
                workers.request(self.requested[next_update])

    def _sampled(self, chunk: Chunk, update: int) -> Sampled:
        """Returns a chunk from the rollout workers, or samples the chunk in this process if there are no rollout workers."""
        if not self.workers or not self.versions:
            self._sync((update, update))
            return self.sampler.sample(chunk)
        if sampled := self.workers.collect(chunk):
            return sampled
        with self.versions.use(chunk.version) if chunk.version != update else nullcontext():
            self._sync((update, chunk.version))
            return self.sampler.sample_and_score(chunk, self.versions.digests[chunk.version])

    def _sync(self, update_and_version: tuple[int, int]) -> None:
        """Tells the decoder once for each version that the policy has changed, because vLLM keeps a copy of the adapter."""
        if self.synced != update_and_version:
            self.sampler.decoder.changed("policy")
            self.synced = update_and_version


def assemble_episodes(
    parts: Sequence[tuple[Chunk, Sampled]], start: int, pad: int, device: torch.device
) -> Episodes:
    """Returns the completions of a trainer's share as episodes, in the order of the share.

    Args:
        start: number of the update's first episode in the run.
    """
    rows: list[tuple[int, list[int], Completion]] = []
    for chunk, sampled in parts:
        rows += zip((e - start for e in chunk.episodes), chunk.prompts, sampled.completions, strict=True)
    indices, prompts, completions = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    return collate(prompts, completions, indices, pad, device)
