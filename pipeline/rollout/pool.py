"""The pool: an actor that starts rollout workers, hands out chunks, and replaces lost workers.

The next free worker takes the chunk of the earliest update. If a worker dies, misses its heartbeat or takes too long, its
chunk goes back to the queue, and a new worker starts in its place on any node with resources. Every worker computes
bit-identical chunks, so training does not depend on any of this.

Trainers take precedence. While they wait for resources, no rollout worker starts, and those that block a trainer leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import Failure, InputError, OutOfMemory, SelfCheckFailed, in_brief
from pipeline.on_ray import placement
from pipeline.rollout.worker import HEARTBEAT_GROUP, NumericSettings, RolloutWorker
from pipeline.runtime.host import Work
from pipeline.system import terminal

HEARTBEAT_INTERVAL_S = 2.0  # time between two heartbeats of a busy worker
MAX_ATTEMPTS = 5  # workers that a chunk may lose before it counts as the cause
MAX_LOAD_FAILURES = 3  # consecutive failures of one slot's workers to load
LOAD_TIMEOUT_S = 3600.0  # time to load the models, or rollout.chunk_timeout_s if that is longer
MAX_PAUSE_S = 60.0  # longest pause before a worker that could not load is started again
TRAINER_WAIT_S = 10.0  # time that trainers wait for resources before rollout workers leave
YIELDS_TO_TRAINER = "makes room for a trainer"
# Their messages are complete, and every worker would raise them again.
FINAL = (InputError, Failure, OutOfMemory, SelfCheckFailed)

# A chunk's update, rank and number, as in ppo/sampler.py, which this process does not import because of torch.
Key = tuple[int, int, int]


class WorkerLost(Exception):
    """A worker stopped working. The message says why."""


@dataclass(eq=False)
class Task:
    """A chunk that a trainer requested."""

    session: str
    key: Key
    version: int
    chunk: bytes  # pickled
    result: asyncio.Future
    attempts: int = 0


@dataclass(eq=False)
class Slot:
    """A worker, from its start until it is lost."""

    number: int
    worker: Any = None  # the actor
    node: str | None = None  # where it is, once it has resources
    reported: bool = False  # a line has counted it among the workers that wait for resources
    settings: NumericSettings | None = None  # that it computes with
    ready: bool = False  # whether it has loaded
    # Ready, or loading for the first time; patience runs out only while no worker is present
    present: bool = False
    leaving: bool = False  # makes room for a trainer
    has: set[tuple[str, int]] = field(default_factory=set)  # versions that it has fetched


@dataclass
class Assignment:
    """A chunk that a worker samples, with times of this process's time.monotonic()."""

    begin: float
    end: float | None = None  # when it finished


class Pool:
    """The actor. Each call of a trainer names its session, one attempt of the group of trainers.

    Args:
        work: the run's work (runtime/host.py).
    """

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.job.rollout_config
        self.session = ""
        self.settings: NumericSettings | None = None  # of the session's trainers
        self.tasks: dict[Key, Task] = {}
        self.waiting: list[Task] = []
        self.versions: dict[int, tuple[list[Any], int]] = {}  # version -> ([reference], bytes)
        self.slots = [Slot(number) for number in range(self.config.workers[1])]
        self.failures = [0] * len(self.slots)  # consecutive failures of each slot's workers to load
        self.alone_since = time.monotonic()  # when a worker was last lost
        self.displaced_since: float | None = None  # when the trainers began to wait for resources
        self.broken: BaseException | None = None
        self.measured, self.bytes, self.lost = time.monotonic(), 0, 0
        self.assignments: list[Assignment] = []  # that have not ended before `measured`
        self.running: list[asyncio.Future] = []
        self.changed = asyncio.Condition()
        self.printed: set[str] = set()  # errors whose traceback was printed

    async def start(self) -> None:
        """Starts the workers, once."""
        if self.running:
            return
        terminal.mark_lines()
        print(":actor_name:rollout", flush=True)  # Ray's marker: log lines start with `(rollout pid=...)`
        print(f"starting rollout workers: {len(self.slots)}", flush=True)
        self.alone_since = time.monotonic()
        self.running = [asyncio.ensure_future(self._keep(slot.number)) for slot in self.slots]

    async def trainers_wait(self) -> None:
        """Notes that the trainers wait for resources. After TRAINER_WAIT_S, workers leave the nodes that could hold a trainer."""
        if self.displaced_since is not None:
            return
        since = self.displaced_since = time.monotonic()
        await self._notify()
        await asyncio.sleep(TRAINER_WAIT_S)
        while self.displaced_since == since:
            try:
                await self._yield_to_trainers()
            except Exception as error:  # the head is busy: the next turn asks again
                print(f"cannot read the cluster's nodes ({in_brief(error, 200)})", flush=True)
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def trainers_placed(self) -> None:
        self.displaced_since, self.alone_since = None, time.monotonic()  # no worker could start meanwhile
        await self._notify()

    # ------------------------------------------------------------------------------------------ trainers

    async def begin(self, session: str, settings: NumericSettings) -> None:
        """Begins the session of a new group of trainers. Drops the requests of earlier ones."""
        await self.start()  # this actor may be new, too
        for task in self.tasks.values():  # the trainer that waits for it has ended
            task.result.cancel()
        if self.broken and self.session:  # this attempt may find other nodes
            self.broken, self.failures = None, [0] * len(self.slots)
        self.session, self.settings = session, settings
        self.tasks, self.versions, self.waiting = {}, {}, []
        self.alone_since = time.monotonic()  # the trainers did not wait meanwhile
        await self._notify()

    async def publish(self, session: str, version: int, tensors: list[Any], size: int) -> None:
        """Takes a version of the policy, as a reference in a list, and its bytes."""
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
        """Waits until a chunk is sampled and scored. If no worker is there for `patience_s`, withdraws it and returns None."""
        if session != self.session or key not in self.tasks:
            raise Failure(
                f"chunk {key} (update, rank, number) was not requested: the actor that hands out rollouts was restarted"
            )
        task = self.tasks[key]
        while not task.result.done():
            if self.broken:
                raise self.broken
            alone = not any(slot.present for slot in self.slots)
            impatient = 0 <= self.config.patience_s <= time.monotonic() - self.alone_since
            if alone and impatient and task in self.waiting:
                self.waiting.remove(task)
                del self.tasks[key]
                return None
            await asyncio.wait({task.result}, timeout=0.2)
        made = task.result.result()  # cancelled if a new session has requested this key
        del self.tasks[key]
        self.bytes += len(task.chunk) + len(made)
        return made

    async def metrics(self) -> dict[str, float]:
        """Returns, since the last call: ready workers, the idle share of their time, waiting chunks, bytes, lost workers."""
        now, ready = time.monotonic(), sum(slot.ready for slot in self.slots)
        busy = sum((one.end or now) - max(one.begin, self.measured) for one in self.assignments)
        figures = {
            "rollout/workers": float(ready),
            "rollout/idle": max(0.0, 1 - busy / max((now - self.measured) * max(1, ready), 1e-9)),
            "rollout/queue": float(len(self.waiting)),
            "rollout/bytes": float(self.bytes),
            "rollout/lost_workers": float(self.lost),
        }
        self.assignments = [one for one in self.assignments if one.end is None]
        self.measured, self.bytes = now, 0
        return figures

    # ------------------------------------------------------------------------------------------- workers

    async def _keep(self, number: int) -> None:
        """Keeps a worker in the slot until the run ends."""
        pause = 1.0
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: self.displaced_since is None and not self.broken)
            slot = self.slots[number] = Slot(number)
            loaded = False
            try:
                await self._load(slot)
                loaded, pause = True, 1.0
                while True:
                    await self._do(slot, await self._next(slot))
            except WorkerLost as error:
                self.lost += loaded
                self.failures[number] += not loaded and not slot.leaving
                raised = isinstance(error.__cause__, RayTaskError)
                # Compared without the traceback, which names the process
                if raised and str(error) not in self.printed:
                    self.printed.add(str(error))
                    print(error.__cause__, flush=True)
                # A slot whose worker waits for resources has no failure: it may still load.
                if raised and self.failures[number] >= MAX_LOAD_FAILURES and all(self.failures):
                    self.broken = Failure(f"rollout workers cannot load their models: one {error}")
                else:
                    why = YIELDS_TO_TRAINER if slot.leaving else error
                    terminal.say(f"rollout worker {number} {why}; another worker takes its place")
            except FINAL as error:  # the worker raised it while it loaded
                self.failures[number] += 1
                if all(self.failures):
                    self.broken = error
                elif self.failures[number] == 1:  # this node alone may have too little memory, or lack a file
                    terminal.say(f"rollout worker {number} cannot load its models, and tries again: {error}")
            except Exception as error:  # a bug of this file, which would show again
                self.broken = error
            finally:
                if slot.worker:
                    with contextlib.suppress(RayError):
                        ray.kill(slot.worker)
                if slot.present:
                    self.alone_since = time.monotonic()
                self.slots[number] = Slot(number)
            if not loaded:
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_S)

    async def _load(self, slot: Slot) -> None:
        """Starts the slot's worker. Returns once it has its models and the trainers' settings."""
        limit = max(LOAD_TIMEOUT_S, self.config.chunk_timeout_s)
        slot.worker = worker = self._start()
        slot.node = await self._placed(slot)
        # Patience does not run out during a first load, but does if loads keep failing.
        slot.present = not self.failures[slot.number]
        await self._answer(worker, worker.load.remote(), limit)
        async with self.changed:
            await self.changed.wait_for(lambda: self.settings is not None)
        slot.settings = self.settings
        await self._answer(worker, worker.apply_settings.remote(slot.settings), limit)
        slot.ready, slot.present, self.failures[slot.number] = True, True, 0

    def _start(self) -> Any:
        options = placement.rollout_bundle(self.work.job).options()
        actor = ray.remote(concurrency_groups={HEARTBEAT_GROUP: 2})(RolloutWorker)
        return actor.options(max_restarts=0, **options).remote(self.work)

    async def _placed(self, slot: Slot) -> str:
        """Returns the node on which Ray placed a worker. Raises WorkerLost if the trainers wait, too."""
        placed, report_at = _future(slot.worker.node.remote()), time.monotonic() + placement.REPORT_INTERVAL_S
        while not placed.done():
            if self.displaced_since is not None:  # else the worker takes resources that the trainers need
                slot.leaving = True
                raise WorkerLost(YIELDS_TO_TRAINER)
            if not slot.reported and time.monotonic() > report_at:
                waiting = [one for one in self.slots if one.worker and one.node is None]
                for one in waiting:  # once, because of [min, max] workers some may never find resources
                    one.reported = True
                need = placement.rollout_bundle(self.work.job)
                with contextlib.suppress(Exception):  # the head is busy
                    there = await asyncio.to_thread(placement.describe_cluster)
                    terminal.say(
                        f"rollout workers that wait for resources: {len(waiting)}, {need} each; {there}"
                    )
            await asyncio.wait({placed}, timeout=0.2)
        return await _result_of(placed)

    async def _next(self, slot: Slot) -> Task:
        """Waits for the next chunk whose version is published. Raises WorkerLost if the slot's worker must leave."""
        async with self.changed:
            while True:
                if slot.leaving:
                    raise WorkerLost(YIELDS_TO_TRAINER)
                if slot.settings != self.settings:
                    raise WorkerLost("was set up for earlier trainers, on other machines")
                ready = [task for task in self.waiting if task.version in self.versions]
                if ready:
                    task = min(ready, key=lambda task: task.key)
                    self.waiting.remove(task)
                    return task
                await self.changed.wait()

    async def _do(self, slot: Slot, task: Task) -> None:
        """Has a worker sample a chunk. If the worker is lost, gives the chunk back and raises WorkerLost."""
        worker, (tensors, size) = slot.worker, self.versions[task.version]
        if (task.session, task.version) not in slot.has:
            slot.has.add((task.session, task.version))
            self.bytes += size
        assignment = Assignment(time.monotonic())
        try:
            await self._check_heartbeat(worker)  # if it is lost before it begins, the chunk is not to blame
            task.attempts += 1
            self.assignments.append(assignment)
            answer = worker.sample.remote(task.session, task.chunk, tensors)
            made = await self._answer(worker, answer, self.config.chunk_timeout_s)
        except FINAL as error:  # the worker continues: a reward raised it, or memory ran out
            if not task.result.done():
                task.result.set_exception(error)
            return
        except WorkerLost as error:
            if slot.leaving or getattr(error.__cause__, "preempted", False):
                task.attempts -= 1  # the node is to blame, not the chunk
            await self._give_back(task, error)
            raise
        finally:
            assignment.end = time.monotonic()
        if made is None:  # a trainer died with the version, so this session ends, too
            task.attempts -= 1
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
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

    async def _answer(self, worker: Any, answer: Any, limit: float) -> Any:
        """Returns the result of a call. Raises WorkerLost if the worker dies, misses its heartbeat, or takes over `limit` s."""
        waited, begun = _future(answer), time.monotonic()
        while True:
            await asyncio.wait({waited}, timeout=HEARTBEAT_INTERVAL_S)
            if waited.done():
                return await _result_of(waited)
            if time.monotonic() - begun > limit:
                raise WorkerLost(f"has not answered for {limit:g} s (rollout.chunk_timeout_s)")
            await self._check_heartbeat(worker)

    async def _check_heartbeat(self, worker: Any) -> None:
        beat, limit = _future(worker.alive.remote()), self.config.heartbeat_timeout_s
        await asyncio.wait({beat}, timeout=limit)
        if not beat.done():
            raise WorkerLost(
                f"missed its heartbeat for {limit:g} s (rollout.heartbeat_timeout_s): the process is stopped, or Python code "
                "such as a reward function holds the GIL"
            )
        await _result_of(beat)

    async def _yield_to_trainers(self) -> None:
        """Ends the workers on nodes that could hold a trainer."""
        trainers = placement.bundles(self.work.job)
        could_hold = {
            node["NodeID"]
            for node in await asyncio.to_thread(ray.nodes)
            if any(one.fits(node["Resources"], node["Labels"]) for one in trainers)
        }
        if self.displaced_since is None:
            return
        for slot in self.slots:
            if slot.worker and slot.node in could_hold and not slot.leaving:
                slot.leaving = True
                ray.kill(slot.worker)
        await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def _future(answer: Any) -> asyncio.Future:
    """Returns the future of a call. Its error counts as seen, because the caller may stop waiting for it."""
    future = asyncio.wrap_future(answer.future())
    future.add_done_callback(lambda one: one.cancelled() or one.exception())
    return future


async def _result_of(waited: asyncio.Future) -> Any:
    """Returns the result of a call. Raises FINAL errors unchanged, and all others as WorkerLost."""
    try:
        return await waited
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, FINAL):
            raise cause from None
        raise WorkerLost(f"failed: {in_brief(cause, 300)}") from error
    except RayActorError as error:
        raise WorkerLost("is gone: its process or its node died") from error
    except RayError as error:
        raise WorkerLost(f"did not answer ({in_brief(error, 200)})") from error


@contextlib.contextmanager
def rollout_pool(work: Work) -> Iterator[Any]:
    """Starts the pool of a run for the block. Yields None if the job has no rollout workers."""
    high = work.job.rollout_config.workers[1]
    if not high:
        yield None
        return
    # On the driver's node, so that losing other nodes does not end it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000, scheduling_strategy=here)(Pool)
    pool = actor.remote(work)
    try:
        yield pool
    finally:
        ray.kill(pool)  # its workers end with it: it owns them
