"""`/score` without a server: what it keeps of a reward, and what it says of a row."""

import weakref
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from running import ROOT

from pipeline.config import load_job
from pipeline.data.values import RowError
from pipeline.runtime.preparation import load_host
from pipeline.serving.models import Served
from pipeline.serving.scores import Scores

ROW = {"prompt": "What is the capital of Peru?", "completion": "Lima."}


class Reward:
    def checked(self, samples):
        return [1.0] * len(samples.prompts)


@pytest.fixture(scope="module")
def scores():
    given = ["serve.policies={p: base}", "serve.rewards={}"]
    host = load_host(load_job(ROOT / "jobs/demo/serve.yaml", given, "serve"))
    return Scores(host, SimpleNamespace(run=run), 256)


def run(function):
    """As a batcher does, at once."""
    future = Future()
    function()
    future.set_result(None)
    return future


def test_a_request_whose_client_has_gone_blocks_no_other(scores, monkeypatch):
    reward, turns = Reward(), []
    monkeypatch.setattr(scores.batcher, "run", lambda function: turns.append(function) or Future())
    (gone, _), (waits, _) = (scores.ask(Served("models:/rm/1", reward=reward), [ROW]) for _ in range(2))
    assert gone.cancel()
    turns[0]()
    assert waits.result(timeout=0) == [1.0]


def test_a_batcher_that_has_ended_is_an_error_at_once(scores, monkeypatch):
    ended = Future()
    ended.set_exception(RuntimeError("ended"))
    monkeypatch.setattr(scores.batcher, "run", lambda function: ended)
    future, _ = scores.ask(Served("models:/rm/1", reward=Reward()), [ROW])
    with pytest.raises(RuntimeError, match="ended"):
        future.result(timeout=0)


def test_a_reward_that_another_version_replaced_is_freed(scores):
    reward = Reward()
    future, counts = scores.ask(Served("models:/rm/1", reward=reward), [ROW])
    assert (future.result(), counts) == ([1.0], [1])
    kept = weakref.ref(reward)
    del reward
    assert kept() is None


def test_a_column_is_suggested_once_and_as_a_request_can_name_it(scores):
    with pytest.raises(RowError) as refused:
        scores.ask(Served("models:/rm/1", reward=Reward()), [{"promt": "a", "completion": "b"}])
    assert refused.value.found.endswith("(is `promt` meant to be `prompt`?)"), refused.value
    assert "data.columns" not in refused.value.expected


def test_a_value_that_is_no_row_is_answered_with_the_shortest_one(scores):
    with pytest.raises(RowError, match=r'such as \{"prompt": \.\.\., "completion": \.\.\.\}'):
        scores.ask(Served("models:/rm/1", reward=Reward()), [7])
