"""Tests that metrics reach MLflow in order and once, and that an unreachable server does not slow training. MLflow on SQLite."""

import shutil
import time

import pytest

from pipeline import registry


@pytest.fixture
def run(migrated, tmp_path):
    """Returns (tracking URI, run id) of an empty run."""
    shutil.copy(migrated, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return uri, registry.client(uri).create_run("0").info.run_id


def points(run, key="loss"):
    uri, run_id = run
    return [(m.step, m.value) for m in registry.client(uri).get_metric_history(run_id, key)]


def test_everything_arrives_in_order_and_logging_does_not_wait(run, monkeypatch):
    sent = []

    class Slow(registry.MLflowRun):
        def write(self, points):
            sent.append(len(points))
            time.sleep(0.05)
            super().write(points)

    monkeypatch.setattr(registry.MetricLog, "INTERVAL_S", 60.0)  # only close() sends metrics
    log = registry.MetricLog(Slow(*run))
    for step in range(1500):
        log.log({"loss": 1.0 / (step + 1)}, step)
    assert sent == [], "log() sent something itself"
    log.close()
    assert points(run) == [(step, 1.0 / (step + 1)) for step in range(1500)]
    assert sent == [1000, 500]


def test_a_worker_that_repeats_steps_adds_only_missing_metrics(run):
    """A final metric is added to the trainer's metric of that step if they differ."""
    first, again = (
        ((1, 1.0), (2, 2.0), (3, 3.0)),
        ((2, 2.5), (3, 3.5), (4, 4.5)),
    )  # resumes from the checkpoint of step 1
    for given in (first, again):
        log = registry.MetricLog(registry.MLflowRun(*run))
        for step, loss in given:
            log.log({"loss": loss, "eval_loss": loss}, step)
        log.log({"eval_loss": 2.25}, 2, final=True)
        log.log({"eval_loss": 3.0}, 3, final=True)
        log.close()
    assert points(run) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
    assert sorted(points(run, "eval_loss")) == [(1, 1.0), (2, 2.0), (2, 2.25), (3, 3.0), (4, 4.5)]


def test_metrics_are_sent_after_the_server_comes_back(run, monkeypatch, capsys):
    away = [True]
    real = registry.client

    def client(uri):
        if away[0]:
            raise ConnectionError("refused")
        return real(uri)

    monkeypatch.setattr("pipeline.registry.curves.client", client)
    monkeypatch.setattr(registry.MetricLog, "INTERVAL_S", 0.01)
    log = registry.MetricLog(registry.MLflowRun(*run))
    log.log({"loss": 3.0}, 1)
    log.log({"loss": 2.0}, 2)
    deadline = time.monotonic() + 20
    while log.failures < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    away[0] = False
    log.log({"loss": 1.0}, 3)
    log.close()
    assert points(run) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    out = capsys.readouterr().out
    assert out.count("does not answer (ConnectionError: refused)") == 1 and "not recorded" not in out


def test_a_call_that_failed_after_it_was_recorded_is_not_repeated(run, monkeypatch):
    monkeypatch.setattr(registry.MetricLog, "INTERVAL_S", 0.01)
    failed = []

    class Flaky(registry.MLflowRun):
        def write(self, points):
            super().write(points)
            if not failed:
                failed.append(True)
                raise ConnectionError("the answer was lost")

    log = registry.MetricLog(Flaky(*run))
    log.log({"loss": 3.0}, 1)
    log.close()
    assert failed and points(run) == [(1, 3.0)]


def test_an_unreachable_server_is_reported_with_a_count_and_memory_is_bounded(capsys, monkeypatch):
    monkeypatch.setattr(registry.MetricLog, "MAX_PENDING", 10)
    monkeypatch.setattr(registry.MetricLog, "INTERVAL_S", 60.0)
    monkeypatch.setattr("pipeline.registry.curves.client", lambda uri: 1 / 0)
    log = registry.MetricLog(registry.MLflowRun("http://127.0.0.1:9", "some-run"))
    for step in range(25):
        log.log({"loss": 1.0}, step)
    assert [point.step for point in log.pending] == list(range(15, 25))
    log.close(timeout=0.1)
    log.close(timeout=0.1)
    said = "warning: 25 metric values were not recorded: MLflow at http://127.0.0.1:9 was unreachable"
    assert capsys.readouterr().out.count(said) == 1
