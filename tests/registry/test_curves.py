"""Tests that each metric value reaches MLflow once and in order, even after an outage of the server. Uses MLflow on SQLite."""

import shutil
import sys
import time

import pytest

from pipeline import registry
from pipeline.registry import curves


@pytest.fixture
def run(migrated, tmp_path):
    """Returns (tracking URI, run id) of an empty run."""
    shutil.copy(migrated, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return uri, registry.client(uri).create_run("0").info.run_id


def points(run, key="loss"):
    uri, run_id = run
    return [(m.step, m.value) for m in registry.client(uri).get_metric_history(run_id, key)]


def test_metrics_arrive_in_order_and_log_does_not_wait(run, monkeypatch):
    sent = []

    class Counted(registry.MLflowRun):
        def write(self, points):
            sent.append(len(points))
            super().write(points)

    monkeypatch.setattr(registry.Curves, "INTERVAL_S", 60.0)  # only close() sends metrics
    log = registry.Curves(Counted(*run))
    for step in range(1500):
        log.log({"loss": 1.0 / (step + 1)}, step)
    assert sent == []
    log.close()
    assert points(run) == [(step, 1.0 / (step + 1)) for step in range(1500)]
    assert sent == [1000, 500]


def test_a_worker_that_repeats_steps_adds_only_missing_metrics(run):
    """A final value is logged at its step only if it differs from the value that this step already has."""
    first = ((1, 1.0), (2, 2.0), (3, 3.0))
    resumed = ((2, 2.5), (3, 3.5), (4, 4.5))  # values after a resume from the checkpoint of step 1
    for losses in (first, resumed):
        log = registry.Curves(registry.MLflowRun(*run))
        for step, loss in losses:
            log.log({"loss": loss, "eval_loss": loss}, step)
        log.log({"eval_loss": 2.25}, 2, final=True)
        log.log({"eval_loss": 3.0}, 3, final=True)
        log.close()
    assert points(run) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
    assert sorted(points(run, "eval_loss")) == [(1, 1.0), (2, 2.0), (2, 2.25), (3, 3.0), (4, 4.5)]


def test_metrics_are_sent_after_the_server_comes_back(run, monkeypatch, capsys):
    """The server is unreachable at the first call. At the second call, the server stores the values, but its response is lost."""
    calls = []

    class Flaky(registry.MLflowRun):
        def write(self, points):
            calls.append(len(points))
            if len(calls) == 1:
                raise ConnectionError("refused")
            super().write(points)
            if len(calls) == 2:
                raise ConnectionError("the answer was lost")

    monkeypatch.setattr(registry.Curves, "INTERVAL_S", 0.01)
    log = registry.Curves(Flaky(*run))
    log.log({"loss": 3.0}, 1)
    deadline = time.monotonic() + 60
    while len(calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    log.log({"loss": 1.0}, 2)
    log.close()
    assert points(run) == [(1, 3.0), (2, 1.0)]
    out = capsys.readouterr().out
    assert out.count("does not answer (ConnectionError: refused)") == 1 and "not recorded" not in out


def test_metrics_that_an_unreachable_server_did_not_get_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(curves, "client", lambda uri: 1 / 0)
    log = registry.Curves(registry.MLflowRun("http://127.0.0.1:9", "some-run"))
    for step in range(25):
        log.log({"loss": 1.0}, step)
    log.close(timeout=0.1)
    log.close(timeout=0.1)
    said = "warning: 25 metric values were not recorded: MLflow at http://127.0.0.1:9 was unreachable"
    assert capsys.readouterr().out.count(said) == 1


def test_training_may_log_while_metrics_are_sent(monkeypatch, capsys):
    interval = sys.getswitchinterval()
    monkeypatch.setattr(registry.Curves, "INTERVAL_S", 1e-4)
    sent = []

    class Counted(curves.Tracker):
        name = "the tracker"

        def write(self, points):
            sent.extend(point.step for point in points)

    log = registry.Curves(Counted())
    try:
        sys.setswitchinterval(1e-6)
        for step in range(60_000):
            log.log({"a": 1.0, "b": 2.0}, step)
    finally:
        sys.setswitchinterval(interval)
    log.close()
    assert sent == [step for step in range(60_000) for _ in "ab"]
    assert capsys.readouterr().out == ""
