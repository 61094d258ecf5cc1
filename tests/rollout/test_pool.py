"""The pool's bookkeeping, without Ray's processes: what a new group of trainers finds, and what an old one leaves."""

import asyncio
import concurrent.futures
import functools
import pickle
from types import SimpleNamespace

import pytest
import ray

from pipeline.errors import Failure, OutOfMemory
from pipeline.ppo.config import RolloutConfig
from pipeline.rollout import pool as pools
from pipeline.rollout.pool import MAX_ATTEMPTS, Pool, WorkerLost
from pipeline.rollout.worker import RolloutWorker

KEY = (3, 0, 1)  # update, rank, number


def in_a_loop(test):
    @functools.wraps(test)
    def call(*args, **keys):
        asyncio.run(asyncio.wait_for(test(*args, **keys), 20))

    return call


def pool(num_workers=1, **config):
    """A pool that starts no worker."""
    settings = RolloutConfig(num_workers=num_workers, **config)
    one = Pool(SimpleNamespace(job=SimpleNamespace(rollout_config=settings)))
    one.running = [True]  # as if started
    return one


async def asked(one, session="a"):
    """The chunk of a new session's request, and the call that collects it."""
    await one.begin(session, "settings")
    await one.request(session, [(KEY, 3, b"chunk")])
    collecting = asyncio.ensure_future(one.collect(session, KEY))
    await asyncio.sleep(0)
    return one.tasks.get(KEY), collecting


def answers(result=None):
    """A method of an actor that answers so: None: never; an error: raises it."""

    def remote(*_):
        answer = concurrent.futures.Future()
        if isinstance(result, Exception):
            answer.set_exception(result)
        elif result is not None:
            answer.set_result(result)
        return SimpleNamespace(future=lambda: answer)

    return SimpleNamespace(remote=remote)


def worker(**methods):
    methods = {"node": "node", "load": True, "apply_settings": True, "alive": True, **methods}
    return SimpleNamespace(**{name: answers(result) for name, result in methods.items()})


@pytest.fixture
def quick(monkeypatch):
    """Nothing is waited for long. Returns the list of killed workers."""
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(pools, "HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(pools, "MAX_PAUSE_S", 0.01)
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(min(seconds, 0.01)))
    return killed


# ------------------------------------------------------------------------------------------------ trainers


@in_a_loop
async def test_whoever_waited_for_a_chunk_of_an_earlier_session_leaves_that_of_the_new_one_alone():
    one = pool()
    old, orphan = await asked(one, "a")
    new, waiting = await asked(one, "b")
    with pytest.raises(asyncio.CancelledError):
        await orphan
    assert old.result.cancelled() and one.tasks == {KEY: new} and one.waiting == [new]
    new.result.set_result(b"sampled")
    assert await waiting == b"sampled" and one.tasks == {}
    for session in ("b", "earlier"):
        with pytest.raises(Failure, match=r"chunk \(3, 0, 1\) .* was not requested.*restarted"):
            await one.collect(session, KEY)


@in_a_loop
async def test_patience_ends_only_where_no_worker_is_there():
    one = pool(patience_s=0)
    _, waiting = await asked(one)
    assert await waiting is None and one.waiting == [] and one.tasks == {}
    one.slots[0].present = True  # one that loads for the first time
    _, waiting = await asked(one, "b")
    assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
    waiting.cancel()


@in_a_loop
async def test_trainers_that_were_away_begin_to_wait_anew():
    one = pool(patience_s=100)
    one.alone_since -= 1000
    await one.trainers_placed()
    _, waiting = await asked(one)
    assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
    waiting.cancel()


@in_a_loop
async def test_what_breaks_before_the_first_trainers_come_is_said_to_them():
    one = pool()
    one.broken = Failure("no such module")
    _, waiting = await asked(one)
    with pytest.raises(Failure, match="no such module"):
        await waiting


# ------------------------------------------------------------------------------------------- lost workers


@pytest.mark.parametrize(("leaving", "preempted"), [(False, False), (True, False), (False, True)])
@in_a_loop
async def test_a_chunk_that_loses_worker_after_worker_ends_the_run(leaving, preempted, quick):
    """... unless the nodes are to blame."""
    one = pool()
    task, waiting = await asked(one)
    one.versions[3] = ([None], 8)
    slot = one.slots[0]
    slot.worker, slot.leaving = worker(sample=ray.exceptions.RayActorError(preempted=preempted)), leaving
    for lost in range(1, MAX_ATTEMPTS + 1):
        assert one.waiting == [task]
        one.waiting.clear()
        with pytest.raises(WorkerLost, match="is gone"):
            await one._do(slot, task)
        assert task.attempts == (0 if leaving or preempted else lost)
    if leaving or preempted:
        waiting.cancel()
        return
    with pytest.raises(Failure, match=f"lost {MAX_ATTEMPTS} rollout workers"):
        await waiting


def cannot_load(cause):
    """What Ray raises of a worker's load: the text names its process, another one each time."""
    text = f"Traceback (most recent call last):\n  File x\n{type(cause).__name__}: {cause}"
    pids = iter(range(1, 10_000))
    return lambda: ray.exceptions.RayTaskError("load", text, cause, pid=next(pids))


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (KeyError("weights"), "KeyError: 'weights'\n"),
        (OutOfMemory("loading the base", "too large", ""), "cannot load its models, and tries again"),
    ],
)
@in_a_loop
async def test_a_node_on_which_nothing_loads_ends_no_run_that_another_may_work_for(
    cause, said, quick, capsys
):
    one = pool(num_workers=2)  # the other one has no resources yet, or lost them with its node
    error = cannot_load(cause)
    one._start = lambda: worker(load=error())
    await one.begin("an attempt", "settings")
    keeping = asyncio.ensure_future(one._keep(0))
    await asyncio.wait({keeping}, timeout=0.5)
    assert one.broken is None and one.failures[0] > 3
    assert capsys.readouterr().out.count(said) == 1
    one.failures[1] = 1  # nor is it any better
    await asyncio.wait({keeping}, timeout=0.2)
    assert isinstance(one.broken, (Failure, OutOfMemory)) and str(cause) in str(one.broken)
    one._start = worker
    await one.begin("another attempt", "settings")
    await asyncio.wait({keeping}, timeout=0.2)
    assert one.broken is None and one.slots[0].ready and one.failures == [0, 0]
    keeping.cancel()


@in_a_loop
async def test_a_worker_that_loads_for_too_long_is_lost(quick, capsys, monkeypatch):
    monkeypatch.setattr(pools, "LOAD_TIMEOUT_S", 0.1)
    one = pool(chunk_timeout_s=1.0)
    one._start = lambda: worker(load=None)
    keeping = asyncio.ensure_future(one._keep(0))
    await asyncio.wait({keeping}, timeout=3)
    assert "has not answered for 1 s (rollout.chunk_timeout_s)" in capsys.readouterr().out
    assert not one.slots[0].present  # patience ends though one is loading again
    keeping.cancel()


@in_a_loop
async def test_workers_that_compute_otherwise_leave_when_a_new_group_of_trainers_begins(quick):
    one = pool()
    applied = []
    apply = SimpleNamespace(remote=lambda settings: applied.append(settings) or answers(True).remote())
    one._start = lambda: SimpleNamespace(**{**vars(worker()), "apply_settings": apply})
    keeping = asyncio.ensure_future(one._keep(0))
    for session, settings in (("a", "1 thread"), ("b", "1 thread"), ("c", "2 threads")):
        await one.begin(session, settings)
        await asyncio.wait({keeping}, timeout=0.3)
        assert one.slots[0].ready
    assert applied == ["1 thread", "2 threads"] and one.failures == [0]
    keeping.cancel()


@pytest.mark.parametrize("error", [ray.exceptions.OwnerDiedError, ray.exceptions.ObjectLostError])
def test_only_a_version_whose_trainer_died_is_waited_for(error, monkeypatch):
    """Any other reason for which it cannot be fetched would keep the chunk going round for ever."""
    made = RolloutWorker.__new__(RolloutWorker)
    made.holds, made.sampler, made.work = None, object(), SimpleNamespace(job=None)

    def get(reference):
        raise error("00" * 28, None, "")

    monkeypatch.setattr(ray, "get", get)
    chunk = pickle.dumps(SimpleNamespace(version=3))
    if error is ray.exceptions.OwnerDiedError:
        assert made.sample("a", chunk, [None]) is None
    else:
        with pytest.raises(error):
            made.sample("a", chunk, [None])


# ------------------------------------------------------------------------------------ trainers have precedence


@in_a_loop
async def test_no_worker_starts_and_none_waits_for_resources_while_the_trainers_wait_for_theirs(
    quick, monkeypatch, capsys
):
    monkeypatch.setattr(pools.placement, "REPORT_INTERVAL_S", 0.1)
    monkeypatch.setattr(pools.placement, "rollout_bundle", lambda job: "{CPU: 1}")
    monkeypatch.setattr(pools.placement, "describe_cluster", lambda: "0 free")
    one = pool(num_workers=2)
    started, unplaced = [], worker(node=None)
    one._start = lambda: started.append(True) or unplaced
    trainers = asyncio.ensure_future(one.trainers_wait())
    keeping = [asyncio.ensure_future(one._keep(number)) for number in (0, 1)]
    await asyncio.wait(keeping, timeout=0.05)
    assert not started
    await one.trainers_placed()
    await asyncio.wait(keeping, timeout=0.8)
    assert started == [True] * 2 and one.slots[0].worker is unplaced
    one.slots[0].node = "found"
    await asyncio.wait(keeping, timeout=0.3)
    said = capsys.readouterr().out
    assert said.count("resources") == said.count("that wait for resources: 2, {CPU: 1} each; 0 free") == 1
    trainers = asyncio.ensure_future(one.trainers_wait())
    await asyncio.wait(keeping, timeout=0.5)
    assert started == [True] * 2 and quick == [unplaced] * 2 and one.slots[0].worker is None
    for running in (trainers, *keeping):
        running.cancel()


@in_a_loop
async def test_workers_leave_nodes_that_could_hold_a_trainer_once_trainers_have_waited(quick, monkeypatch):
    one = pool(num_workers=4)
    for slot, node in zip(one.slots, ("large", "small", "large", None), strict=True):
        slot.worker, slot.node = f"worker {slot.number}", node
    nodes = [{"NodeID": name, "Resources": name, "Labels": {}} for name in ("large", "small")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    bundle = SimpleNamespace(fits=lambda resources, labels: resources == "large")
    monkeypatch.setattr(pools.placement, "bundles", lambda job: [bundle])
    slept = []

    async def sleep(seconds):
        slept.append((seconds, list(quick)))
        if len(slept) == 3:
            await one.trainers_placed()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await one.trainers_wait()
    left = ["worker 0", "worker 2"]
    every = pools.HEARTBEAT_INTERVAL_S
    assert slept == [(pools.TRAINER_WAIT_S, []), (every, left), (every, left)]
