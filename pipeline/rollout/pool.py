"""An actor that distributes chunks to rollout workers. Ray restarts workers that die, on any node with free resources.

The next free worker samples the waiting chunk of the earliest update. If a worker dies or exceeds the time limit, the worker's
chunk returns to the queue. All workers compute bit-identical chunks, so the distribution does not change the result of training.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import Failure, InputError, OutOfMemory, SelfCheckFailed, in_brief
from pipeline.rollout.worker import NumericSettings, RolloutWorker
from pipeline.settle import placement
from pipeline.settle.placement import Bundle
from pipeline.settle.work import Work
from pipeline.system import terminal

if TYPE_CHECKING:
    from pipeline.ppo.sampler import Key

LOAD_TIMEOUT_S = 3600.0  # time limit for loading models; rollout.chunk_timeout_s if longer
MAX_ATTEMPTS = 5  # number of workers that may die while sampling a chunk before the chunk counts as the cause
RETRY_PAUSE_S = 2.0  # time before a chunk whose policy version is missing is distributed again
# Errors with complete messages, which every worker would raise in the same way.
FINAL = (InputError, Failure, OutOfMemory, SelfCheckFailed)


class WorkerLost(Exception):
    """Raised if a worker has stopped. Ray restarts the worker. The message gives the reason."""


@dataclass(eq=False)
class RequestedChunk:
    """A chunk that a trainer requested."""

    session: str
    key: Key
    version: int
    chunk: bytes  # pickled
    result: asyncio.Future
    attempts: int = 0


class Pool:
    """The actor that distributes chunks. Each start of the group of trainers is a session, and each call passes the session's id.

    Args:
        work: the run's work (settle/work.py).
    """

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.rollout
        self.session = ""
        self.settings: NumericSettings | None = None  # settings of the session's trainers
        self.tasks: dict[Key, RequestedChunk] = {}
        self.waiting: list[RequestedChunk] = []
        self.versions: dict[int, list[Any]] = {}  # {version: [ObjectRef of its tensors]}
        # Workers that have loaded models, or load them for the first time. If no worker is in this set, trainers sample their own
        # chunks.
        self.present: set[int] = set()
        self.ready: set[int] = set()  # workers that have loaded their models
        self.alone_since = time.monotonic()  # time when the last worker was lost
        self.broken: BaseException | None = None
        self.measured, self.lost = time.monotonic(), 0
        self.busy = 0.0  # seconds that workers spent on finished chunks since time `measured`
        self.started: dict[int, float] = {}  # {worker: start time of its current chunk}
        self.running: list[asyncio.Future] = []
        self.changed = asyncio.Condition()

    async def start(self) -> None:
        """Starts the workers, unless they have been started already."""
        if self.running:
            return
        terminal.mark_lines()
        print(":actor_name:rollout", flush=True)  # Ray's marker: log lines start with `(rollout pid=...)`
        print(f"starting rollout workers: {self.config.num_workers}", flush=True)
        self.alone_since = time.monotonic()
        self.running = [
            asyncio.ensure_future(self._keep(number)) for number in range(self.config.num_workers)
        ]
        self.running.append(asyncio.ensure_future(self._report_unplaced()))

    # ------------------------------------------------------------------------------------------ trainers

    async def begin(self, session: str, settings: NumericSettings) -> None:
        """Begins the session of a new group of trainers. Drops requests of earlier sessions."""
        await self.start()  # the workers may be missing, because Ray may have restarted this actor
        for task in self.tasks.values():  # the trainers that waited for these chunks have ended
            task.result.cancel()
        if self.session:
            self.broken = None  # the error may not happen again, because workers may be on other nodes now
        self.session, self.settings = session, settings
        self.tasks, self.versions, self.waiting = {}, {}, []
        self.alone_since = time.monotonic()  # the new trainers begin to wait now
        await self._notify()

    async def publish(self, session: str, version: int, tensors: list[Any]) -> None:
        """Stores a version of the policy: an ObjectRef of its tensors, in a list, so that Ray does not fetch them."""
        if session == self.session:
            self.versions[version] = tensors
            for outdated in [v for v in self.versions if v < version - self.config.staleness]:
                del self.versions[outdated]
            await self._notify()

    async def request(self, session: str, chunks: list[tuple[Key, int, bytes]]) -> None:
        """Queues chunks. Each request has a key, a policy version and the pickled chunk."""
        if session == self.session:
            for key, version, chunk in chunks:
                result = asyncio.get_running_loop().create_future()
                self.tasks[key] = task = RequestedChunk(session, key, version, chunk, result)
                self.waiting.append(task)
            await self._notify()

    async def collect(self, session: str, key: Key) -> bytes | None:
        """Waits for a sampled and scored chunk. Returns None if there was no worker for `worker_wait_timeout_s`."""
        if session != self.session or key not in self.tasks:
            raise Failure(
                f"chunk {key} (update, rank, number) was not requested: the actor that distributes rollouts was restarted"
            )
        task = self.tasks[key]
        while not task.result.done():
            if self.broken:
                raise self.broken
            timed_out = 0 <= self.config.worker_wait_timeout_s <= time.monotonic() - self.alone_since
            if not self.present and timed_out and task in self.waiting:
                self.waiting.remove(task)
                del self.tasks[key]
                return None
            await asyncio.wait({task.result}, timeout=0.2)
        sampled = task.result.result()  # raises CancelledError if a new session has begun
        del self.tasks[key]
        return sampled

    async def metrics(self) -> dict[str, float]:
        """Returns the numbers of ready and lost workers and of waiting chunks, and the idle share since the last call."""
        now, ready = time.monotonic(), len(self.ready)
        busy = self.busy + sum(now - max(start, self.measured) for start in self.started.values())
        metrics = {
            "rollout/workers": float(ready),
            "rollout/idle": max(0.0, 1 - busy / max((now - self.measured) * max(1, ready), 1e-9)),
            "rollout/queue": float(len(self.waiting)),
            "rollout/lost_workers": float(self.lost),
        }
        self.measured, self.busy = now, 0.0
        return metrics

    # ------------------------------------------------------------------------------------------- workers

    async def _keep(self, number: int) -> None:
        """Lets a worker sample one chunk after another until the run ends."""
        worker, is_first = self._start(), True
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.broken)
            try:
                await self._answer(worker, worker.placed.remote(), None)
                if is_first:
                    self.present.add(number)
                is_first = False
                settings = await self._load(worker)
                self.present.add(number)
                self.ready.add(number)
                while True:
                    await self._do(number, worker, await self._next(worker, settings), settings)
            except WorkerLost as error:
                self.lost += number in self.ready
                terminal.say(f"rollout worker {number} {error}; another worker takes its place")
            except Exception as error:  # the models cannot be loaded, or this file has a bug
                self.broken = error
            if number in self.present:
                self.alone_since = time.monotonic()
            self.present.discard(number)
            self.ready.discard(number)

    def _each(self) -> Bundle:
        """Returns the resources that one worker requests."""
        assert self.work.places.rollout
        return self.work.places.rollout.each

    def _start(self) -> Any:
        options = self._each().options()
        return ray.remote(RolloutWorker).options(max_restarts=-1, **options).remote(self.work)

    async def _load(self, worker: Any) -> NumericSettings:
        """Lets a worker load its models and apply the trainers' settings. Returns the settings."""
        limit = max(LOAD_TIMEOUT_S, self.config.chunk_timeout_s)
        try:
            await self._answer(worker, worker.load.remote(), limit)
            async with self.changed:
                await self.changed.wait_for(lambda: self.settings is not None)
            settings = self.settings
            assert settings
            await self._answer(worker, worker.apply_settings.remote(settings), limit)
        except WorkerLost as error:
            if isinstance(error.__cause__, RayTaskError):
                raise Failure(f"a rollout worker cannot load its models: it {error}") from error
            raise
        except FINAL:  # the next attempt begins with a new process
            _restart(worker)
            raise
        return settings

    async def _report_unplaced(self) -> None:
        """Reports once how many workers still wait for resources after REPORT_INTERVAL_S."""
        await asyncio.sleep(placement.REPORT_INTERVAL_S)
        if missing := self.config.num_workers - len(self.present):
            bundle = self._each()
            with contextlib.suppress(Exception):  # the head node may be busy
                cluster = await asyncio.to_thread(placement.describe_cluster)
                terminal.say(f"rollout workers that wait for resources: {missing}, {bundle} each; {cluster}")

    async def _next(self, worker: Any, settings: NumericSettings) -> RequestedChunk:
        """Waits for the next chunk whose version is published. Raises WorkerLost if the trainers' settings have changed."""
        async with self.changed:
            while True:
                if settings != self.settings:
                    _restart(worker)
                    raise WorkerLost("has the numeric settings of earlier trainers on other machines")
                ready = [task for task in self.waiting if task.version in self.versions]
                if ready:
                    task = min(ready, key=lambda task: task.key)
                    self.waiting.remove(task)
                    return task
                await self.changed.wait()

    async def _do(self, number: int, worker: Any, task: RequestedChunk, settings: NumericSettings) -> None:
        """Lets a worker sample a chunk. If the worker is lost, requeues the chunk and raises WorkerLost."""
        tensors = self.versions[task.version]
        task.attempts += 1
        self.started[number] = time.monotonic()
        try:
            reference = worker.sample.remote(settings, task.session, task.chunk, tensors)
            sampled = await self._answer(worker, reference, self.config.chunk_timeout_s)
        except FINAL as error:  # a reward failed, or memory ran out; the worker itself continues
            if not task.result.done():
                task.result.set_exception(error)
            return
        except WorkerLost as error:
            if getattr(error.__cause__, "preempted", False):
                task.attempts -= 1  # the lost node was the cause, not the chunk
            await self._requeue(task, error)
            raise
        finally:
            self.busy += time.monotonic() - max(self.started.pop(number), self.measured)
        if sampled is None:  # the trainer that published the version has died, so this session will end, too
            task.attempts -= 1
            await asyncio.sleep(RETRY_PAUSE_S)
            await self._requeue(task)
        elif not task.result.done():
            task.result.set_result(sampled)

    async def _requeue(self, task: RequestedChunk, error: WorkerLost | None = None) -> None:
        """Requeues a chunk, unless its session is over, or MAX_ATTEMPTS workers have died while sampling this chunk."""
        if task.session != self.session:
            return
        if task.attempts < MAX_ATTEMPTS:
            self.waiting.append(task)
            await self._notify()
            return
        task.result.set_exception(
            Failure(
                f"{task.attempts} rollout workers died while they sampled chunk {task.key} (update, rank, number); "
                f"the last one {error}"
            )
        )

    async def _answer(self, worker: Any, reference: Any, limit: float | None) -> Any:
        """Returns the result of a call. Raises FINAL errors unchanged, and WorkerLost if Ray restarts the worker."""
        future = asyncio.wrap_future(reference.future())
        # reads the error of a late answer, so that asyncio does not warn about it
        future.add_done_callback(lambda x: x.cancelled() or x.exception())
        await asyncio.wait({future}, timeout=limit)
        if not future.done():
            _restart(worker)
            raise WorkerLost(f"has not answered for {limit:g} s (rollout.chunk_timeout_s)")
        try:
            return future.result()
        except RayTaskError as error:
            if isinstance(error.cause, FINAL):
                raise error.cause from None
            print(error, flush=True)
            _restart(worker)
            raise WorkerLost(f"failed: {in_brief(error.cause, 300)}") from error
        except ActorDiedError as error:  # the actor's constructor failed, and Ray does not restart it
            raise Failure(f"a rollout worker cannot start ({in_brief(error, 300)})") from error
        except RayActorError as error:
            raise WorkerLost("is gone: its process or its node died") from error

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def _restart(worker: Any) -> None:
    """Lets Ray end a worker's process and start a new process."""
    with contextlib.suppress(RayError):
        ray.kill(worker, no_restart=False)


@contextlib.contextmanager
def rollout_pool(work: Work) -> Iterator[Any]:
    """Runs the pool of a run during the block."""
    # The pool is on the driver's node, so that the loss of other nodes does not end it.
    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000, scheduling_strategy=strategy)(Pool)
    pool = actor.remote(work)
    try:
        yield pool
    finally:
        ray.kill(pool)  # also ends the rollout workers, because the pool owns the workers
