"""The pool's own bookkeeping, without Ray's processes: what a new group of trainers finds, and what an old one leaves."""

import asyncio
import concurrent.futures
from types import SimpleNamespace

import pytest
import ray

from pipeline.errors import Failure
from pipeline.ppo.rollout_config import RolloutConfig
from pipeline.rollout.pool import MOST_ATTEMPTS, Lost, Pool

KEY = (3, 0, 1)  # update, rank, number


def pool(**config):
    """A pool that starts no worker."""
    one = Pool(SimpleNamespace(job=SimpleNamespace(rollout_config=RolloutConfig(num_workers=1, **config))))
    one.changed, one.terms = asyncio.Condition(), asyncio.get_running_loop().create_future()
    one.running = [one.terms]  # as if started
    return one


def run(test):
    return asyncio.run(asyncio.wait_for(test(), 20))


async def asked(one, session):
    await one.begin(session, "terms")
    await one.request(session, [(KEY, 3, b"chunk")])
    collecting = asyncio.ensure_future(one.collect(session, KEY))
    await asyncio.sleep(0)
    return one.tasks.get(KEY), collecting


def test_whoever_waited_for_a_chunk_of_an_earlier_session_leaves_that_of_the_new_one_alone():
    async def test():
        one = pool()
        old, orphan = await asked(one, "a")
        new, waiting = await asked(one, "b")
        with pytest.raises(asyncio.CancelledError):
            await orphan
        assert old.result.cancelled() and one.tasks == {KEY: new} and one.waiting == [new]
        new.result.set_result(b"sampled")
        assert await waiting == b"sampled" and one.tasks == {}

    run(test)


def test_a_chunk_that_nobody_asked_for_is_named():
    async def test():
        one = pool()
        await one.begin("a", "terms")
        with pytest.raises(Failure, match=r"nobody asked for chunk \(3, 0, 1\)"):
            await one.collect("a", KEY)
        with pytest.raises(Failure, match="restarted"):
            await one.collect("earlier", KEY)

    run(test)


def test_patience_ends_only_where_no_worker_is_there():
    async def test():
        one = pool(patience_s=0)
        _, waiting = await asked(one, "a")
        assert await waiting is None and one.waiting == [] and one.tasks == {}
        one.slots[0].node = "node"  # where a worker tries to load again
        one._count()
        assert one.alone is not None
        one.slots[0].present = True  # one that loads for the first time
        one._count()
        _, waiting = await asked(one, "b")
        await asyncio.sleep(0.5)
        assert not waiting.done()
        waiting.cancel()

    run(test)


def test_a_chunk_that_loses_worker_after_worker_ends_the_run():
    async def test():
        one = pool()
        task, waiting = await asked(one, "a")
        for task.attempts in range(1, MOST_ATTEMPTS + 1):
            one.waiting.clear()
            await one._give_back(task, Lost("is gone"))
            assert (task in one.waiting) == (task.attempts < MOST_ATTEMPTS)
        with pytest.raises(Failure, match=f"lost {MOST_ATTEMPTS} rollout workers"):
            await waiting

    run(test)


def test_no_worker_is_started_and_none_waits_for_a_place_while_the_trainers_wait_for_theirs(monkeypatch):
    async def test():
        one = pool()
        started = []
        handle = SimpleNamespace(
            node=SimpleNamespace(remote=lambda: SimpleNamespace(future=concurrent.futures.Future))
        )
        killed = []
        monkeypatch.setattr(ray, "kill", killed.append)
        one._start = lambda: started.append(True) or handle  # Ray finds no place for it
        await one.trainers_wait()
        keeping = asyncio.ensure_future(one._keep(one.slots[0]))
        await asyncio.sleep(0.05)
        assert not started
        await one.trainers_placed()
        await asyncio.sleep(0.05)
        assert started == [True] and one.slots[0].asked is not None
        await one.trainers_wait()
        await asyncio.sleep(0.5)
        assert started == [True] and killed == [handle] and one.slots[0].asked is None
        keeping.cancel()

    run(test)
