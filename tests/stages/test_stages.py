"""Tests each stage end to end at toy size: its output, its registered version, and that other libraries can load it."""

import json
import re
import shutil

import pytest
from running import ROOT, client, curve, stage

from pipeline import metrics
from pipeline.config import gates, load_job
from pipeline.config.identity import identity_of
from pipeline.planning import plan
from pipeline.runtime import run
from pipeline.settle.identity import named

TRL_QUICK = [
    "trainer.max_steps=4", "data.batch_size=16", "trainer.per_device_train_batch_size=8", "trainer.logging_steps=1",
]  # fmt: skip
PPO_QUICK = [
    "trainer.total_episodes=32", "trainer.batch_size=16", "judge=python:pipeline.demo:gold",
    *(f"trainer.{kind}_steps=1" for kind in ("save", "eval", "logging")),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(storage):
    """Returns {stage: result.json}. Each stage uses the versions that earlier stages registered."""
    found = {name: stage(name, storage, f"toy-{name}", *TRL_QUICK) for name in ("sft", "rm")}
    for name in ("dpo", "kto"):
        found[name] = stage(name, storage, f"toy-{name}", *TRL_QUICK, "policy=models:/rlhf-sft@champion")
    found["ppo"] = stage("ppo", storage, "toy-ppo", *PPO_QUICK)
    found["evaluate"] = stage("evaluate", storage, "toy-evaluate")
    return found


@pytest.mark.parametrize("name", ["sft", "rm", "dpo", "kto", "ppo"])
def test_a_training_stage_leaves_a_result_a_version_and_small_checkpoints(name, runs, storage):
    result = runs[name]
    assert result["stage"] == name
    assert (result["registered_model"], result["alias"]) == (f"rlhf-{name}", "champion")
    assert result["seconds"] > 0 and result["peak_memory_bytes"] > 1e6
    assert result["job"]["model"]["name_or_path"] == "jobs/demo/model"
    config = json.loads((storage / f"toy-{name}/final/adapter/adapter_config.json").read_text())
    modules = config["target_modules"]
    assert modules == sorted(modules), "or the same run would have other bytes each time"
    alias = client(storage).get_model_version_by_alias(f"rlhf-{name}", "champion")
    assert str(alias.version) == result["version"]
    assert client(storage).get_run(result["mlflow_run_id"]).info.status == "FINISHED"
    known = gates.Metrics(load_job(ROOT / f"jobs/demo/{name}.yaml", [], name)).lacks
    # Only some jobs have these: a mixture of experts, counted tokens, rows with reference completions.
    beyond = re.compile("aux_loss|tokens_per_second|perplexity")
    lacking = {metric for metric, lacks in known.items() if not lacks} - set(result["metrics"])
    assert [metric for metric in lacking if not beyond.search(metric)] == [], "a gate on it could never hold"
    # A checkpoint holds adapters and Adam's moments once, as `plan` estimates, and nothing of the base.
    newest = max((storage / f"toy-{name}").glob("checkpoint_*[0-9]"))
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    planned = plan.make(load_job(ROOT / f"jobs/demo/{name}.yaml", [], name)).checkpoint
    assert planned < size < 1.1 * planned + 100_000  # plus tokenizer, states and curves
    assert size < 10e6


def test_metrics_are_in_mlflow_step_by_step(runs, storage):
    logged = [("sft", "loss"), ("rm", "accuracy"), ("ppo", "objective/kl"), ("ppo", "eval_judge_win_rate")]
    assert [len(curve(storage, runs[name], metric)) for name, metric in logged] == [4, 4, 2, 2]


def test_every_curve_is_in_the_table_of_metrics(runs, storage):
    for name, result in runs.items():
        logged = client(storage).get_run(result["mlflow_run_id"]).data.metrics
        assert logged and [metric for metric in logged if not metrics.find(metric, name)] == [], name


def test_versions_record_their_origin(runs, storage):
    version = client(storage).get_model_version("rlhf-ppo", runs["ppo"]["version"])
    parents = json.loads(version.tags["parents"])
    assert parents["policy"] == f"models:/rlhf-sft/{runs['sft']['version']}"
    assert parents["reward.0"] == f"models:/rlhf-rm/{runs['rm']['version']}"
    assert json.loads(version.tags["data"])["train"] == runs["ppo"]["data"]["digests"]["train"][:12]
    sft = client(storage).get_model_version("rlhf-sft", runs["sft"]["version"])
    for key in ("base_digest", "tokenizer", "chat_template"):
        assert version.tags[key] == sft.tags[key] != ""
    assert "eval_kl" in version.tags and "eval_runtime" not in sft.tags
    tags = {
        k: v for k, v in version.tags.items() if not k.startswith(("eval_", "parents", "data", "measured"))
    }
    assert len(tags) <= 8 and max(map(len, tags.values())) < 40
    link = f"[rlhf-sft v{sft.version}](#/models/rlhf-sft/versions/{sft.version})"
    assert f"- policy: {link}" in version.description
    assert "- KL: **" in version.description and "ray 2.60.0" in version.description


def test_a_run_records_its_job_and_its_data(runs, storage):
    run = client(storage).get_run(runs["rm"]["mlflow_run_id"])
    assert run.data.params["lora.r"] == str(runs["rm"]["job"]["lora"]["r"])
    inputs = {i.tags[0].value: i.dataset.digest for i in run.inputs.dataset_inputs}
    assert inputs == {name: digest[:36] for name, digest in runs["rm"]["data"]["digests"].items()}
    assert any(f.path == "job.json" for f in client(storage).list_artifacts(run.info.run_id))


def test_dpo_kto_and_ppo_continue_the_sft_adapter(runs):
    from safetensors.torch import load_file

    start = load_file(f"{runs['sft']['adapter']}/adapter_model.safetensors")
    for name in ("dpo", "kto", "ppo"):
        end = load_file(f"{runs[name]['adapter']}/adapter_model.safetensors")
        assert end.keys() == start.keys()
        distance = sum(float((end[key] - start[key]).square().sum()) for key in start) ** 0.5
        length = sum(float(start[key].square().sum()) for key in start) ** 0.5
        assert 0 < distance < 0.5 * length


def test_ppo_ends_before_its_first_step_if_a_reward_lost_its_head(runs, storage, tmp_path, capfd):
    from safetensors.torch import load_file, save_file

    shutil.copytree(runs["rm"]["adapter"], tmp_path / "rm")
    path = tmp_path / "rm/adapter_model.safetensors"  # simulates a lost head by other numbers
    tensors = {key: t.clone() + ("score" in key) for key, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    stage("ppo", storage, "lost", f"reward={tmp_path}/rm", *PPO_QUICK, status=1)
    said = capfd.readouterr().err
    assert "reward scores as when it was trained" in said and "sampler" not in said


def test_plan_reads_the_initial_adapters_of_a_job(runs, storage, capsys):
    stage("plan", storage, "x", "lora.r=2", job="jobs/demo/dpo.yaml")
    out = capsys.readouterr().out
    # the sft adapter has rank 16, the job rank 2
    assert "note:" not in out and "0.131 M learn" in out


def test_evaluate_compares_and_registers_nothing(runs, storage):
    result = runs["evaluate"]
    assert result["version"] is None
    expected = "eval_reward initial_reward eval_win_rate eval_judge eval_judge_win_rate eval_kl"
    assert set(expected.split()) <= result["metrics"].keys()
    assert 0 <= result["metrics"]["eval_rm_accuracy"] <= 1
    assert set(result["samples"][0]) == {"prompt", "before", "after"}


def test_a_finished_run_is_not_run_again(runs, storage, capsys):
    """A process killed after result.json leaves a running MLflow run and no report. Both are completed."""
    run_id = runs["sft"]["mlflow_run_id"]
    client(storage).update_run(run_id, status="RUNNING")
    again = stage("sft", storage, "toy-sft", *TRL_QUICK, "run.report=true")
    assert again == runs["sft"]
    assert "run toy-sft is finished" in capsys.readouterr().out
    assert client(storage).get_run(run_id).info.status == "FINISHED"
    assert (storage / "toy-sft/report.html").exists()


def test_a_finished_run_can_be_moved(runs, storage):
    moved = storage / "moved/toy-evaluate"
    shutil.copytree(storage / "toy-evaluate", moved)
    job = load_job(
        ROOT / "jobs/demo/evaluate.yaml", [f"run.storage_path={moved.parent}", "run.name=toy-evaluate"]
    )
    assert run.finished(identity_of(named(job)))["folder"] == str(moved) != runs["evaluate"]["folder"]
