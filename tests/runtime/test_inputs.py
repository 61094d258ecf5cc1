"""What a job names from outside: a reward that is a model of its own, and adapters that training starts from."""

import json
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

from pipeline.config import Model, load_job
from pipeline.errors import InputError
from pipeline.models.base import base_identity
from pipeline.registry import lineage
from pipeline.runtime import inputs
from pipeline.runtime.inputs import check_reward_model, check_shards, pin_inputs
from pipeline.runtime.preparation import check_models

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


@pytest.fixture
def scorer(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "scorer"))


def check(folder) -> None:
    model = Model(**{key: value for key, value in vars(settings("any")).items()})
    check_reward_model(SimpleNamespace(model=model, scaling={}), str(folder))


def change(folder: Path, file: str, **changes) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **changes}))


def drop_head(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    tensors.pop("score.weight")
    save_file(tensors, folder / SINGLE)


WRONG = {
    "without a head": (drop_head, "no head of one score"),
    "an end beyond its embedding": (lambda at: change(at, "config.json", eos_token_id=10**6), "eos_token_id in config.json .*found 1000000"),
    "two labels": (lambda at: change(at, "config.json", id2label={"0": "a", "1": "b"}), "with 2 labels; expected an adapter"),
    "another class": (lambda at: change(at, "config.json", architectures=["GPT2LMHeadModel"]), "is a GPT2LMHeadModel; expected"),
    "no configuration": (lambda at: (at / "config.json").unlink(), "has no config.json; .*python:MODULE:FUNCTION"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_reward_model(kind, scorer):
    spoil, says = WRONG[kind]
    spoil(scorer)
    with pytest.raises(InputError, match=says):
        check(scorer)


def test_one_that_is(scorer):
    check(scorer)


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
    check_models(job, {} if policy == "base" else {"policy": policy})
    out = capsys.readouterr().out
    assert ("warning: lora.r, lora.lora_alpha changes nothing" in out) == warned


@pytest.mark.parametrize(
    ("stage", "given", "says"),
    [
        ("dpo", ["policy={}"], r"policy: it adapts lm_head, to which TRL's trainers apply no adapter"),
        ("export", ["policy={}", "reward=null"], r"policy: it adapts lm_head, which this base ties to its embeddings"),
        ("generate", ["policy={}", "reward=null", "data.train=x.jsonl"], None),
    ],
)  # fmt: skip
def test_an_adapter_on_the_lm_head_is_refused_where_it_would_be_lost(stage, given, says, tmp_path, in_root):
    shared = toy_models.shared_base()
    shared.add("policy", lora={"r": 2, "target_modules": ["q_proj", "lm_head"]})
    shared.save("policy", str(tmp_path))
    lineage.write(
        str(tmp_path),
        lineage.describe("ppo", base_identity(str(toy_models.DEMO)), toy_models.tokenizer(), {}, {}),
    )
    job = load_job(f"jobs/demo/{stage}.yaml", [text.format(tmp_path) for text in given], stage)
    with pytest.raises(InputError, match=says) if says else nullcontext():
        check_models(job, {"policy": str(tmp_path)})


def test_shards_and_what_needs_whole_weights_are_refused_together(tmp_path, in_root):
    shared = toy_models.shared_base()
    shared.add("policy", lora={"r": 2, "use_dora": True})
    shared.save("policy", str(tmp_path / "dora"))
    base = base_identity(str(toy_models.DEMO))
    lineage.write(str(tmp_path / "dora"), lineage.describe("sft", base, toy_models.tokenizer(), {}, {}))
    job = load_job("jobs/demo/dpo.yaml", [f"policy={tmp_path / 'dora'}", "model.fsdp=true"], "dpo")
    with pytest.raises(InputError, match=r"policy: it is a DoRA adapter.*model\.fsdp=false"):
        check_models(job, {"policy": str(tmp_path / "dora")})
    job = load_job("jobs/demo/sft.yaml", ["model.fsdp=true", "model.allow_pickle=true"], "sft")
    check_shards(job, SimpleNamespace(config={}, tensors={"a": None}))
    for config, says in (
        ({"quantization_config": {}}, None),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    ):
        with pytest.raises(InputError, match=says or "has no safetensors"):
            check_shards(job, SimpleNamespace(config=config, tensors={}))
    # The headers of files on the hub, into which weights are split, are not read before the run.
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    job = replace(job, model=replace(job.model, name_or_path=str(tmp_path)))
    check_shards(job, SimpleNamespace(config={}, tensors={}))


def test_what_a_run_was_begun_with_is_not_asked_for_again(migrated, tmp_path, in_root):
    shutil.copy(migrated, tmp_path / "mlflow.db")
    given = ["policy=models:/nothing@gone", f"run.storage_path={tmp_path}"]
    job = load_job("jobs/demo/dpo.yaml", given, "dpo")
    with pytest.raises(InputError, match="nothing@gone"):
        pin_inputs(job)
    assert pin_inputs(job, {"policy": "models:/nothing/1"})[1] == {"policy": "models:/nothing/1"}


def test_vllm_without_its_plugin_is_refused_for_nf4(tmp_path, monkeypatch, in_root):
    """Since vLLM 0.28 `bitsandbytes` is no quantization of its own: its engine would die after minutes of loading."""
    job = load_job("jobs/demo/ppo.yaml", ["rollout.engine=vllm", "model.load_in_4bit=true"], "ppo")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"pip install vllm-bnb-plugin .*model\.load_in_4bit=false"):
        inputs.check_sampler(job)
    inputs.check_sampler(replace(job, model=replace(job.model, load_in_4bit=False)))
    (tmp_path / "vllm_bnb_plugin-0.0.3.dist-info").mkdir()
    (tmp_path / "vllm_bnb_plugin-0.0.3.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-bnb-plugin\nVersion: 0.0.3\n"
    )
    inputs.check_sampler(job)
