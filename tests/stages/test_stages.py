"""Tests each stage end to end at toy size: the output, the registered version, and that losses equal those of plain TRL."""

import json
import re
import shutil

import pytest
from running import NO_EVAL, ROOT, client, curve, stage
from settled import plan_of

from pipeline import metrics
from pipeline.job import load_job
from pipeline.job.identity import identity_of
from pipeline.run import launch as run
from pipeline.run.resume import find_earlier
from pipeline.run_folder import Result
from pipeline.settle.identity import with_run_name

STEPS = 6
TRL_QUICK = [
    f"trainer.max_steps={STEPS}", "data.batch_size=16", "trainer.per_device_train_batch_size=8", "trainer.logging_steps=1",
    "trainer.lr_scheduler_type=constant", "trainer.warmup_steps=0",
]  # fmt: skip
PPO_QUICK = [
    "trainer.total_episodes=32", "trainer.batch_size=16", "judge=python:pipeline.demo:gold",
    *(f"trainer.{kind}_steps=1" for kind in ("save", "eval", "logging")),
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(storage):
    """Returns {stage: result.json}. Each stage uses the versions that earlier stages registered."""
    few = {}
    for name in ("preferences", "thumbs", "prompts"):
        rows = (ROOT / f"jobs/demo/data/{name}_eval.jsonl").read_text().splitlines(keepends=True)[:32]
        (storage / f"{name}.jsonl").write_text("".join(rows))
        few[name] = f"{storage}/{name}.jsonl"
    sft, pairs = "policy=models:/rlhf-sft@champion", f"data.eval={few['preferences']}"
    settings = {
        "sft": TRL_QUICK,
        "rm": [*TRL_QUICK, pairs],
        "dpo": [*TRL_QUICK, sft, pairs],
        "kto": [*TRL_QUICK, sft, f"data.eval={few['thumbs']}"],
        "ppo": [*PPO_QUICK, f"data.eval={few['prompts']}"],
        "evaluate": [f"data.eval={few['prompts']}", f"data.pairs={few['preferences']}"],
    }
    return {name: stage(name, storage, f"toy-{name}", *more) for name, more in settings.items()}


@pytest.mark.parametrize("name", ["sft", "rm", "dpo", "kto", "ppo"])
def test_a_training_stage_leaves_a_result_a_version_and_small_checkpoints(name, runs, storage):
    result = runs[name]
    assert result["stage"] == name and not result.keys() - Result.__annotations__
    assert (result["registered_model"], result["alias"]) == (f"rlhf-{name}", "champion")
    assert result["seconds"] > 0 and result["peak_memory_bytes"] > 1e6
    assert result["job"]["model"]["name_or_path"] == "jobs/demo/model"
    config = json.loads((storage / f"toy-{name}/final/adapter/adapter_config.json").read_text())
    modules = config["target_modules"]
    assert modules == sorted(modules), "or the same run would have other bytes each time"
    alias = client(storage).get_model_version_by_alias(f"rlhf-{name}", "champion")
    assert str(alias.version) == result["version"]
    assert client(storage).get_run(result["mlflow_run_id"]).info.status == "FINISHED"
    known = load_job(ROOT / f"jobs/demo/{name}.yaml", [], name).measurable.lacks
    # Metrics that only some jobs log: for mixtures of experts, for token counts, and for rows with reference completions.
    beyond = re.compile("aux_loss|tokens_per_second|perplexity")
    lacking = {metric for metric, lacks in known.items() if not lacks} - set(result["metrics"])
    assert [metric for metric in lacking if not beyond.search(metric)] == [], "a gate on it could never hold"
    # As `plan` estimates, a checkpoint has one copy of the adapters and of Adam's moments, and no base weights.
    newest = max((storage / f"toy-{name}").glob("checkpoint_*[0-9]"))
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    planned = plan_of(load_job(ROOT / f"jobs/demo/{name}.yaml", [], name)).checkpoint
    assert planned < size < 1.1 * planned + 100_000  # the margin is for tokenizer, random states and curves
    assert size < 10e6


def test_metrics_are_in_mlflow_step_by_step(runs, storage):
    logged = [("sft", "loss"), ("rm", "accuracy"), ("ppo", "objective/kl"), ("ppo", "eval_judge_win_rate")]
    assert [len(curve(storage, runs[name], metric)) for name, metric in logged] == [STEPS, STEPS, 2, 2]


def test_every_curve_is_in_the_table_of_metrics(runs, storage):
    for name, result in runs.items():
        logged = client(storage).get_run(result["mlflow_run_id"]).data.metrics
        assert logged and [metric for metric in logged if not metrics.find_metric(metric, name)] == [], name


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
    assert "- KL: **" in version.description


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
    # Changes the weights of the score head, to simulate that the head was lost.
    path = tmp_path / "rm/adapter_model.safetensors"
    tensors = {key: t.clone() + ("score" in key) for key, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    stage("ppo", storage, "lost", f"reward={tmp_path}/rm", *PPO_QUICK, status=1)
    said = capfd.readouterr().err
    assert "reward scores as when it was trained" in said and "sampler" not in said


def test_plan_reads_the_initial_adapters_of_a_job(runs, storage, capsys):
    stage("plan", storage, "x", "lora.r=2", job="jobs/demo/dpo.yaml")
    out = capsys.readouterr().out
    # the sft adapter has rank 16, although the job sets rank 2
    assert "note:" not in out and "0.131 M learn" in out


def test_evaluate_compares_and_registers_nothing(runs, storage):
    result = runs["evaluate"]
    assert result["version"] is None
    expected = "eval_reward initial_reward eval_win_rate eval_judge eval_judge_win_rate eval_kl"
    assert set(expected.split()) <= result["metrics"].keys()
    assert 0 <= result["metrics"]["eval_rm_accuracy"] <= 1
    assert set(result["samples"][0]) == {"prompt", "before", "after"}


def test_a_finished_run_is_not_run_again(runs, storage, capsys):
    """If the process was killed after writing result.json, the same command ends the MLflow run and writes the report."""
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
    earlier = find_earlier(identity_of(with_run_name(job)))
    assert run.finished_result(earlier)["folder"] == str(moved) != runs["evaluate"]["folder"]


@pytest.mark.parametrize("name", ["sft", "rm", "dpo", "kto"])
def test_losses_equal_those_of_bare_trl(name, runs, storage):
    ours = curve(storage, runs[name])
    theirs = bare(name, runs["sft"]["adapter"])
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert max(theirs) - min(theirs) > 1e-2, "the losses do not move: nothing was compared"


# ------------------------------------------------------------------------------------------------ bare TRL


def rows(name):
    """Yields the raw rows as messages for TRL, so that TRL applies the chat template and tokenizes."""
    files = {"sft": "demonstrations", "kto": "thumbs"}
    path = ROOT / "jobs/demo/data" / f"{files.get(name, 'preferences')}.jsonl"
    for row in map(json.loads, path.read_text().splitlines()):
        if name == "sft":
            yield {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
            continue
        sides = {key: row[key] for key in ("completion", "chosen", "rejected") if key in row}
        said = {key: [{"role": "assistant", "content": text}] for key, text in sides.items()}
        label = {"label": row["label"]} if name == "kto" else {}
        yield {"prompt": [{"role": "user", "content": row["prompt"]}], **said, **label}


def parts(name, config):
    """Returns the tokenizer, raw rows, arguments and LoRA settings of a demo job, for training with plain TRL."""
    import datasets
    from transformers import AutoTokenizer

    job = load_job(ROOT / f"jobs/demo/{name}.yaml", [*TRL_QUICK, *NO_EVAL, "trainer.save_strategy=no"], name)
    args = dict(job.trainer) | {"gradient_accumulation_steps": 2}
    args |= {"output_dir": str(ROOT / "runs/bare"), "report_to": "none", "disable_tqdm": True}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "jobs/demo/model")
    # Like Llama 3's tokenizer, the demo's has no pad token. By default, TRL would pad with EOS and read rewards before the EOS.
    tokenizer.pad_token = "<|finetune_right_pad_id|>"
    return tokenizer, datasets.Dataset.from_list(list(rows(name))), config(**args), job.lora


def bare(name, policy=None):
    """Returns the losses of TRL's trainer on the base, with a new adapter or, for dpo and kto, the adapter in `policy`."""
    import torch
    import transformers
    import trl
    from peft import LoraConfig, PeftModel

    trainer = {"sft": "SFT", "rm": "Reward", "dpo": "DPO", "kto": "KTO"}[name]
    tokenizer, data, args, lora = parts(name, getattr(trl, f"{trainer}Config"))
    transformers.set_seed(args.seed)
    kind = "SequenceClassification" if name == "rm" else "CausalLM"
    head = {"num_labels": 1} if name == "rm" else {}
    loader = getattr(transformers, f"AutoModelFor{kind}")
    model = loader.from_pretrained(ROOT / "jobs/demo/model", dtype="float32", **head)
    adapter = {"peft_config": LoraConfig(task_type="SEQ_CLS" if head else "CAUSAL_LM", **lora)}
    if name in ("dpo", "kto"):
        model, adapter = PeftModel.from_pretrained(model, policy, is_trainable=True), {}
    if name == "kto":
        # TRL computes its KL term per micro-batch, in file order. For equal pairs, TRL's run has our row order and one
        # micro-batch per step.
        args.per_device_train_batch_size, args.gradient_accumulation_steps = 16, 1
        data = data.select(torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed)))
    made = getattr(trl, f"{trainer}Trainer")(
        model, args=args, train_dataset=data, processing_class=tokenizer, **adapter
    )
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
