"""What a job names from outside: a reward that is a model of its own, and adapters that training starts from."""

import json
import shutil
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
from pipeline.runtime.inputs import check_reward_model
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


def two_scores(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    tensors["score.weight"] = tensors["score.weight"].repeat(2, 1)
    save_file(tensors, folder / SINGLE)


WRONG = {
    "truncated": (lambda at: (at / SINGLE).write_bytes((at / SINGLE).read_bytes()[:-9]), "not a whole safetensors file"),
    "without a head": (drop_head, "'score.weight' is missing"),
    "two scores": (two_scores, r"'score\.weight' has shape \(2, 32\) and config\.json promises \(1, 32\)"),
    "two labels": (lambda at: change(at, "config.json", id2label={"0": "a", "1": "b"}), "with 2 labels; expected an adapter"),
    "another class": (lambda at: change(at, "config.json", architectures=["GPT2LMHeadModel"]), "is a GPT2LMHeadModel; expected"),
    "another width": (lambda at: change(at, "config.json", n_embd=64), "has shape .* and config.json promises"),
    "no tokenizer": (lambda at: (at / "tokenizer.json").unlink(), "no tokenizer can be read from"),
    "an end beyond its embedding": (lambda at: change(at, "config.json", eos_token_id=10**6), "eos_token_id in config.json .*found 1000000"),
    "no configuration": (lambda at: (at / "config.json").unlink(), "has no config.json; .*python:MODULE:FUNCTION"),
    "a broken configuration": (lambda at: (at / "config.json").write_text("{"), "/config.json: not valid JSON"),
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
