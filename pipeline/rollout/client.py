"""The trainer's side of rollout workers: the interface that pipeline/ppo knows, over the pool's actor."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
import torch

from pipeline.errors import Failure, causes
from pipeline.ppo.clock import TRAINER, Span
from pipeline.rollout.pool import FINAL
from pipeline.rollout.worker import NumericSettings
from pipeline.system import terminal

if TYPE_CHECKING:
    from pipeline.ppo.rollouts import Tensors
    from pipeline.ppo.sampler import Chunk, Sampled
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.runtime.worker import Worker


class Client:
    """A `RolloutWorkers` (ppo/rollouts.py). Each training worker has one."""

    def __init__(self, worker: Worker, pool: Any) -> None:
        self.pool, self.rank = pool, worker.rank
        # Only now, because the trainers get their resources first. Rollout workers load at the same time as trainers.
        pool.start.remote()
        self.session = worker.gather(uuid.uuid4().hex)[0]
        self.worker = worker
        self.own: list[Span] = []  # this trainer's spans since the last `measured`

    def begin(self, trainer: PPOTrainer) -> None:
        """Sends the workers the trainers' numeric settings. Every rank calls it, before the first update."""
        if self.rank == 0:
            settings = NumericSettings(trainer.shared.can_pack, torch.get_num_threads(), trainer.longest)
            ray.get(self.pool.begin.remote(self.session, settings))
        self.worker.gather(None)  # no rank requests before the session has begun

    def publish(self, version: int, tensors: Tensors) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with self._span("publish"):
            # In a list, because Ray would fetch a bare reference for the pool, which only passes it on.
            ray.get(self.pool.publish.remote(self.session, version, [ray.put(dict(tensors))], size))

    def request(self, chunks: Sequence[Chunk]) -> None:
        asked = [(chunk.key, chunk.version, pickle.dumps(chunk)) for chunk in chunks]
        ray.get(self.pool.request.remote(self.session, asked))

    def collect(self, chunk: Chunk) -> Sampled | None:
        """Waits for a chunk. Returns None if this trainer must sample it. Raises the original error of a rollout worker."""
        try:
            with self._span("waiting"):
                sampled = ray.get(self.pool.collect.remote(self.session, chunk.key))
        except ray.exceptions.RayTaskError as error:
            raise next((cause for cause in causes(error) if isinstance(cause, FINAL)), error) from None
        except ray.exceptions.RayActorError as error:
            raise Failure(
                "the actor that hands out rollouts died; the same command continues the run"
            ) from error
        if sampled is None:
            terminal.say(
                f"no rollout worker is there: this trainer samples chunk {chunk.number} of update {chunk.update + 1} itself"
            )
            return None
        return pickle.loads(sampled)

    def measured(self) -> tuple[dict[str, float], list[Span]]:
        spans, self.own = self.own, []
        if self.rank != 0:
            return {}, spans
        waited = sum(span.end - span.begin for span in spans if span.what == "waiting")
        figures, assignments, there = ray.get(self.pool.metrics.remote())
        here = time.perf_counter()  # the pool's clock may be another machine's
        for one in assignments:
            what = "lost" if one.lost else f"update {one.update + 1}"
            begin, end = (at - there + here for at in (one.begin, one.end or there))
            spans.append(Span(f"worker {one.slot}", what, begin, end))
        return figures | {"rollout/waited": waited}, spans

    @contextmanager
    def _span(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.own.append(Span(TRAINER, what, begin, time.perf_counter()))
