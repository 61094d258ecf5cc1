"""Tests the checks of the inputs of a job: reward models, adapters, vLLM's packages, and kto's labels."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import toy_models
import toy_ppo as toy
import transformers
from running import ROOT
from safetensors.torch import load_file, save_file
from toy_models import settings

from pipeline.errors import InputError
from pipeline.job import Model, load_job
from pipeline.models.base import base_identity
from pipeline.registry import lineage
from pipeline.settle.inputs import check_reward_model, check_sampler, pin_inputs
from pipeline.settle.rows import check_labels
from pipeline.settle.settle import settle_job

SINGLE = "model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards") / "scorer"
    config = toy.config("gpt2", num_labels=1)
    config.vocab_size = 827
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "jobs/demo/model" / file, folder)
    return folder


def change(folder: Path, file: str, **changes) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **changes}))


def drop_head(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    tensors.pop("score.weight")
    save_file(tensors, folder / SINGLE)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda at: None, None),
        (drop_head, "no classification head with one output"),
        (lambda at: change(at, "config.json", id2label={"0": "a", "1": "b"}), "with 2 labels; expected an adapter"),
        (lambda at: change(at, "config.json", architectures=["GPT2LMHeadModel"]), "is a GPT2LMHeadModel; expected"),
        (lambda at: (at / "config.json").unlink(), "has no config.json; .*python:MODULE:FUNCTION"),
    ],
    ids=["fine", "no head", "two labels", "another class", "no configuration"],
)  # fmt: skip
def test_a_reward_model_of_its_own_is_checked(spoil, says, made, tmp_path):
    scorer = Path(shutil.copytree(made, tmp_path / "scorer"))
    spoil(scorer)
    job = SimpleNamespace(model=Model(**vars(settings("any"))), scaling={})
    with pytest.raises(InputError, match=says) if says else nullcontext():
        check_reward_model(job.model, str(scorer))


@pytest.mark.parametrize(
    ("policy", "overrides", "warned"),
    [
        ("adapter", [], False),
        ("adapter", ["lora.r=8", "lora.lora_alpha=8"], True),
        ("base", ["lora.r=8"], False),
    ],
)
def test_settings_of_an_adapter_that_is_not_made(policy, overrides, warned, tmp_path, capsys, in_root):
    if policy == "adapter":
        policy = str(tmp_path / "adapter")
        toy_models.make(policy, seed=0, head=False)
    job = load_job("jobs/demo/dpo.yaml", [f"policy={policy}", *overrides], "dpo")
    settle_job(job)
    out = capsys.readouterr().out
    assert ("warning: lora.r, lora.lora_alpha changes nothing" in out) == warned


@pytest.mark.parametrize("key", ["chat_template", "tokenizer"])
def test_all_models_of_a_run_read_the_tokens_of_their_training(key, tmp_path, capsys, in_root):
    """Another template is an error unless the job chooses one. A changed tokenizer may be a repair, so it causes a warning."""
    adapters = {name: str(tmp_path / name) for name in ("policy", "reward")}
    for name, folder in adapters.items():
        toy_models.make(folder, seed=0, head=name == "reward")
        (tmp_path / name / "lineage.json").write_text(
            json.dumps({key: "sha256:other"} if name == "reward" else {})
        )
    given = [f"{name}={folder}" for name, folder in adapters.items()]
    with (
        nullcontext()
        if key == "tokenizer"
        else pytest.raises(InputError, match=r"reward: .* another chat template")
    ):
        settle_job(load_job("jobs/demo/ppo.yaml", [*given, "judge=null"], "ppo"))
    settle_job(load_job("jobs/demo/ppo.yaml", [*given, "judge=null", "model.chat_template=plain"], "ppo"))
    assert (
        f"warning: reward: {adapters['reward']} was trained with another {key.replace('_', ' ')}"
        in capsys.readouterr().out
    )


def test_an_adapter_of_peft_names_the_folder_of_its_base(tmp_path, in_root):
    """A merged model has the same shapes as its base, but other weights. An adapter of the merged model does not fit the base."""
    toy_models.make(policy := str(tmp_path / "adapter"), seed=0, head=False)
    other = shutil.copytree(toy_models.BASE, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors")
    job, file = (
        load_job("jobs/demo/dpo.yaml", [f"policy={policy}"], "dpo"),
        Path(policy, "adapter_config.json"),
    )
    for base, says in (
        (toy_models.BASE, None),
        (str(tmp_path / "gone"), None),
        (str(other), f"trained on base {other}"),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
        with pytest.raises(InputError, match=says) if says else nullcontext():
            settle_job(job)


@pytest.mark.parametrize(
    ("base", "warns"), [("org/Model", False), ("meta-llama/Llama-3.1-8B-Instruct", True)]
)
def test_an_adapter_of_a_base_on_the_hub_is_used_with_a_folder(base, warns, tmp_path, capsys, in_root):
    """The folder may be a download of the base. Its name tells."""
    toy_models.make(policy := str(tmp_path / "adapter"), seed=0, head=False)
    file = Path(policy, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    settle_job(load_job("jobs/demo/dpo.yaml", [f"policy={policy}"], "dpo"))
    assert ("may have other weights" in capsys.readouterr().out) == warns


ON_HEAD = {"r": 2, "target_modules": ["q_proj", "lm_head"]}
RANKS, DORA = {"r": 2, "rank_pattern": {"q_proj": 1}}, {"r": 2, "use_dora": True}


@pytest.mark.parametrize(
    ("stage", "lora", "more", "says"),
    [
        ("dpo", ON_HEAD, [], r"policy: it adapts lm_head, to which TRL's trainers apply no adapter"),
        ("export", ON_HEAD, ["reward=null"], r"policy: it adapts lm_head, which this base ties to its embeddings"),
        ("generate", ON_HEAD, ["reward=null", "data.train=x.jsonl"], None),
        ("generate", RANKS, ["reward=null", "data.train=x.jsonl", "rollout.engine=vllm"], r"policy: it has rank_pattern, which vLLM ignores"),
        ("dpo", DORA, ["model.fsdp=true"], r"policy: it is a DoRA adapter.*model\.fsdp=false"),
    ],
)  # fmt: skip
def test_an_adapter_that_the_stage_would_lose_or_cannot_run_is_refused(
    stage, lora, more, says, tmp_path, in_root
):
    shared = toy_models.shared_base()
    shared.add("policy", lora=lora)
    shared.save("policy", str(tmp_path))
    base = base_identity(str(toy_models.DEMO))
    lineage.write(str(tmp_path), lineage.describe("ppo", base, toy_models.tokenizer(), {}, {}))
    job = load_job(f"jobs/demo/{stage}.yaml", [f"policy={tmp_path}", *more], stage)
    with pytest.raises(InputError, match=says) if says else nullcontext():
        settle_job(job)


def test_a_quantized_base_is_not_sharded(tmp_path, in_root):
    base = Path(shutil.copytree("jobs/demo/model", tmp_path / "base"))
    change(base, "config.json", quantization_config={"quant_method": "fp8"})
    job = load_job("jobs/demo/sft.yaml", [f"model.name_or_path={base}", "model.fsdp=true"], "sft")
    with pytest.raises(InputError, match=r"model\.fsdp: .* has quantized weights.*set model\.fsdp=false"):
        settle_job(job)


def test_a_version_that_a_run_began_with_is_not_resolved_again(migrated, tmp_path, in_root):
    shutil.copy(migrated, tmp_path / "mlflow.db")
    given = ["policy=models:/nothing@gone", f"run.storage_path={tmp_path}"]
    job = load_job("jobs/demo/dpo.yaml", given, "dpo")
    with pytest.raises(InputError, match="nothing@gone"):
        pin_inputs(job)
    assert pin_inputs(job, {"policy": "models:/nothing/1"})[1] == {"policy": "models:/nothing/1"}


def test_of_several_policies_the_first_that_exists_counts(models, storage, capsys, in_root):
    """If the gate of ppo failed, no ppo version has the alias champion. `serve` skips a policy that does not exist."""
    home = f"run.storage_path={storage}"
    exist = "models:/toy-policy/1"
    names = f"[models:/vet-ppo@champion, models:/vet-dpo@champion, {exist}, models:/toy-policy@champion]"
    job = load_job("jobs/demo/generate.yaml", [home, "reward=null", f"policy={names}"], "generate")
    assert pin_inputs(job)[1] == {"policy": exist}
    said = "policy: models:/vet-ppo@champion, models:/vet-dpo@champion does not exist, so the policy is models:/toy-policy/1\n"
    assert capsys.readouterr().out == said
    none = load_job("jobs/demo/generate.yaml", [home, "policy=[models:/vet-ppo@champion, models:/x@y]"])
    with pytest.raises(InputError, match="policy: models:/vet-ppo@champion: no registered model"):
        pin_inputs(none)
    served = "serve.policies={a: models:/vet-ppo@champion, b: models:/toy-policy/1}"
    gone = "serve.rewards={r: models:/vet-rm@champion}"
    job, inputs = pin_inputs(load_job("jobs/demo/serve.yaml", [home, served, gone], "serve"))
    assert inputs == {"policies.b": exist} == job.serve.inputs
    assert (
        "warning: serve.policies.a is skipped: models:/vet-ppo@champion: no regist" in capsys.readouterr().out
    )
    alone = load_job("jobs/demo/serve.yaml", [home, gone, "serve.policies={}"], "serve")
    with pytest.raises(InputError, match=r"serve\.rewards\.r: models:/vet-rm@champion"):
        pin_inputs(alone)


def test_vllm_without_its_plugin_is_refused_for_nf4(tmp_path, monkeypatch, in_root):
    """Without the plugin, vLLM 0.28 would fail after minutes of loading."""
    job = load_job("jobs/demo/ppo.yaml", ["rollout.engine=vllm", "model.load_in_4bit=true"], "ppo")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"plugin for model\.load_in_4bit is not .*pip install vllm-bnb-plugin on"
    ):
        check_sampler(job.rollout_config, job.model)
    check_sampler(job.rollout_config, replace(job.model, load_in_4bit=False))


@pytest.mark.parametrize(
    ("weights", "desirable", "undesirable", "warned"),
    [
        ({}, 133, 100, ""),
        ({"desirable_weight": 2.5}, 584, 1216, ""),
        ({}, 100, 300, r"is 0\.33 of .*desirable_weight=3 to 4"),
        ({"desirable_weight": 2.0, "undesirable_weight": 4.0}, 100, 100, r"is 0\.50 of .*desirable_weight=4 to 5\.33"),
        ({}, 100, 0, "only one of the labels has rows and a weight"),
        ({"undesirable_weight": 0.0}, 100, 100, "only one of the labels has rows and a weight"),
    ],
)  # fmt: skip
def test_unbalanced_labels_are_named_with_the_weights_that_balance_them(
    weights, desirable, undesirable, warned, capsys
):
    check_labels(weights, desirable, undesirable)
    said = capsys.readouterr().out
    assert f"labels: {desirable:,} desirable, {undesirable:,} undesirable rows" in said
    assert re.search(warned, said) if warned else "warning" not in said
