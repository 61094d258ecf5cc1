"""Tests the state of the rollout worker pool, without Ray: when trainers begin a new session, and after workers are lost."""

import asyncio
import concurrent.futures
import functools
from types import SimpleNamespace

import pytest
import ray

from pipeline.errors import Failure, OutOfMemory
from pipeline.job.rollout import RolloutConfig
from pipeline.rollout import pool as pools
from pipeline.rollout.pool import MAX_ATTEMPTS, Pool, WorkerLost

KEY = (3, 0, 1)  # (update, rank, number of the chunk)


def in_a_loop(test):
    @functools.wraps(test)
    def call(*args, **keys):
        asyncio.run(asyncio.wait_for(test(*args, **keys), 20))

    return call


def pool(num_workers=1, **config):
    """Returns a pool of rollout workers that starts no process."""
    settings = RolloutConfig(num_workers=num_workers, **config)
    one = Pool(SimpleNamespace(rollout=settings))
    one.running = [True]  # as if the pool had started workers
    return one


async def requested(one, session="a"):
    """Begins a session that requests a chunk. Returns the chunk's task, and a future for the collected chunk."""
    await one.begin(session, "settings")
    await one.request(session, [(KEY, 3, b"chunk")])
    collecting = asyncio.ensure_future(one.collect(session, KEY))
    await asyncio.sleep(0)
    return one.tasks.get(KEY), collecting


def answers(result=None):
    """Returns a fake actor method, which returns or raises `result`. If `result` is None, the method never returns."""

    def remote(*_):
        answer = concurrent.futures.Future()
        if isinstance(result, Exception):
            answer.set_exception(result)
        elif result is not None:
            answer.set_result(result)
        return SimpleNamespace(future=lambda: answer)

    return SimpleNamespace(remote=remote)


def worker(**methods):
    methods = {"placed": True, "load": True, "apply_settings": True, **methods}
    return SimpleNamespace(**{name: answers(result) for name, result in methods.items()})


@pytest.fixture
def restarted(monkeypatch):
    """Returns a list that receives each worker that the pool lets Ray restart."""
    restarted = []
    monkeypatch.setattr(pools, "_restart", restarted.append)
    return restarted


# ------------------------------------------------------------------------------------------------ trainers


@in_a_loop
async def test_a_request_of_an_earlier_session_does_not_affect_the_new_session():
    one = pool()
    old, orphan = await requested(one, "a")
    new, waiting = await requested(one, "b")
    with pytest.raises(asyncio.CancelledError):
        await orphan
    assert old.result.cancelled() and one.tasks == {KEY: new} and one.waiting == [new]
    new.result.set_result(b"sampled")
    assert await waiting == b"sampled" and one.tasks == {}
    for session in ("b", "earlier"):
        with pytest.raises(Failure, match=r"chunk \(3, 0, 1\) .* was not requested.*restarted"):
            await one.collect(session, KEY)


@in_a_loop
async def test_the_trainers_wait_times_out_only_if_there_is_no_worker():
    one = pool(worker_wait_timeout_s=0)
    _, waiting = await requested(one)
    assert await waiting is None and one.waiting == [] and one.tasks == {}
    one.present.add(0)  # as if the worker were loading its models for the first time
    _, waiting = await requested(one, "b")
    assert not (await asyncio.wait({waiting}, timeout=0.5))[0]
    waiting.cancel()


# ------------------------------------------------------------------------------------------- lost workers


@pytest.mark.parametrize("preempted", [False, True])
@in_a_loop
async def test_a_chunk_whose_workers_keep_dying_ends_the_run(preempted, restarted):
    """If the workers' nodes were preempted, the run continues, because Ray restarts the workers on other nodes."""
    one = pool()
    task, waiting = await requested(one)
    one.versions[3] = [None]
    hurt = worker(sample=ray.exceptions.RayActorError(preempted=preempted))
    for lost in range(1, MAX_ATTEMPTS + 1):
        assert one.waiting == [task]
        one.waiting.clear()
        with pytest.raises(WorkerLost, match="is gone"):
            await one._do(0, hurt, task, "settings")
        assert task.attempts == (0 if preempted else lost) and not restarted
    if preempted:
        waiting.cancel()
        return
    with pytest.raises(Failure, match=f"{MAX_ATTEMPTS} rollout workers died"):
        await waiting


@pytest.mark.parametrize("error", [KeyError("weights"), OutOfMemory("loading the base", "too large", "")])
@in_a_loop
async def test_an_error_of_loading_ends_the_session_and_the_next_session_tries_again(
    error, restarted, monkeypatch
):
    one, actor = pool(), worker(load=ray.exceptions.RayTaskError("load", "a traceback", error, pid=1))
    monkeypatch.setattr(one, "_start", lambda: actor)
    await one.begin("an attempt", "settings")
    keeping = asyncio.ensure_future(one._keep(0))
    await asyncio.wait({keeping}, timeout=0.2)
    assert isinstance(one.broken, (Failure, OutOfMemory)) and str(error) in str(one.broken)
    assert restarted == [actor] and not one.present
    actor.load = answers(True)
    await one.begin("another attempt", "settings")
    await asyncio.wait({keeping}, timeout=0.2)
    assert one.broken is None and one.ready == one.present == {0}
    keeping.cancel()


@in_a_loop
async def test_a_worker_that_loads_for_too_long_is_restarted(restarted, capsys, monkeypatch):
    monkeypatch.setattr(pools, "LOAD_TIMEOUT_S", 0.1)
    one, actor = pool(chunk_timeout_s=1.0), worker(load=None)
    monkeypatch.setattr(one, "_start", lambda: actor)
    keeping = asyncio.ensure_future(one._keep(0))
    await asyncio.wait({keeping}, timeout=1.5)
    assert "has not answered for 1 s (rollout.chunk_timeout_s)" in capsys.readouterr().out
    # The lost worker no longer counts as present, so trainers do not wait for it.
    assert restarted == [actor] and not one.present
    keeping.cancel()
