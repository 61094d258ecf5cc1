"""Tests that all stages train tiny random models of families other than Llama, and train adapters on an NF4 base.

The stages' own `train` functions run in this process, without Ray and MLflow.
"""

import json
from pathlib import Path

import alone
import pytest
from running import ROOT
from safetensors.torch import load_file, save_file

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
WIDE = SIZE | {"intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 32}


def config_of(family, vocabulary, eos):
    import transformers as t

    common = {"vocab_size": vocabulary, "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None}
    made = {
        # absolute positions, tied embeddings
        "gpt2": lambda: t.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, **common),
        "qwen3": lambda: t.Qwen3Config(tie_word_embeddings=True, **WIDE, **common),
        "mistral": lambda: t.MistralConfig(sliding_window=None, **WIDE, **common),
        "gemma": lambda: t.GemmaConfig(**WIDE, **common),
        # the lm head of GPT-NeoX is named embed_out
        "gpt_neox": lambda: t.GPTNeoXConfig(intermediate_size=128, **SIZE, **common),
        "llama-nf4": lambda: t.LlamaConfig(**WIDE, **common),
        "llama-bf16": lambda: t.LlamaConfig(**WIDE, **common),
    }
    return made[family]()


# Families in SLOW have quick tests with PPO in tests/ppo/test_trainer.py.
QUICK, SLOW = ("gpt2", "llama-nf4"), ("gpt_neox", "llama-bf16", "qwen3", "mistral", "gemma")


@pytest.fixture(params=[*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)])
def train(request, tmp_path_factory):
    """Returns train(stage, *settings, **inputs) -> (metrics, adapter folder) for a tiny random model of a family."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(ROOT / "jobs/demo/model"))
    family = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = config_of(request.param, len(tokenizer), tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(family)
    tokenizer.save_pretrained(family)
    model = [f"model.name_or_path={family}", "data.max_length=100", "lora.r=4", "model.dtype=float32"]
    # The base is in 4 bits or in bfloat16. The adapters are in float32.
    model += {"nf4": ["model.load_in_4bit=true"], "bf16": ["trainer.bf16=true"]}.get(request.param[6:], [])

    def run(stage, *settings, **inputs):
        size = (
            ["trainer.total_episodes=8", "trainer.batch_size=4", "trainer.response_length=8", "trainer.save_steps=0"]
            if stage == "ppo"
            else ["trainer.max_steps=2", "data.batch_size=4", "trainer.per_device_train_batch_size=4"]
        )  # fmt: skip
        sources = {role.replace("reward", "reward.0"): str(folder) for role, folder in inputs.items()}
        made = tmp_path_factory.mktemp(stage)
        outcome = alone.train(stage, made, *model, *size, *settings, inputs=sources)
        return outcome["metrics"], Path(outcome["adapter"])

    return run


def tensors_of(folder):
    """Returns an adapter's tensors. Asserts that fp32 training updated each B, which peft initializes to 0."""
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float32"}
    grown = [tensor for key, tensor in tensors.items() if "lora_B" in key]
    assert any(not tensor.equal(tensor.bfloat16().float()) for tensor in grown)
    assert all(bool(tensor.any()) for tensor in grown)
    return tensors


def test_every_stage_trains_an_adapter_that_reloads(train):
    metrics, sft = train("sft")
    start = tensors_of(sft)
    assert metrics["train_loss"] > 1
    _, rm = train("rm")
    assert any(key.endswith("score.weight") for key in tensors_of(rm))
    assert json.loads((rm / "lineage.json").read_text())["reward"]["std"] > 0
    metrics, dpo = train("dpo", "trainer.loss_type=[sigmoid]", "trainer.loss_weights=null", policy=sft)
    # the first loss is log 2, because policy and reference are the same adapter
    assert metrics["train_loss"] == pytest.approx(0.693, abs=0.05)
    tensors_of(dpo)
    tensors_of(train("kto", policy=sft)[1])
    metrics, ppo = train("ppo", policy=sft, reward=rm)
    assert metrics["episode"] == 8
    end = tensors_of(ppo)
    assert end.keys() == start.keys() and any(not end[key].equal(start[key]) for key in start)


@pytest.mark.parametrize("stage", ["rm", "ppo"])
def test_an_adapter_that_reloads_differently_is_refused(stage, tmp_path, monkeypatch):
    """Changes a weight in the saved file, to simulate a lost head or a renamed key."""
    from pipeline.run.worker import lineage

    def spoil(folder, facts):
        tensors = load_file(f"{folder}/adapter_model.safetensors")
        lost = next(key for key in tensors if key.endswith("score.weight") or "lora_B" in key)
        save_file({**tensors, lost: tensors[lost] + 0.1}, f"{folder}/adapter_model.safetensors")

    monkeypatch.setattr(lineage, "write", spoil)
    inputs = {"reward.0": "python:bad_rewards:length"} if stage == "ppo" else {}
    says = r"does not reload as it was: row 0 differs by .*nothing was registered"
    with pytest.raises(RuntimeError, match=says):
        alone.train(stage, tmp_path, inputs=inputs)
