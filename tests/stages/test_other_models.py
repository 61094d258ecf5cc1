"""Nothing assumes Llama: tiny random models of other families, and an nf4 base, go through all stages.

The stages' own `train` functions run in this process, without Ray and MLflow.
"""

import json
from pathlib import Path

import alone
import pytest
from running import ROOT

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
WIDE = SIZE | {"intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 32}


def config_of(family, vocabulary, eos):
    import transformers as t

    common = {"vocab_size": vocabulary, "eos_token_id": eos, "bos_token_id": None, "pad_token_id": None}
    made = {
        # absolute positions, tied
        "gpt2": lambda: t.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, **common),
        "qwen3": lambda: t.Qwen3Config(tie_word_embeddings=True, **WIDE, **common),
        "mistral": lambda: t.MistralConfig(sliding_window=None, **WIDE, **common),
        "gemma": lambda: t.GemmaConfig(**WIDE, **common),
        # its head is called embed_out
        "gpt_neox": lambda: t.GPTNeoXConfig(intermediate_size=128, **SIZE, **common),
        "llama-nf4": lambda: t.LlamaConfig(**WIDE, **common),
        "llama-bf16": lambda: t.LlamaConfig(**WIDE, **common),
    }
    return made[family]()


@pytest.fixture(
    scope="module", params=["gpt2", "qwen3", "mistral", "gemma", "gpt_neox", "llama-nf4", "llama-bf16"]
)
def family(request, tmp_path_factory):
    """(name, folder of a tiny random model of that family with the demo's tokenizer)."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(ROOT / "jobs/demo/model"))
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = config_of(request.param, len(tokenizer), tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, folder


@pytest.fixture(scope="module")
def train(family, tmp_path_factory):
    """train(stage, *settings, **inputs) -> (outcome, adapter folder)."""
    name, folder = family
    model = [f"model.name_or_path={folder}", "data.max_length=100", "lora.r=4"]
    if name.endswith("nf4"):
        model += ["model.load_in_4bit=true", "model.dtype=float32"]
    if name.endswith("bf16"):  # a base in bfloat16 under adapters in float32
        model += ["trainer.bf16=true", "model.dtype=float32"]

    def run(stage, *settings, **inputs):
        size = (
            ["trainer.total_episodes=8", "trainer.batch_size=4", "trainer.response_length=8", "trainer.save_steps=0"]
            if stage == "ppo"
            else ["trainer.max_steps=2", "data.batch_size=4", "trainer.per_device_train_batch_size=4"]
        )  # fmt: skip
        sources = {role.replace("reward", "reward.0"): str(folder) for role, folder in inputs.items()}
        made = tmp_path_factory.mktemp(stage)
        outcome = alone.train(stage, made, *model, *size, *settings, inputs=sources)
        return outcome, Path(outcome["adapter"])

    return run


@pytest.fixture(scope="module")
def sft(train):
    return train("sft")


@pytest.fixture(scope="module")
def rm(train):
    return train("rm")


def moved(folder):
    """Whether training changed the adapter, in fp32, not rounded to bf16: peft starts every B at 0."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    grown = [tensor for key, tensor in tensors.items() if "lora_B" in key]
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in grown)
    return all(bool(tensor.any()) for tensor in grown)


def test_sft_trains_and_reloads(sft):
    outcome, folder = sft
    assert outcome["metrics"]["train_loss"] > 1
    assert moved(folder)


def test_rm_trains_its_head_and_reloads(rm):
    from safetensors.torch import load_file

    _, folder = rm
    assert moved(folder)
    assert any(key.endswith("score.weight") for key in load_file(folder / "adapter_model.safetensors"))
    reward = json.loads((folder / "lineage.json").read_text())["reward"]
    assert reward["std"] > 0


def test_dpo_continues_the_sft_adapter(train, sft):
    sigmoid_alone = ["trainer.loss_type=[sigmoid]", "trainer.loss_weights=null"]
    outcome, folder = train("dpo", *sigmoid_alone, policy=sft[1])
    # the first loss is log 2: policy and reference are the same adapter
    assert outcome["metrics"]["train_loss"] == pytest.approx(0.693, abs=0.05)
    assert moved(folder)
    assert moved(train("kto", policy=sft[1])[1])


def test_ppo_runs_on_the_shared_base(train, sft, rm):
    from safetensors.torch import load_file

    outcome, folder = train("ppo", policy=sft[1], reward=rm[1])
    assert outcome["metrics"]["episode"] == 8
    before, after = (load_file(path / "adapter_model.safetensors") for path in (sft[1], folder))
    assert before.keys() == after.keys()
    assert any(not bool((before[key] == after[key]).all()) for key in before)


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "ppo"])
def test_an_adapter_that_reloads_otherwise_is_refused(stage, train, sft, rm, monkeypatch):
    """What a lost head or a renamed key does: the file holds other numbers than the trained adapter."""
    from safetensors.torch import load_file, save_file

    from pipeline.runtime.worker import lineage

    def spoil(folder, facts):
        tensors = load_file(f"{folder}/adapter_model.safetensors")
        lost = next(key for key in tensors if key.endswith("score.weight") or "lora_B" in key)
        save_file({**tensors, lost: tensors[lost] + 0.1}, f"{folder}/adapter_model.safetensors")

    monkeypatch.setattr(lineage, "write", spoil)
    inputs = {"dpo": {"policy": sft[1]}, "ppo": {"policy": sft[1], "reward": rm[1]}}.get(stage, {})
    with pytest.raises(
        RuntimeError, match=r"does not reload as it was: row 0 differs by .*nothing was registered"
    ):
        train(stage, **inputs)
