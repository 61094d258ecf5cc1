"""The trainer's side of rollout workers: the interface that pipeline/ppo knows, over the pool's actor."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.errors import Failure, causes
from pipeline.ppo.clock import TRAINER, Span

if TYPE_CHECKING:
    from pipeline.ppo.rollouts import Tensors
    from pipeline.ppo.sampler import Chunk, Sampled
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.runtime.worker import Worker


class Client:
    """A `RolloutWorkers` (ppo/rollouts.py): one in each of the trainers' workers."""

    def __init__(self, worker: Worker, pool: Any) -> None:
        self.pool, self.rank = pool, worker.rank
        # Not before: what the trainer's workers need is theirs. Their models load meanwhile.
        pool.start.remote()
        self.session = worker.gather(uuid.uuid4().hex)[0]
        self.worker = worker
        self.own: list[Span] = []  # of this trainer, since the last `metrics`
        self.seen: list[Span] = []  # before it

    def begin(self, trainer: PPOTrainer) -> None:
        """Tells the workers what this group of trainers has settled. Every rank calls it, before the first update."""
        import ray
        import torch

        from pipeline.rollout.worker import Terms

        if self.rank == 0:
            longest = max(map(len, self.worker.rows("train")["input_ids"])) + trainer.args.response_length
            terms = Terms(trainer.shared.can_pack, torch.get_num_threads(), longest)
            ray.get(self.pool.begin.remote(self.session, terms))
        self.worker.gather(None)  # no rank asks before the session has begun

    def publish(self, version: int, tensors: Tensors) -> None:
        import ray

        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with self._span("publish"):
            # In a list: a reference by itself would be fetched by the pool, which only hands it on.
            ray.get(self.pool.publish.remote(self.session, version, [ray.put(dict(tensors))], size))

    def request(self, chunks: Sequence[Chunk]) -> None:
        import ray

        asked = [(chunk.key, chunk.version, pickle.dumps(chunk)) for chunk in chunks]
        ray.get(self.pool.request.remote(self.session, asked))

    def collect(self, chunk: Chunk) -> Sampled | None:
        """Raises what a rollout worker raised, as it raised it."""
        import ray

        from pipeline.rollout.pool import FINAL

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
            print(
                f"no rollout worker is there: this trainer samples chunk {chunk.number} of update {chunk.update + 1} itself",
                flush=True,
            )
            return None
        return pickle.loads(sampled)

    def metrics(self) -> dict[str, float]:
        import ray

        self.seen, self.own = self.own, []
        waited = sum(span.end - span.begin for span in self.seen if span.what == "waiting")
        if self.rank != 0:
            return {}
        figures, turns, there = ray.get(self.pool.metrics.remote())
        here = time.perf_counter()  # that of the pool may be another machine's
        for turn in turns:
            what = "lost" if turn.lost else f"update {turn.update + 1}"
            begin, end = (at - there + here for at in (turn.begin, turn.end or there))
            self.seen.append(Span(f"worker {turn.slot}", what, begin, end))
        return figures | {"rollout/waited": waited}

    def spans(self) -> list[Span]:
        return self.seen

    @contextmanager
    def _span(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.own.append(Span(TRAINER, what, begin, time.perf_counter()))
