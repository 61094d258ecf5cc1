"""Who samples which chunk: an actor that starts rollout workers, hands out chunks, and replaces workers that are lost.

A chunk is done by whoever is free, earliest update first. A worker that dies, stops answering, takes too long or whose node is
to be taken away gives its chunk back, and a new one is started in its place, wherever Ray finds room. As a chunk has the same
bits from every worker, nothing of this shows in what is learned.

Trainers go first: while they wait for their places, no rollout worker is started, and those that hold such a place leave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import Failure, InputError, OutOfMemory, SelfCheckFailed, in_brief
from pipeline.on_ray import placement
from pipeline.rollout.worker import SIGNS, RolloutWorker, Terms
from pipeline.runtime.host import Work

SIGN_EVERY = 2.0  # seconds between two signs of life of a worker that is at work
MOST_ATTEMPTS = 5  # a chunk that loses so many workers will lose the next one, too
MOST_FAILURES = 3  # of one slot's workers to load, one after the other
LONGEST_LOAD = 3600.0  # seconds to load the models, or rollout.chunk_timeout_s where that is more
LONGEST_PAUSE = 60.0  # seconds before a worker that could not load is started again
GRACE = 10.0  # seconds for which trainers wait before a rollout worker makes room, and then before the next one does
LONGEST_SILENCE = 1800.0  # seconds between two lines about what is waited for
MAKES_ROOM = "makes room for a trainer"
OTHER_TERMS = "was set up for earlier trainers, on other machines"
# They speak for themselves, and would come again from every worker.
FINAL = (InputError, Failure, OutOfMemory, SelfCheckFailed)

# Of a chunk: update, rank, number (ppo/chunks.py, which imports torch: this process needs none).
Key = tuple[int, int, int]


class Lost(Exception):
    """A worker that does no more work, and why."""


@dataclass(eq=False)
class Task:
    """A chunk that a trainer asked for."""

    session: str
    key: Key
    version: int
    chunk: bytes  # pickled
    result: asyncio.Future
    attempts: int = 0


@dataclass
class Slot:
    """A place for one worker, which a new one takes when it is lost."""

    number: int
    node: str | None = None  # of its worker; None: it has none
    ready: bool = False  # its worker has loaded
    failures: int = 0  # of its workers to load, one after the other
    present: bool = False  # ready, or loading for the first time: patience begins when no slot is
    worker: Any = None  # the actor
    leaving: str | None = None  # why its worker gets no further chunk
    waits_since: float | None = None  # its worker, for a place
    has: set[tuple[str, int]] = field(default_factory=set)  # versions that its worker has fetched


@dataclass
class Turn:
    """A worker's turn at a chunk, in seconds of this process's time.monotonic()."""

    slot: int
    update: int  # of the chunk, from 0
    begin: float
    end: float | None = None  # None: it is not over
    lost: bool = False  # the worker was


@dataclass(frozen=True)
class Silence:
    """Between two lines about what is waited for: it gets longer, as with [min, max] places may be missing for good."""

    since: float
    lasts: float = placement.REPORT_INTERVAL_S


class Pool:
    """The actor. Calls of the trainers name the session that they belong to: one attempt of the group of trainers.

    Args:
        work: of the run.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.config = work, work.job.rollout_config
        self.session = ""
        self.tasks: dict[Key, Task] = {}
        self.waiting: list[Task] = []
        self.versions: dict[int, tuple[list[Any], int]] = {}  # version -> ([reference], bytes)
        self.slots = [Slot(number) for number in range(self.config.workers[1])]
        self.alone_since: float | None = time.monotonic()  # when the last worker was lost
        self.displaced_since: float | None = None  # the trainers wait for their places
        self.silence = Silence(time.monotonic())
        self.broken: BaseException | None = None
        self.measured, self.bytes, self.lost = time.monotonic(), 0, 0
        self.turns: list[Turn] = []  # those that did not end before `measured`
        self.running: list[asyncio.Future] = []
        self.keeping: dict[int, asyncio.Future] = {}  # of each slot
        self.said: set[str] = set()  # tracebacks

    async def start(self) -> None:
        """Starts the workers, once."""
        if not self.running:
            print(":actor_name:rollout", flush=True)  # Ray's marker: log lines start with `(rollout pid=...)`
            self.alone_since = time.monotonic()
            print(f"starting {len(self.slots)} rollout worker{'s' * (len(self.slots) > 1)}", flush=True)
            self.changed = asyncio.Condition()
            self.terms: asyncio.Future[Terms] = asyncio.get_running_loop().create_future()
            self._keep_all()
            looks = {
                self._look_at_nodes: "which nodes go away",
                self._look_at_places: "which places there are",
            }
            self.running = [asyncio.ensure_future(self._repeat(look, what)) for look, what in looks.items()]

    async def trainers_wait(self) -> None:
        """The trainers have no places, or not yet: they are started, or started again."""
        if self.displaced_since is None:
            self.displaced_since = time.monotonic()
            if self.running:
                await self._notify()

    async def trainers_placed(self) -> None:
        """The trainers have their places."""
        self.displaced_since = None
        if self.alone_since is not None:  # none could be started meanwhile
            self.alone_since = time.monotonic()
        if self.running:
            await self._notify()

    # ------------------------------------------------------------------------------------------ trainers

    async def begin(self, session: str, terms: Terms) -> None:
        """A new group of trainers: what an earlier one asked for is of no use any more."""
        await self.start()  # this actor may be a new one, too
        for task in self.tasks.values():  # whoever still waits for it is gone
            task.result.cancel()
        again, self.session, self.tasks, self.versions = bool(self.session), session, {}, {}
        self.waiting.clear()
        if self.alone_since is not None:  # trainers that were away waited for nobody
            self.alone_since = time.monotonic()
        if self.broken and again:  # this attempt may find other nodes
            self.broken = None
            for slot in self.slots:
                slot.failures = 0
            self._keep_all()
        if not self.terms.done():
            self.terms.set_result(terms)
        elif self.terms.result() != terms:
            self.terms = asyncio.get_running_loop().create_future()
            self.terms.set_result(terms)
            for slot in self.slots:
                slot.leaving = slot.leaving or (OTHER_TERMS if slot.ready else None)
            await self._notify()

    async def publish(self, session: str, version: int, tensors: list[Any], size: int) -> None:
        """A version of the policy, as a reference in a list, and its bytes."""
        if session == self.session:
            self.versions[version] = (tensors, size)
            for old in [v for v in self.versions if v < version - self.config.staleness]:
                del self.versions[old]
            await self._notify()

    async def request(self, session: str, chunks: list[tuple[Key, int, bytes]]) -> None:
        """Chunks to be done: key, version and the chunk, pickled."""
        if session == self.session:
            for key, version, chunk in chunks:
                result = asyncio.get_running_loop().create_future()
                self.tasks[key] = task = Task(session, key, version, chunk, result)
                self.waiting.append(task)
            await self._notify()

    async def collect(self, session: str, key: Key) -> bytes | None:
        """A chunk, sampled and scored, as soon as it is; None: there has been no worker for `patience_s`, and it is withdrawn.

        Raises:
            Failure: when a worker raised it, or lost workers are the chunk's own doing.
        """
        if session != self.session or key not in self.tasks:
            raise Failure(
                f"nobody asked for chunk {key} (update, rank, number): what hands out rollouts was restarted"
            )
        task, patience = self.tasks[key], self.config.patience_s
        while not task.result.done():
            if self.broken:
                raise self.broken
            if (
                patience >= 0
                and self.alone_since is not None
                and time.monotonic() - self.alone_since >= patience
                and task in self.waiting
            ):
                self.waiting.remove(task)
                del self.tasks[key]
                return None
            await asyncio.wait({task.result}, timeout=0.2)
        made = task.result.result()  # cancelled where a new session has begun, whose task now has this key
        del self.tasks[key]
        self.bytes += len(task.chunk) + len(made)
        return made

    async def metrics(self) -> tuple[dict[str, float], list[Turn], float]:
        """Since the last call: workers at work, the share of their time that was idle, chunks waiting, bytes, lost workers.

        Returns:
            Them, the turns that were not over before the last call, and what this process's clock shows.
        """
        now, ready = time.monotonic(), [slot for slot in self.slots if slot.ready]
        busy = sum((turn.end or now) - max(turn.begin, self.measured) for turn in self.turns)
        there = max((now - self.measured) * max(1, len(ready)), 1e-9)
        figures = {
            "rollout/workers": float(len(ready)),
            "rollout/idle": max(0.0, 1 - busy / there),
            "rollout/queue": float(len(self.waiting)),
            "rollout/bytes": float(self.bytes),
            "rollout/lost_workers": float(self.lost),
        }
        turns, self.turns = self.turns, [turn for turn in self.turns if turn.end is None]
        self.measured, self.bytes = now, 0
        return figures, turns, now

    # ------------------------------------------------------------------------------------------- workers

    def _keep_all(self) -> None:
        for slot in self.slots:
            if slot.number not in self.keeping or self.keeping[slot.number].done():
                self.keeping[slot.number] = asyncio.ensure_future(self._keep(slot))

    async def _keep(self, slot: Slot) -> None:
        """Keeps a worker in the slot until the pool ends."""
        pause, longest = 1.0, max(LONGEST_LOAD, self.config.chunk_timeout_s)
        while not self.broken:
            there = False
            async with self.changed:
                await self.changed.wait_for(lambda: self.displaced_since is None)
            try:
                slot.worker = worker = self._start()
                slot.node = await self._placed(slot, worker)
                # Patience does not run out while a first load takes long, but while one fails again and again.
                slot.present = not slot.failures
                self._count()
                await self._answer(worker, worker.load.remote(), longest, "been loading for")
                terms = await asyncio.shield(self.terms)
                await self._answer(worker, worker.settle.remote(terms), longest, "been loading for")
                if self.terms.result() != terms:
                    slot.leaving = OTHER_TERMS
                    raise Lost(OTHER_TERMS)
                there, slot.ready, slot.present, pause, slot.failures = True, True, True, 1.0, 0
                self._count()
                while True:
                    await self._do(slot, worker, await self._next(slot))
            except Lost as error:
                self.lost += there
                slot.failures += not there and not slot.leaving
                raised = isinstance(error.__cause__, RayTaskError)
                if (
                    raised and str(error) not in self.said
                ):  # once: a traceback names another process each time
                    self.said.add(str(error))
                    print(error.__cause__, flush=True)
                if raised and slot.failures >= MOST_FAILURES and self._nothing_loads():
                    self.broken = Failure(f"rollout workers cannot load their models: one {error}")
                else:
                    why = slot.leaving or error
                    print(f"rollout worker {slot.number} {why}; another one takes its place", flush=True)
            except FINAL as error:  # as it loaded
                slot.failures += 1
                if self._nothing_loads():
                    self.broken = error
                elif slot.failures == 1:  # this node alone may have too little memory, or lack a file
                    print(
                        f"rollout worker {slot.number} cannot load its models, and tries again: {error}",
                        flush=True,
                    )
            except Exception as error:  # a mistake here, which would come again
                self.broken = error
            finally:
                if slot.worker:
                    with contextlib.suppress(RayError):
                        ray.kill(slot.worker)
                slot.worker, slot.node, slot.ready, slot.present = None, None, False, False
                slot.leaving, slot.waits_since, slot.has = None, None, set()
                self._count()
            if not there:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _nothing_loads(self) -> bool:
        """Whether no slot's worker has loaded since one of its own failed to; one that has no place yet may be well."""
        return all(slot.failures for slot in self.slots)

    def _start(self) -> Any:
        options = placement.rollout_bundle(self.work.job).options()
        actor = ray.remote(concurrency_groups={SIGNS: 2})(RolloutWorker)
        return actor.options(max_restarts=0, **options).remote(self.work)

    async def _placed(self, slot: Slot, worker: Any) -> str:
        """The node that Ray has found for a worker. Raises Lost when it is to wait behind the trainers."""
        slot.waits_since = time.monotonic()
        placed = asyncio.wrap_future(worker.node.remote().future())
        with _ended(placed):
            while not placed.done():
                if self.displaced_since is not None:  # else it takes the place that a trainer has just left
                    slot.leaving = MAKES_ROOM
                    raise Lost(slot.leaving)
                await asyncio.wait({placed}, timeout=0.2)
            slot.waits_since = None
            return await _of(placed)

    async def _next(self, slot: Slot) -> Task:
        """The next chunk whose version is published. Raises Lost when the slot's worker is to leave."""
        async with self.changed:
            while True:
                if slot.leaving:
                    raise Lost(slot.leaving)
                ready = [task for task in self.waiting if task.version in self.versions]
                if ready:
                    task = min(ready, key=lambda task: task.key)
                    self.waiting.remove(task)
                    return task
                await self.changed.wait()

    async def _do(self, slot: Slot, worker: Any, task: Task) -> None:
        """Has a worker do a chunk. Raises Lost when it does not; the chunk is then for the next one."""
        tensors, size = self.versions[task.version]
        if (task.session, task.version) not in slot.has:
            slot.has.add((task.session, task.version))
            self.bytes += size
        try:
            await self._sign(worker)
        except Lost:  # before it has begun: that is not the chunk's doing
            await self._wait_again(task)
            raise
        task.attempts += 1
        turn = Turn(slot.number, task.key[0], time.monotonic())
        self.turns.append(turn)
        try:
            answer = worker.sample.remote(task.session, task.chunk, tensors)
            made = await self._answer(worker, answer, self.config.chunk_timeout_s)
        except FINAL as error:  # the worker is well: a reward raised it, or there is too little memory
            if not task.result.done():
                task.result.set_exception(error)
            return
        except Lost as error:
            turn.lost = True
            if slot.leaving or getattr(error.__cause__, "preempted", False):
                task.attempts -= 1  # its node's doing, not the chunk's
            await self._give_back(task, error)
            raise
        finally:
            turn.end = time.monotonic()
        if made is None:  # its version is gone with a trainer, and so will be this session
            task.attempts -= 1
            await asyncio.sleep(SIGN_EVERY)
            await self._wait_again(task)
        elif not task.result.done():
            task.result.set_result(made)

    async def _wait_again(self, task: Task) -> None:
        if task.session == self.session:
            self.waiting.append(task)
            await self._notify()

    async def _give_back(self, task: Task, error: Lost) -> None:
        if task.session != self.session or task.attempts < MOST_ATTEMPTS:
            await self._wait_again(task)
            return
        task.result.set_exception(
            Failure(
                f"chunk {task.key} (update, rank, number) lost {task.attempts} rollout workers, one after the other; "
                f"the last one {error}"
            )
        )

    async def _answer(self, worker: Any, answer: Any, limit: float, doing: str = "worked for") -> Any:
        """What a call returns. Raises Lost when its worker is gone, gives no sign of life, or takes more than `limit` seconds."""
        waited = asyncio.wrap_future(answer.future())
        begun = time.monotonic()
        with _ended(waited):
            while not waited.done():
                await asyncio.wait({waited}, timeout=SIGN_EVERY)
                if not waited.done():
                    if time.monotonic() - begun > limit:
                        raise Lost(f"has {doing} more than {limit:g} s (rollout.chunk_timeout_s)")
                    await self._sign(worker)
            return await _of(waited)

    async def _sign(self, worker: Any) -> None:
        sign, limit = asyncio.wrap_future(worker.alive.remote().future()), self.config.heartbeat_timeout_s
        with _ended(sign):
            await asyncio.wait({sign}, timeout=limit)
            if not sign.done():
                raise Lost(
                    f"has given no sign of life for {limit:g} s (rollout.heartbeat_timeout_s): its process is stopped, or code in "
                    "it, a Python reward for one, does not let go of the interpreter"
                )
            await _of(sign)

    async def _repeat(self, look: Callable[[], Awaitable[None]], what: str) -> None:
        while True:
            await asyncio.sleep(SIGN_EVERY)
            try:
                await look()
            except Exception as error:  # the head is busy: it is asked again
                print(f"{what} is not known ({in_brief(error, 200)})", flush=True)

    async def _look_at_nodes(self) -> None:
        """Workers on a node that is to be taken away get no further chunk."""
        # As Ray Train asks (2.60, private). Remove when there is a public way.
        from ray._private.state import state

        going = await asyncio.to_thread(state.get_draining_nodes)
        for slot in self.slots:
            if slot.node in going:
                slot.leaving = slot.leaving or "leaves a node that is being reclaimed"
        await self._notify()

    async def _look_at_places(self) -> None:
        """Workers make room for trainers that find no place, one after another; what workers wait for is printed."""
        now = time.monotonic()
        if self.displaced_since is not None and now - self.displaced_since >= GRACE:
            self.displaced_since = now
            slot = await self._in_the_way()
            if slot and self.displaced_since is not None:
                slot.leaving = MAKES_ROOM
                ray.kill(slot.worker)
                await self._notify()
        waits = [now - slot.waits_since for slot in self.slots if slot.waits_since is not None]
        if not waits:
            self.silence = Silence(now)
        elif now - self.silence.since >= self.silence.lasts:
            self.silence = Silence(now, min(2 * self.silence.lasts, LONGEST_SILENCE))
            need = placement.rollout_bundle(self.work.job)
            there = await asyncio.to_thread(placement.describe_cluster)
            print(
                f"waiting for places for {len(waits)} of {len(self.slots)} rollout workers, {need} each, "
                f"{max(waits):.0f} s so far; {there}",
                flush=True,
            )

    async def _in_the_way(self) -> Slot | None:
        """A slot whose worker is on a node that could hold a trainer; those of one node one after another."""
        nodes = {node["NodeID"]: node for node in await asyncio.to_thread(ray.nodes)}
        trainers = placement.bundles(self.work.job)

        def holds_a_trainer(name: str) -> bool:
            node = nodes.get(name)
            return bool(node and any(one.fits(node["Resources"], node["Labels"]) for one in trainers))

        held = [slot for slot in self.slots if slot.worker and slot.node and not slot.leaving]
        return min(
            (slot for slot in held if holds_a_trainer(str(slot.node))),
            key=lambda slot: (str(slot.node), slot.number),
            default=None,
        )

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _count(self) -> None:
        """Notes since when there is no worker."""
        if any(slot.present for slot in self.slots):
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = time.monotonic()


async def _of(waited: Awaitable[Any]) -> Any:
    """The result of a call; errors that speak for themselves as they are, all others as Lost."""
    try:
        return await waited
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, FINAL):
            raise cause from None
        raise Lost(f"failed: {in_brief(cause, 300)}") from error
    except RayActorError as error:
        raise Lost("is gone: its process or its node died") from error
    except RayError as error:
        raise Lost(f"did not answer ({in_brief(error, 200)})") from error


@contextlib.contextmanager
def _ended(waited: asyncio.Future) -> Iterator[None]:
    """After the block nobody waits for it any more, and what it raises later is of no interest."""
    try:
        yield
    finally:
        waited.add_done_callback(lambda one: one.cancelled() or one.exception())


@contextlib.contextmanager
def opened(work: Work) -> Iterator[Any]:
    """The pool of a run for the block; None where the job has no rollout workers."""
    high = work.job.rollout_config.workers[1]
    if not high:
        yield None
        return
    # It stays with the driver, whatever becomes of other nodes.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000, scheduling_strategy=here)(Pool)
    pool = actor.remote(work)
    try:
        yield pool
    finally:
        ray.kill(pool)  # its workers end with it: it owns them
