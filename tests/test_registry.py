"""Registration: nothing half done, the gate, references that exist, a server that is away. Real MLflow on SQLite."""

import shutil
from dataclasses import replace

import pytest
from mlflow import MlflowClient
from running import ROOT

from pipeline import registry
from pipeline.config import MLflow, load_job
from pipeline.errors import InputError

LINEAGE = {
    "stage": "sft",
    "base": {"name_or_path": "b", "digest": "sha256:1"},
    "parents": {},
    "data": {},
    "versions": {},
}


@pytest.fixture(scope="module")
def migrated(tmp_path_factory):
    """An empty store, migrated once: that takes two seconds."""
    folder = tmp_path_factory.mktemp("store")
    registry.client(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def job(migrated, tmp_path, in_root):
    shutil.copy(migrated, tmp_path / "mlflow.db")
    made = load_job("jobs/demo/sft.yaml", ["gate={}", f"run.storage_path={tmp_path}", "run.name=one"], "sft")
    return made


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def mlflow(job) -> MlflowClient:
    return registry.client(registry.tracking_uri(job))


def test_publish_registers_moves_the_alias_and_loads_back(job, adapter):
    with registry.run(job, {"train": "d" * 64}) as run_id:
        version = registry.publish(job, run_id, adapter, {"eval_loss": 1.0}, LINEAGE)
    assert str(version) == "rlhf-sft v1 @champion"
    pinned = registry.pin("models:/rlhf-sft@champion", registry.tracking_uri(job))
    assert pinned == "models:/rlhf-sft/1"
    folder = registry.fetch(pinned, registry.tracking_uri(job))
    assert registry.folder_digests(folder) == registry.folder_digests(adapter)


def test_a_run_registered_just_before_a_crash_is_not_registered_twice(job, adapter):
    with pytest.raises(KeyboardInterrupt), registry.run(job, {}) as first:
        registry.publish(job, first, adapter, {}, LINEAGE)
        raise KeyboardInterrupt  # after the version, before result.json
    with registry.run(job, {}) as second:
        version = registry.publish(job, second, adapter, {}, LINEAGE)
    assert second == first
    assert version.version == "1"
    assert len(mlflow(job).search_model_versions("name = 'rlhf-sft'")) == 1


def test_files_that_come_back_changed_are_not_registered(job, adapter, monkeypatch):
    import mlflow.artifacts

    def spoiled(uri, **_):
        folder = registry.storage.absolute(job.run.storage_path) + "/spoiled"
        shutil.copytree(adapter, folder)
        with open(folder + "/adapter_model.safetensors", "wb") as file:
            file.write(b"other")
        return folder

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", spoiled)
    with (
        pytest.raises(RuntimeError, match=r"other files than were saved: adapter_model.safetensors"),
        registry.run(job, {}) as run_id,
    ):
        registry.publish(job, run_id, adapter, {}, LINEAGE)
    store = registry.client(registry.tracking_uri(job))
    assert store.search_registered_models() == []
    assert store.get_run(run_id).info.status == "FAILED"


@pytest.mark.parametrize(
    ("gate", "metrics", "ok"),
    [
        ({}, {}, True),
        ({"eval_accuracy": ">= 0.9"}, {"eval_accuracy": 0.9}, True),
        ({"eval_accuracy": "> 0.9"}, {"eval_accuracy": 0.9}, False),
        ({"eval_kl": "<= 10"}, {}, False),
        ({"eval_kl": "<= 10"}, {"eval_kl": float("nan")}, False),
        ({"eval_kl": "<= 10", "eval_eos": ">= 0.9"}, {"eval_kl": 3.0, "eval_eos": 0.5}, False),
    ],
)
def test_the_gate(gate, metrics, ok):
    passed, reason = registry.passes(gate, metrics)
    assert passed is ok
    assert reason.startswith("failed" if not ok else ("passed" if gate else "none"))


def test_a_version_that_fails_its_gate_stays_without_alias(job, adapter):
    closed = replace(job, gate={"eval_loss": "<= 0.1"})
    with registry.run(closed, {}) as run_id:
        version = registry.publish(closed, run_id, adapter, {"eval_loss": 0.5}, LINEAGE)
    assert version.alias is None and version.gate == "failed: eval_loss = 0.5, required <= 0.1"
    with pytest.raises(
        InputError, match=r"models:/rlhf-sft@champion.*aliases: none.*models:/rlhf-sft/1 \(gate failed"
    ):
        registry.pin("models:/rlhf-sft@champion", registry.tracking_uri(closed))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("models:/rlhf-sft@champion", r"no registered model 'rlhf-sft'.*registered: none yet.*make sft"),
        ("models:/rlhf-sft/7", r"no registered model 'rlhf-sft'"),
    ],
)
def test_a_reference_to_nothing_says_what_to_do(reference, message, job):
    with pytest.raises(InputError, match=message):
        registry.pin(reference, registry.tracking_uri(job))


def test_a_server_that_does_not_answer_is_found_before_work(job):
    away = replace(job, mlflow=MLflow(tracking_uri="http://127.0.0.1:9"))
    with pytest.raises(InputError, match=r"mlflow.tracking_uri: 'http://127.0.0.1:9' does not answer"):
        registry.check(away)


def test_metrics_wait_for_a_server_that_is_away(job, capsys):
    with registry.run(job, {}) as run_id:
        log = registry.MetricLog(registry.tracking_uri(job), run_id)
        send, log.client = log.client, None  # every call fails
        log.log({"loss": 3.0}, 1)
        log.log({"loss": 2.0}, 2)
        log.client = send
        log.log({"loss": 1.0}, 3)
    points = mlflow(job).get_metric_history(run_id, "loss")
    assert [(p.step, p.value) for p in points] == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert capsys.readouterr().out.count("MLflow does not answer") == 1


def test_the_same_name_continues_its_run_unless_it_is_finished(job):
    with pytest.raises(KeyError), registry.run(job, {}) as first:
        raise KeyError
    assert mlflow(job).get_run(first).info.status == "FAILED"
    with registry.run(job, {}) as second:
        assert mlflow(job).get_run(second).info.status == "RUNNING"
    assert second == first
    with registry.run(job, {}) as third:
        pass
    assert third != first


def test_shipped_jobs_use_a_store_beside_the_runs(in_root, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert (
        registry.tracking_uri(load_job("jobs/demo/sft.yaml", [], "sft")) == f"sqlite:///{ROOT}/runs/mlflow.db"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://head:5000")
    assert registry.tracking_uri(load_job("jobs/demo/sft.yaml", [], "sft")) == "http://head:5000"
