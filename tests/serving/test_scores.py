"""Tests `/score` without a server: waiting requests, and the messages about a row."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from running import ROOT

from pipeline.data.values import RowError
from pipeline.job import load_job
from pipeline.run.model_host import load_model_host
from pipeline.serving.models import Served
from pipeline.serving.scores import Scores

ROW = {"prompt": "What is the capital of Peru?", "completion": "Lima."}
REWARD = SimpleNamespace(checked=lambda samples: [1.0] * len(samples.prompts))


@pytest.fixture(scope="module")
def scores():
    given = ["serve.policies={p: base}", "serve.rewards={}"]
    host = load_model_host(load_job(ROOT / "jobs/demo/serve.yaml", given, "serve"))
    return Scores(host, SimpleNamespace())


def test_a_request_whose_client_disconnected_blocks_no_other(scores):
    served, turns = Served("models:/rm/1", reward=REWARD), []
    scores.batcher.run = lambda function: turns.append(function) or Future()
    gone, waits = (scores.ask(served, [ROW]) for _ in range(2))
    assert gone.cancel()
    turns[0]()
    assert waits.result(timeout=0) == [{"score": 1.0}]


def test_a_batcher_that_has_ended_raises_at_once(scores):
    ended = Future()
    ended.set_exception(RuntimeError("ended"))
    scores.batcher.run = lambda function: ended
    future = scores.ask(Served("models:/rm/1", reward=REWARD), [ROW])
    with pytest.raises(RuntimeError, match="ended"):
        future.result(timeout=0)


def test_a_suggested_column_name_is_valid_in_a_request(scores):
    with pytest.raises(RowError, match=r"\(is `promt` meant to be `prompt`\?\); (?!.*data.columns)"):
        scores.ask(Served("models:/rm/1", reward=REWARD), [{"promt": "a", "completion": "b"}])
