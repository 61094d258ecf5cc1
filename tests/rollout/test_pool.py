"""The pool's own bookkeeping, without Ray's processes: what a new group of trainers finds, and what an old one leaves."""

import asyncio
import concurrent.futures
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


def pool(num_workers=1, **config):
    """A pool that starts no worker."""
    settings = RolloutConfig(num_workers=num_workers, **config)
    one = Pool(SimpleNamespace(job=SimpleNamespace(rollout_config=settings)))
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


def test_a_chunk_that_was_not_requested_is_named():
    async def test():
        one = pool()
        await one.begin("a", "terms")
        with pytest.raises(Failure, match=r"chunk \(3, 0, 1\) .* was not requested"):
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
        assert one.alone_since is not None
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
        for task.attempts in range(1, MAX_ATTEMPTS + 1):
            one.waiting.clear()
            await one._give_back(task, WorkerLost("is gone"))
            assert (task in one.waiting) == (task.attempts < MAX_ATTEMPTS)
        with pytest.raises(Failure, match=f"lost {MAX_ATTEMPTS} rollout workers"):
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
        assert started == [True] and one.slots[0].waits_since is not None
        await one.trainers_wait()
        await asyncio.sleep(0.5)
        assert started == [True] and killed == [handle] and one.slots[0].waits_since is None
        keeping.cancel()

    run(test)


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


def worker(load=True, apply_settings=True, alive=True):
    return SimpleNamespace(
        node=answers("node"), load=answers(load), apply_settings=answers(apply_settings), alive=answers(alive)
    )


@pytest.fixture
def quick(monkeypatch):
    """Nothing is waited for long."""
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(pools, "HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(pools, "MAX_PAUSE_S", 0.01)
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(min(seconds, 0.01)))


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
def test_a_node_on_which_nothing_loads_ends_no_run_that_another_may_work_for(cause, said, quick, capsys):
    async def test():
        one = pool(num_workers=2)  # the other one has no place yet, or lost it with its node
        error = cannot_load(cause)
        one._start = lambda: worker(load=error())
        await one.begin("an attempt", "terms")
        keeping = one.keeping[0] = asyncio.ensure_future(one._keep(one.slots[0]))
        await asyncio.wait({keeping}, timeout=0.5)
        assert one.broken is None and not keeping.done() and one.slots[0].failures > 3
        assert capsys.readouterr().out.count(said) == 1
        one.slots[1].failures = 1  # nor is it any better
        await keeping
        with pytest.raises((Failure, OutOfMemory), match=r"weights|too large"):
            raise one.broken
        one._start = lambda: worker()
        await one.begin("another attempt", "terms")
        await asyncio.wait({one.keeping[0]}, timeout=0.2)
        assert one.broken is None and one.slots[0].ready
        one.keeping[0].cancel()
        one.keeping[1].cancel()

    run(test)


def test_what_breaks_before_the_first_trainers_come_is_said_to_them(quick):
    async def test():
        one = pool()
        one.broken = Failure("no such module")
        await one.begin("the first", "terms")
        await one.request("the first", [(KEY, 3, b"chunk")])
        with pytest.raises(Failure, match="no such module"):
            await one.collect("the first", KEY)

    run(test)


def test_a_worker_that_loads_for_too_long_is_lost(quick, capsys, monkeypatch):
    monkeypatch.setattr(pools, "LOAD_TIMEOUT_S", 0.1)

    async def test():
        one = pool(chunk_timeout_s=1.0)
        one._start = lambda: worker(load=None)
        keeping = asyncio.ensure_future(one._keep(one.slots[0]))
        await asyncio.wait({keeping}, timeout=3)
        assert "has been loading for more than 1 s (rollout.chunk_timeout_s)" in capsys.readouterr().out
        assert one.alone_since is not None  # patience ends though one is loading again
        keeping.cancel()

    run(test)


def test_workers_that_settled_otherwise_leave_when_a_new_group_of_trainers_begins(quick):
    async def test():
        one = pool()
        settled = []
        one._start = lambda: SimpleNamespace(
            **{
                **vars(worker()),
                "apply_settings": SimpleNamespace(
                    remote=lambda t: settled.append(t) or answers(True).remote()
                ),
            }
        )
        keeping = asyncio.ensure_future(one._keep(one.slots[0]))
        for session, terms in (("a", "1 thread"), ("b", "1 thread"), ("c", "2 threads")):
            await one.begin(session, terms)
            await asyncio.wait({keeping}, timeout=0.3)
            assert one.slots[0].ready
        assert settled == ["1 thread", "2 threads"]
        assert one.slots[0].failures == 0
        keeping.cancel()

    run(test)


def test_trainers_that_were_away_begin_to_wait_anew():
    async def test():
        one = pool(patience_s=100)
        one.alone_since -= 1000
        await one.trainers_wait()
        await one.trainers_placed()
        _, waiting = await asked(one, "a")
        await asyncio.sleep(0.5)
        assert not waiting.done()
        waiting.cancel()

    run(test)


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("leaving", [None, pools.YIELDS_TO_TRAINER])
def test_a_chunk_is_not_to_blame_for_a_node_that_goes(leaving, preempted, quick):
    async def test():
        one = pool()
        task, waiting = await asked(one, "a")
        one.waiting.clear()
        one.versions[3] = ([None], 8)
        one.slots[0].leaving = leaving
        gone = SimpleNamespace(
            **vars(worker()), sample=answers(ray.exceptions.RayActorError(preempted=preempted))
        )
        with pytest.raises(WorkerLost, match="is gone"):
            await one._do(one.slots[0], gone, task)
        assert task.attempts == (0 if leaving or preempted else 1) and one.waiting == [task]
        waiting.cancel()

    run(test)


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


def test_workers_leave_nodes_that_could_hold_a_trainer_once_trainers_have_waited(monkeypatch):
    async def test():
        one, killed = pool(num_workers=4), []
        for slot, node in zip(one.slots, ("large", "small", "large", None), strict=True):
            slot.worker, slot.node = f"worker {slot.number}", node
        nodes = [{"NodeID": name, "Resources": name, "Labels": {}} for name in ("large", "small")]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray, "kill", killed.append)
        bundle = SimpleNamespace(fits=lambda resources, labels: resources == "large")
        monkeypatch.setattr(pools.placement, "bundles", lambda job: [bundle])
        await one._yield_to_trainers()
        await one.trainers_wait()
        await one._yield_to_trainers()
        assert killed == []
        one.displaced_since -= pools.TRAINER_WAIT_S
        for _ in range(2):
            await one._yield_to_trainers()
            assert killed == ["worker 0", "worker 2"]

    run(test)
