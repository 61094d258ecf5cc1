"""Tests that a base is loaded completely and with frozen weights, and that different bases have different digests."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import toy_data
import toy_models
import toy_ppo as toy
from safetensors.torch import load_file

from pipeline.errors import InputError
from pipeline.models import base as base_module
from pipeline.models.base import base_identity, check_base, load_base, score_head
from pipeline.models.tokenizer import load_tokenizer

FAMILIES = ("gpt2", "qwen3", "mistral", "gemma")


def settings(folder, **changes) -> SimpleNamespace:
    return toy_models.settings(folder, **{"dtype": "float32", "load_in_4bit": False, **changes})


def make_model(folder: Path, family: str) -> Path:
    """Saves a small random model with a byte tokenizer."""
    tokenizer = toy_data.tokenizer()
    tokenizer.save_pretrained(folder)
    special = {
        "pad_token_id": None,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    toy.base(family, vocab_size=len(tokenizer), intermediate_size=64, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture
def copied(folders, tmp_path) -> Path:
    """Copies the folder of the Mistral model, so that a test may change the copy."""
    return Path(shutil.copytree(folders["mistral"], tmp_path / "mistral"))


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "float32") for family in FAMILIES), ("qwen3", "bfloat16")]
)
def test_a_base_and_a_reward_model_are_loaded_frozen_and_without_dropout(folders, family, dtype):
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    model = load_base(settings(folders[family], dtype=dtype)).train()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(model(ids).logits, model(ids).logits)  # without dropout, even in train mode
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert not any(
        "drop" in key and value for key, value in model.config.to_dict().items() if isinstance(value, float)
    )

    scorer = load_base(settings(folders[family], dtype=dtype), load_tokenizer(str(folders[family])))
    assert not any(parameter.requires_grad for parameter in scorer.parameters())
    assert score_head(scorer).weight.dtype == torch.float32 and score_head(scorer).weight.shape == (1, 32)
    pad = scorer.config.pad_token_id
    assert pad is not None and pad != scorer.config.eos_token_id
    scores = scorer(ids).logits
    assert scores.dtype == torch.float32 and scores.shape == (2, 1)
    padded = torch.cat([ids, torch.full((2, 3), pad)], dim=1)
    torch.testing.assert_close(
        scorer(padded).logits, scores, atol=2e-2 if dtype == "bfloat16" else 1e-5, rtol=0
    )


def test_the_head_of_a_reward_model_computes_in_fp32_under_autocast(folders):
    """If scores were rounded to bf16, many pairs would have equal scores, and such pairs count as wrong."""
    scorer = load_base(settings(folders["qwen3"], dtype="bfloat16"), load_tokenizer(str(folders["qwen3"])))
    scorer = peft.get_peft_model(scorer, peft.LoraConfig(task_type="SEQ_CLS", r=2))
    head = score_head(scorer.base_model.model).modules_to_save["default"]
    head.weight.data.fill_(0.5)
    seen = []
    head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        scores = scorer(torch.randint(5, 200, (16, 8))).logits
    exact = seen[0][:, -1].double().sum(-1, keepdim=True) / 2
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    scores.sum().backward()
    assert head.weight.grad.dtype == torch.float32 and head.weight.grad.abs().sum() > 0


def test_a_base_can_be_quantized_on_a_cpu(folders):
    ids = torch.tensor([[5, 6, 7, 8]])
    model = load_base(settings(folders["qwen3"], load_in_4bit=True))
    quantized = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in quantized
    before = model(ids).logits
    assert torch.isfinite(before).all()
    # In a forward pass without gradients, bitsandbytes may repack the weights.
    # A repacked model must compute the same logits in train mode.
    torch.testing.assert_close(model.train()(ids).logits, before)
    scorer = load_base(settings(folders["qwen3"], load_in_4bit=True), load_tokenizer(str(folders["qwen3"])))
    assert type(score_head(scorer)).__name__ != "Linear4bit" and scorer(ids).logits.shape == (1, 1)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_copy_has_the_same_digest_and_other_weights_have_another(folders, copied, sampled, monkeypatch):
    if sampled:  # for files larger than a GiB, only samples of the file are hashed
        monkeypatch.setattr(base_module, "WHOLE_FILE_BYTES", 1000)
        monkeypatch.setattr(base_module, "SAMPLE_BYTES", 64)
    before = base_identity(str(copied))
    assert before["digest"] == base_identity(str(folders["mistral"]))["digest"]
    assert before["context_length"] == 128 and before["architecture"] == "MistralForCausalLM"
    file = copied / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert base_identity(str(copied))["digest"] != before["digest"]


def test_a_base_whose_end_token_was_never_trained_is_rejected(folders):
    model, tokenizer = load_base(settings(folders["qwen3"])), load_tokenizer(str(folders["qwen3"]))
    base_module.check_ends(model, tokenizer, {tokenizer.eos_token_id})
    weight = model.get_output_embeddings().weight
    weight[7] = weight[tokenizer.eos_token_id].clone()
    weight[9] = weight[7] * 1.001
    with pytest.raises(InputError, match=r"same row for '</s>', .* as for 2 other tokens"):
        base_module.check_ends(model, tokenizer, {tokenizer.eos_token_id})
    # Tokens may have equal rows in the lm head if all of these tokens end a completion.
    base_module.check_ends(model, tokenizer, {tokenizer.eos_token_id, 7, 9})


def test_pickled_weights_are_only_loaded_with_allow_pickle(copied):
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.allow_pickle=true"):
        check_base(settings(copied))
    with pytest.raises(InputError, match=r"no file named model\.safetensors"):
        load_base(settings(copied))
    assert load_base(settings(copied, allow_pickle=True)) is not None
    assert base_identity(str(copied))["digest"].startswith("sha256:")


def test_a_folder_that_is_not_a_base_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        base_identity(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="is an adapter, not a base"):
        base_identity(str(tmp_path))
    for content, says in (("{", "not valid JSON"), ('{"model_type": "llama"}', "has neither")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError, match=says):
            check_base(settings(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}')
    with pytest.raises(InputError, match=r"contains custom code .*model\.trust_remote_code=true"):
        load_base(settings(tmp_path))
