"""The pool: an actor that hands out chunks to rollout workers. Ray restarts workers that die, on any node with resources.

The next free worker takes the chunk of the earliest update. If a worker dies or takes too long, its chunk goes back to the
queue. Every worker computes bit-identical chunks, so training does not depend on any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import Failure, InputError, OutOfMemory, SelfCheckFailed, in_brief
from pipeline.rollout.worker import NumericSettings, RolloutWorker
from pipeline.settle import placement
from pipeline.settle.placement import Bundle
from pipeline.settle.work import Work
from pipeline.system import terminal

LOAD_TIMEOUT_S = 3600.0  # time to load the models, or rollout.chunk_timeout_s if that is longer
MAX_ATTEMPTS = 5  # number of workers that a chunk may lose before it counts as the cause
RETRY_PAUSE_S = 2.0  # time until a chunk without its policy version is sent out again
# errors with complete messages, which every worker would raise again
FINAL = (InputError, Failure, OutOfMemory, SelfCheckFailed)

# A chunk's update, rank and number, as in ppo/sampler.py, which this process does not import because of torch.
Key = tuple[int, int, int]


class WorkerLost(Exception):
    """Raised if a worker has stopped working. Ray starts it again. The message gives the reason."""


@dataclass(eq=False)
class Task:
    """A chunk that a trainer requested."""

    session: str
    key: Key
    version: int
    chunk: bytes  # pickled
    result: asyncio.Future
    attempts: int = 0


class Pool:
    """The pool's actor. Each call of a trainer names its session, one attempt of the group of trainers.

    Args:
        work: the run's work (settle/work.py).
    """

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.rollout
        self.session = ""
        self.settings: NumericSettings | None = None  # settings of the session's trainers
        self.tasks: dict[Key, Task] = {}
        self.waiting: list[Task] = []
        self.versions: dict[int, tuple[list[Any], int]] = {}  # version -> ([reference], bytes)
        # Workers that have loaded, or load for the first time. Patience runs out only while there are none.
        self.present: set[int] = set()
        self.ready: set[int] = set()  # workers that have loaded
        self.alone_since = time.monotonic()  # time when the last worker was lost
        self.broken: BaseException | None = None
        self.measured, self.bytes, self.lost = time.monotonic(), 0, 0
        self.busy = 0.0  # seconds of sampling since `measured`, in finished chunks
        self.begun: dict[int, float] = {}  # worker -> start time of its current chunk
        self.running: list[asyncio.Future] = []
        self.changed = asyncio.Condition()

    async def start(self) -> None:
        """Starts the workers, once."""
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
        """Begins the session of a new group of trainers. Drops the requests of earlier ones."""
        await self.start()  # this actor may be new
        for task in self.tasks.values():  # the trainer that waits for the chunk has ended
            task.result.cancel()
        if self.session:  # this attempt may run on other nodes
            self.broken = None
        self.session, self.settings = session, settings
        self.tasks, self.versions, self.waiting = {}, {}, []
        self.alone_since = time.monotonic()  # the trainers did not wait in the meantime
        await self._notify()

    async def publish(self, session: str, version: int, tensors: list[Any], size: int) -> None:
        """Stores a version of the policy: an ObjectRef of its tensors, in a list so that Ray does not fetch it, and its size."""
        if session == self.session:
            self.versions[version] = (tensors, size)
            for old in [v for v in self.versions if v < version - self.config.staleness]:
                del self.versions[old]
            await self._notify()

    async def request(self, session: str, chunks: list[tuple[Key, int, bytes]]) -> None:
        """Queues chunks: key, version and the pickled chunk of each."""
        if session == self.session:
            for key, version, chunk in chunks:
                result = asyncio.get_running_loop().create_future()
                self.tasks[key] = task = Task(session, key, version, chunk, result)
                self.waiting.append(task)
            await self._notify()

    async def collect(self, session: str, key: Key) -> bytes | None:
        """Waits for a sampled and scored chunk. Returns None if there is no worker for `worker_wait_timeout_s`."""
        if session != self.session or key not in self.tasks:
            raise Failure(
                f"chunk {key} (update, rank, number) was not requested: the actor that hands out rollouts was restarted"
            )
        task = self.tasks[key]
        while not task.result.done():
            if self.broken:
                raise self.broken
            impatient = 0 <= self.config.worker_wait_timeout_s <= time.monotonic() - self.alone_since
            if not self.present and impatient and task in self.waiting:
                self.waiting.remove(task)
                del self.tasks[key]
                return None
            await asyncio.wait({task.result}, timeout=0.2)
        made = task.result.result()  # canceled if a new session has requested this key
        del self.tasks[key]
        self.bytes += len(task.chunk) + len(made)
        return made

    async def metrics(self) -> dict[str, float]:
        """Returns, since the last call: ready workers, the idle share of their time, waiting chunks, bytes, lost workers."""
        now, ready = time.monotonic(), len(self.ready)
        busy = self.busy + sum(now - max(begin, self.measured) for begin in self.begun.values())
        metrics = {
            "rollout/workers": float(ready),
            "rollout/idle": max(0.0, 1 - busy / max((now - self.measured) * max(1, ready), 1e-9)),
            "rollout/queue": float(len(self.waiting)),
            "rollout/bytes": float(self.bytes),
            "rollout/lost_workers": float(self.lost),
        }
        self.measured, self.bytes, self.busy = now, 0, 0.0
        return metrics

    # ------------------------------------------------------------------------------------------- workers

    async def _keep(self, number: int) -> None:
        """Has a worker sample one chunk after another, until the run ends."""
        worker, first = self._start(), True
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.broken)
            try:
                await self._answer(worker, worker.placed.remote(), None)
                if first:
                    self.present.add(number)
                first = False
                settings = await self._load(worker)
                self.present.add(number)
                self.ready.add(number)
                fetched: set[tuple[str, int]] = set()  # versions that the worker has
                while True:
                    await self._do(number, worker, await self._next(worker, settings), settings, fetched)
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
        """Returns the request of one worker."""
        assert self.work.places.rollout
        return self.work.places.rollout.each

    def _start(self) -> Any:
        options = self._each().options()
        return ray.remote(RolloutWorker).options(max_restarts=-1, **options).remote(self.work)

    async def _load(self, worker: Any) -> NumericSettings:
        """Returns the trainers' settings after a worker has loaded its models and applied them."""
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
        except FINAL:  # the next attempt begins with an empty process
            _restart(worker)
            raise
        return settings

    async def _report_unplaced(self) -> None:
        """Reports once how many workers wait for resources, if some still do after a while."""
        await asyncio.sleep(placement.REPORT_INTERVAL_S)
        if missing := self.config.num_workers - len(self.present):
            need = self._each()
            with contextlib.suppress(Exception):  # the head is busy
                there = await asyncio.to_thread(placement.describe_cluster)
                terminal.say(f"rollout workers that wait for resources: {missing}, {need} each; {there}")

    async def _next(self, worker: Any, settings: NumericSettings) -> Task:
        """Waits for the next chunk whose version is published. Raises WorkerLost if the trainers have other settings."""
        async with self.changed:
            while True:
                if settings != self.settings:
                    _restart(worker)
                    raise WorkerLost("was set up for earlier trainers, on other machines")
                ready = [task for task in self.waiting if task.version in self.versions]
                if ready:
                    task = min(ready, key=lambda task: task.key)
                    self.waiting.remove(task)
                    return task
                await self.changed.wait()

    async def _do(
        self,
        number: int,
        worker: Any,
        task: Task,
        settings: NumericSettings,
        fetched: set[tuple[str, int]],
    ) -> None:
        """Has a worker sample a chunk. If the worker is lost, gives the chunk back and raises WorkerLost."""
        tensors, size = self.versions[task.version]
        if (task.session, task.version) not in fetched:
            fetched.add((task.session, task.version))
            self.bytes += size
        task.attempts += 1
        self.begun[number] = time.monotonic()
        try:
            answer = worker.sample.remote(settings, task.session, task.chunk, tensors)
            made = await self._answer(worker, answer, self.config.chunk_timeout_s)
        except FINAL as error:  # the worker continues after an error of a reward, or after memory ran out
            if not task.result.done():
                task.result.set_exception(error)
            return
        except WorkerLost as error:
            if getattr(error.__cause__, "preempted", False):
                task.attempts -= 1  # the node caused this, not the chunk
            await self._give_back(task, error)
            raise
        finally:
            self.busy += time.monotonic() - max(self.begun.pop(number), self.measured)
        if made is None:  # a trainer died with the version, so this session also ends
            task.attempts -= 1
            await asyncio.sleep(RETRY_PAUSE_S)
            await self._give_back(task)
        elif not task.result.done():
            task.result.set_result(made)

    async def _give_back(self, task: Task, error: WorkerLost | None = None) -> None:
        """Requeues a chunk, unless its session is over, or it has lost MAX_ATTEMPTS workers."""
        if task.session != self.session:
            return
        if task.attempts < MAX_ATTEMPTS:
            self.waiting.append(task)
            await self._notify()
            return
        task.result.set_exception(
            Failure(
                f"chunk {task.key} (update, rank, number) lost {task.attempts} rollout workers, one after the other; "
                f"the last one {error}"
            )
        )

    async def _answer(self, worker: Any, answer: Any, limit: float | None) -> Any:
        """Returns the result of a call. Raises FINAL errors unchanged, and WorkerLost if Ray restarts the worker."""
        waited = asyncio.wrap_future(answer.future())
        waited.add_done_callback(lambda one: one.cancelled() or one.exception())  # it may come too late
        await asyncio.wait({waited}, timeout=limit)
        if not waited.done():
            _restart(worker)
            raise WorkerLost(f"has not answered for {limit:g} s (rollout.chunk_timeout_s)")
        try:
            return waited.result()
        except RayTaskError as error:
            if isinstance(error.cause, FINAL):
                raise error.cause from None
            print(error, flush=True)
            _restart(worker)
            raise WorkerLost(f"failed: {in_brief(error.cause, 300)}") from error
        except ActorDiedError as error:  # its constructor failed, so Ray does not restart it
            raise Failure(f"a rollout worker cannot start ({in_brief(error, 300)})") from error
        except RayActorError as error:
            raise WorkerLost("is gone: its process or its node died") from error

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def _restart(worker: Any) -> None:
    """Has Ray end a worker's process and start another one."""
    with contextlib.suppress(RayError):
        ray.kill(worker, no_restart=False)


@contextlib.contextmanager
def rollout_pool(work: Work) -> Iterator[Any]:
    """Starts the pool of a run for the block."""
    # on the driver's node, so that the loss of other nodes does not end it
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000, scheduling_strategy=here)(Pool)
    pool = actor.remote(work)
    try:
        yield pool
    finally:
        ray.kill(pool)  # the pool's workers end with it, because it owns them
