"""Tests model versions: registration, gates, aliases, and references to versions. Uses real MLflow on SQLite."""

import itertools
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy_models
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
from registered import LINEAGE, Killed, killed, mlflow, published
from settled import work_of

from pipeline import registry
from pipeline.errors import InputError
from pipeline.registry import lineage
from pipeline.registry.lineage import folder_digests
from pipeline.registry.store import call_persistently
from pipeline.run.launch import publish_adapter
from pipeline.settle.identity import gate_of, tracking_of
from pipeline.settle.work import Input
from pipeline.system import storage


def register(job, adapter, metrics=None, lineage=LINEAGE):
    """Publishes an adapter from an MLflow run of the job. Returns the version."""
    with registry.mlflow_run(tracking_of(job), {"train": "d" * 64}) as run_id:
        return published(job, run_id, adapter, metrics or {}, lineage)


def test_a_version_has_a_description_with_links(job, adapter):
    parents = {"policy": "models:/rlhf-sft/3", "reward.0": "python:my:reward"}
    lineage = {**LINEAGE, "parents": parents, "versions": {"torch": "2.13.0"}, "data": {"train": "ab" * 32}}
    figures = {"initial_loss": 0.54, "eval_loss": 0.5, "eval_runtime": 9.0}
    assert str(register(job, adapter, figures, lineage=lineage)) == "rlhf-sft v1 @champion"
    version = mlflow(job).get_model_version("rlhf-sft", "1")
    assert version.description == (
        "- held-out loss: 0.54 → **0.5**\n- gate: none set\n\n"
        f"Trained by [one](#/experiments/1/runs/{version.run_id}) (sft) on `b` (sha256:1), from\n"
        "- policy: [rlhf-sft v3](#/models/rlhf-sft/versions/3)\n- reward.0: `python:my:reward`"
    )
    assert set(version.tags) == set(
        "stage base_name_or_path base_digest parents data eval_loss measured_with gate".split()
    )
    counts = {f"models:/rlhf-ppo/{i}": i for i in range(1, 31)} | {"others": 7}
    with registry.mlflow_run(tracking_of(job), {}, new_run=True) as run_id:
        published(job, run_id, adapter, {}, {**LINEAGE, "rows_from": counts})
    rows_from = registry.read_version("models:/rlhf-sft/2", tracking_of(job).uri)["tags"]["rows_from"]
    assert len(rows_from) == 21 and rows_from["models:/rlhf-ppo/30"] == 30
    assert sum(rows_from.values()) == sum(counts.values())


def test_a_resumed_run_with_another_model_name_registers_under_that_name(job, adapter):
    """A resume may change the section `mlflow`. The alias of the new model name must not point to a version of the old name."""
    other = replace(job, mlflow=replace(job.mlflow, registered_model="other"), gate={"eval_loss": "<= 0.5"})
    with registry.mlflow_run(tracking_of(job), {}, new_run=True) as run_id:
        published(job, run_id, adapter, {"eval_loss": 1.0}, LINEAGE)
        held_back = published(replace(other, gate=job.gate), run_id, adapter, {"eval_loss": 1.0}, LINEAGE)
        assert str(held_back) == "other v1 @champion"
        again = published(other, run_id, adapter, {"eval_loss": 1.0}, LINEAGE)
    assert (again.version, again.alias) == ("1", None)
    assert mlflow(job).get_model_version("other", "1").tags["gate"].startswith("failed: eval_loss = 1")


@pytest.mark.parametrize("start", [None, "policy"])
def test_the_alias_stays_if_nothing_was_learned(start, job, tmp_path, capsys):
    """The version of a short run that ends within its warmup must not become the champion, regardless of its metrics."""
    toy_models.make(str(tmp_path / "policy"), seed=0, head=False)
    toy_models.make(str(tmp_path / "other"), seed=1, head=False)
    if start is None:  # an adapter as peft initializes it
        shared = toy_models.shared_base()
        shared.add("policy", lora={"r": 4, "target_modules": "all-linear"})
        shared.save("policy", tmp_path / "unchanged")
    else:
        shutil.copytree(tmp_path / "policy", tmp_path / "unchanged")
    for name, alias in (("unchanged", None), ("other", "champion")):
        at = str(tmp_path / "policy")
        inputs = {"policy": Input(at, "adapter", at)} if start else {}
        work = work_of(job, inputs=inputs)
        metrics = {"eval_loss": 0.0, "grad_norm/policy": 0.0 if start else 1.0}
        result = {"metrics": metrics, "adapter": str(tmp_path / name)}
        with registry.mlflow_run(tracking_of(job), {}, new_run=True) as run_id:
            lineage.write(str(tmp_path / name), LINEAGE)
            version = publish_adapter(work, result | {"mlflow_run_id": run_id})
        assert version.alias == alias
        said = capsys.readouterr().out
        assert ("nothing was learned: after training the adapter equals" in said) == (alias is None)
        assert ("every advantage was 0" in said) == (alias is None and start is not None)
        assert ("nothing was learned" in version.gate) == (alias is None)


def test_a_version_stored_elsewhere_is_downloaded_once_and_completely(job, adapter, tmp_path, monkeypatch):
    from pipeline.registry import versions

    monkeypatch.setattr(versions, "_is_here", lambda location: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    uri = tracking_of(job).uri
    register(job, adapter)
    stored = mlflow(job).get_model_version_download_uri("rlhf-sft", "1")

    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: 1 / 0)
        with pytest.raises(InputError, match=r"models:/rlhf-sft/1: its files cannot be fetched"):
            registry.fetch("models:/rlhf-sft/1", uri)
    assert not os.listdir(tmp_path / "cache/rlhf-pipeline/versions")

    def beaten(source, target):
        shutil.copytree(source, target)  # simulates another process that finishes the same download first
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", beaten)
        folder = registry.fetch("models:/rlhf-sft/1", uri)
    assert folder_digests(folder) == folder_digests(adapter)
    assert [path.name for path in (tmp_path / "cache/rlhf-pipeline/versions").iterdir()] == [
        Path(folder).name
    ]
    shutil.rmtree(stored.removeprefix("file://"))
    assert registry.fetch("models:/rlhf-sft/1", uri) == folder


def test_files_that_change_during_the_upload_are_not_registered(job, adapter, monkeypatch):
    import mlflow.artifacts

    def spoiled(uri, **_):
        folder = storage.absolute(job.run.storage_path) + "/spoiled"
        shutil.copytree(adapter, folder)
        with open(folder + "/adapter_model.safetensors", "wb") as file:
            file.write(b"other")
        return folder

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", spoiled)
    with (
        pytest.raises(RuntimeError, match=r"differ from the saved files: adapter_model.safetensors"),
        registry.mlflow_run(tracking_of(job), {}) as run_id,
    ):
        published(job, run_id, adapter, {}, LINEAGE)
    store = registry.client(tracking_of(job).uri)
    assert store.search_registered_models() == []
    assert store.get_run(run_id).info.status == "FAILED"


def test_the_gate():
    assert registry.evaluate_gate({}, {}) == (True, "none set")
    assert registry.evaluate_gate({"a": ">= 0.9"}, {"a": 0.9}) == (True, "passed")
    for gate, metrics, says in (
        ({"a": "> 0.9"}, {"a": 0.9}, "a = 0.9, required > 0.9"),
        ({"a": "<= 10"}, {}, "a = missing, required <= 10"),
        ({"a": "<= 10"}, {"a": float("nan")}, "a = nan, required <= 10"),
        ({"a": "<= 10", "b": ">= 0.9"}, {"a": 3.0, "b": 0.5}, "b = 0.5, required >= 0.9"),
    ):
        assert registry.evaluate_gate(gate, metrics) == (False, f"failed: {says}")


def test_a_gate_may_compare_with_the_champion(job, adapter):
    """Versions with different eval rows are not compared.

    Without a gate, a worse version gets the alias, and its description says that it is worse.
    """
    compared, rows = replace(job, gate={"eval_loss": "<= champion"}), {"data": {"eval": "e" * 64}}

    def publish(one, loss, **more):
        with registry.mlflow_run(tracking_of(one), {}, new_run=True) as run_id:
            return published(one, run_id, adapter, {"eval_loss": loss}, {**LINEAGE, **rows, **more})

    first, same, worse = (publish(compared, loss) for loss in (0.0733333333, 0.0733333333, 1.67))
    assert (first.alias, first.gate) == ("champion", "passed; eval_loss: no champion yet")
    assert (same.alias, same.gate, same.champion.note) == ("champion", "passed", "")
    assert (worse.alias, worse.gate) == (None, "failed: eval_loss = 1.67, required <= champion (0.07333)")
    said = "worse than v2, which was champion: eval_loss 1.67, not 0.07333"
    assert worse.champion.note == said
    moved = publish(job, 1.67)
    assert (moved.alias, moved.gate, moved.champion.note) == ("champion", "none set", said)
    other = publish(compared, 2.0, data={"eval": "f" * 64})
    assert (other.alias, other.gate) == (
        "champion",
        "passed; eval_loss: not compared with v4, which was champion: different eval rows",
    )
    rescaled = replace(compared, trainer={**compared.trainer, "label_smoothing_factor": 0.2})
    assert publish(rescaled, 0.1, data={"eval": "f" * 64}).gate.endswith(
        "different trainer.label_smoothing_factor"
    )
    judged = replace(compared, judge="python:bad_rewards:short")
    assert publish(judged, 0.1, data={"eval": "f" * 64}).gate.endswith("different judge")
    assert publish(compared, float("nan"), data={}).gate == "failed: eval_loss = nan, required <= champion"


def test_the_gate_of_an_evaluation_may_compare_with_the_champion(job, adapter):
    """The gate compares with the metrics that the champion had in its own evaluation against the same baseline."""
    compared = replace(job, stage="evaluate", gate={"eval_reward": ">= champion"})
    for _ in range(3):
        with registry.mlflow_run(tracking_of(job), {}, new_run=True) as run_id:
            published(replace(job, mlflow=replace(job.mlflow, alias="new")), run_id, adapter, {}, LINEAGE)

    def promote(number, reward, baseline="models:/rlhf-sft/1"):
        gate = gate_of(compared)
        measured = registry.measured_on({"eval": "e" * 64}, {"baseline": baseline}, gate)
        return registry.promote(
            tracking_of(job).uri,
            gate,
            f"models:/rlhf-sft/{number}",
            {"eval_reward": reward},
            measured,
        )

    assert promote(1, 0.5).alias == "champion" and promote(1, 0.5).alias == "champion"
    assert promote(2, 0.4).gate == "failed: eval_reward = 0.4, required >= champion (0.5)"
    assert (
        promote(3, 0.4, "base").champion.note
        == "not compared with v1, which was champion: different baseline"
    )
    assert str(mlflow(job).get_model_version_by_alias("rlhf-sft", "champion").version) == "3"
    mlflow(job).set_model_version_tag("rlhf-sft", "1", "gate", "failed: nothing was learned")
    unlearned = promote(1, 0.9)
    assert unlearned.gate == "failed: the gate of the training job failed, too (nothing was learned)"
    assert unlearned.alias is None


def test_a_message_about_an_unknown_reference_says_what_to_do(job, adapter):
    """Tests the message about a missing alias if a version failed its gate and so has no alias."""
    uri = tracking_of(job).uri
    for reference in ("models:/rlhf-sft@champion", "models:/rlhf-sft/7"):
        with pytest.raises(
            InputError, match=r"no registered model 'rlhf-sft'.*\(registered: none yet\).*make sft"
        ):
            registry.pin(reference, uri)
    version = register(replace(job, gate={"eval_loss": "<= 0.1"}), adapter, {"eval_loss": 0.5})
    assert version.alias is None and version.gate == "failed: eval_loss = 0.5, required <= 0.1"
    for reference in ("models:/rlhf-sft@champion", "models:/rlhf-sft/7"):
        with pytest.raises(InputError, match=r"no such.*aliases: none.*models:/rlhf-sft/1 \(gate failed"):
            registry.pin(reference, uri)


WRITES = [
    "log_model_artifacts",
    "create_registered_model",
    "create_model_version",
    "set_registered_model_alias",
]


@pytest.mark.parametrize("before", WRITES)
def test_a_run_killed_while_publishing_is_registered_once_and_completely(before, job, adapter, monkeypatch):
    """A kill before any write leaves no incomplete version and no alias. The next attempt completes the registration."""
    store = mlflow(job)
    with (
        pytest.raises(Killed),
        registry.mlflow_run(tracking_of(job), {}) as first,
        monkeypatch.context() as patch,
    ):
        patch.setattr(MlflowClient, before, killed)
        published(job, first, adapter, {"eval_loss": 1.0}, LINEAGE)
    for version in store.search_model_versions("name = 'rlhf-sft'"):
        assert version.aliases == []
        folder = registry.fetch(f"models:/rlhf-sft/{version.version}", tracking_of(job).uri)
        assert folder_digests(folder) == folder_digests(adapter)
    with registry.mlflow_run(tracking_of(job), {}) as second:
        published(job, second, adapter, {"eval_loss": 1.0}, LINEAGE)
    assert second == first and store.get_run(second).info.status == "FINISHED"
    assert [str(v.version) for v in store.search_model_versions("name = 'rlhf-sft'")] == ["1"]
    assert len(store.search_logged_models(["1"])) == 1, "no unfinished model remains"
    uri = tracking_of(job).uri
    folder = registry.fetch(registry.pin("models:/rlhf-sft@champion", uri), uri)
    assert folder_digests(folder) == folder_digests(adapter)


@pytest.mark.parametrize("before", ["log_model_artifacts", "create_model_version", "set_terminated"])
def test_registration_waits_for_a_server_that_goes_away(before, job, adapter, monkeypatch, capsys):
    """The server fails at a request twice: before it executes the request, and after executing it."""
    away, real, pauses = itertools.count(), getattr(MlflowClient, before), []

    def goes_away(*arguments, **more):
        error = MlflowException("(sqlite3.OperationalError) database is locked", TEMPORARILY_UNAVAILABLE)
        if (attempt := next(away)) == 0:
            raise error
        found = real(*arguments, **more)
        if attempt == 1:
            raise error
        return found

    # Replaces `time` in one module only, because other threads need the real clock.
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("pipeline.registry.store.time", clock)
    monkeypatch.setattr(MlflowClient, before, goes_away)
    with registry.mlflow_run(tracking_of(job), {}) as run_id:
        version = call_persistently(
            tracking_of(job).uri, job.folder, lambda: published(job, run_id, adapter, {}, LINEAGE)
        )
    assert str(version) == "rlhf-sft v1 @champion" and pauses == [1.0, 2.0]
    assert mlflow(job).get_run(run_id).info.status == "FINISHED"
    assert len(mlflow(job).search_model_versions("name = 'rlhf-sft'")) == 1
    assert len(mlflow(job).search_logged_models(["1"])) == 1
    out, err = capsys.readouterr()
    assert out.count("does not answer") == 1 and "The adapter is safe in" in out and "Traceback" not in err


def test_tracking_servers_do_not_share_downloads(job, adapter, tmp_path, monkeypatch):
    """Different tracking servers may have different files under the same mlflow-artifacts:/... path."""
    from pipeline.registry import versions

    monkeypatch.setattr(versions, "_is_here", lambda location: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []

    class Client:
        def __init__(self, uri):
            self.tracking_uri = uri

        def get_model_version_download_uri(self, *_):
            return "mlflow-artifacts:/1/models/m/artifacts"

    def download(mlflow, location, into):
        asked.append(mlflow.tracking_uri)
        return shutil.copytree(adapter, os.path.join(into, "m"))

    monkeypatch.setattr(versions, "client", Client)
    monkeypatch.setattr(versions, "_download", download)
    folders = {registry.fetch("models:/rlhf-sft/1", uri) for uri in ("http://a", "http://b", "http://a")}
    assert len(folders) == 2 and asked == ["http://a", "http://b"]
