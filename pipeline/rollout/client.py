"""Implements the trainer's interface to rollout workers (ppo/rollouts.py) with the pool's actor."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch

from pipeline.errors import Failure, causes_of
from pipeline.rollout.pool import FINAL
from pipeline.rollout.worker import NumericSettings
from pipeline.system import terminal

if TYPE_CHECKING:
    from pipeline.ppo.rollouts import Tensors
    from pipeline.ppo.sampler import Chunk, Sampled
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.run.worker import Worker


class PoolClient:
    """Implements `RolloutWorkers` of ppo/rollouts.py. Each training worker has its own client."""

    def __init__(self, worker: Worker, pool: Any) -> None:
        self.pool, self.rank = pool, worker.rank
        # The trainers have their resources already. The rollout workers start while the trainers load models.
        pool.start.remote()
        self.session = worker.gather(uuid.uuid4().hex)[0]
        self.worker = worker
        self.waited = 0.0  # seconds that this trainer waited for chunks since the last call of `measured`

    def begin(self, trainer: PPOTrainer) -> None:
        """Sends the trainers' numeric settings to the workers. Every rank calls this method before the first update."""
        if self.rank == 0:
            settings = NumericSettings(
                trainer.shared.can_pack, torch.get_num_threads(), trainer.prompts.longest
            )
            ray.get(self.pool.begin.remote(self.session, settings))
        self.worker.gather(None)  # no rank may request chunks before the session has begun

    def publish(self, version: int, tensors: Tensors) -> None:
        # Puts the ObjectRef into a list. Ray would replace a bare ObjectRef with the tensors, but the pool only passes it on.
        ray.get(self.pool.publish.remote(self.session, version, [ray.put(dict(tensors))]))

    def request(self, chunks: Sequence[Chunk]) -> None:
        requests = [(chunk.key, chunk.version, pickle.dumps(chunk)) for chunk in chunks]
        ray.get(self.pool.request.remote(self.session, requests))

    def collect(self, chunk: Chunk) -> Sampled | None:
        """Waits for a chunk, or returns None if this trainer must sample it. Raises the original error of a rollout worker."""
        start = time.perf_counter()
        try:
            sampled = ray.get(self.pool.collect.remote(self.session, chunk.key))
        except ray.exceptions.RayTaskError as error:
            raise next((cause for cause in causes_of(error) if isinstance(cause, FINAL)), error) from None
        except ray.exceptions.RayActorError as error:
            raise Failure(
                "the actor that distributes rollouts died; to continue the run, repeat the command with the same run.name"
            ) from error
        self.waited += time.perf_counter() - start
        if sampled is None:
            terminal.say(
                f"no rollout worker is available: this trainer samples chunk {chunk.number} of update {chunk.update + 1} itself"
            )
            return None
        return pickle.loads(sampled)

    def measured(self) -> dict[str, float]:
        waited, self.waited = self.waited, 0.0
        if self.rank != 0:
            return {}
        return ray.get(self.pool.metrics.remote()) | {"rollout/wait_seconds": waited}
