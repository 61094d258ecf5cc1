"""Tests that transformers 4 loads the same models and tokenizers from the saved files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.models import transformers4
from pipeline.models.tokenizer import load_tokenizer, tokenizer_digest

OLD = ["transformers==4.57.6", "tokenizers==0.22.1", "huggingface_hub==0.36.0"]
SIZE = dict(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
GEMMA = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8, "attn_implementation": "eager"}
# {case: (model type, its keys in config.json on the Hub)}
FAMILIES = {
    "llama": ("llama", {"rope_theta": 500000.0, "rope_scaling": None}),
    "llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 128}}),
    "gemma3": ("gemma3_text", {
        "rope_theta": 9e5, "rope_local_base_freq": 15000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2, **GEMMA,
    }),
    "phi3-long": ("phi3", {"rope_theta": 2e4, "original_max_position_embeddings": 64, "rope_scaling": LONG}),
    "phi": ("phi", {"rope_theta": 2e4, "partial_rotary_factor": 0.5}),
    "neox": ("gpt_neox", {"rotary_emb_base": 25000, "rotary_pct": 0.5}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}  # fmt: skip


def saved(case, folder):
    """Saves a model in two folders.

    In `kept`, old keys come from the base's config. In `made`, old keys are converted from new keys.
    """
    model_type, keys = FAMILIES[case]
    base = {**SIZE, "model_type": model_type, "torch_dtype": "float32", **keys}
    (folder / "base").mkdir(parents=True)
    (folder / "base/config.json").write_text(json.dumps(base))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=keys.get("attn_implementation"))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = 0.3 * torch.randn(parameter.shape)
    forms = {form: folder / form for form in ("kept", "made")}
    for form, place in forms.items():
        model.save_pretrained(place)
        transformers4.add_old_names(place, base if form == "kept" else {})
    return model.eval(), base, forms


@pytest.mark.parametrize("case", FAMILIES)
def test_a_saved_config_has_the_names_of_both_versions(case, tmp_path):
    model, base, forms = saved(case, tmp_path)
    for form, folder in forms.items():
        found = json.loads((folder / "config.json").read_text())
        for key, value in base.items():
            if transformers4.OF_ROPE.search(key) or key == "torch_dtype":
                assert found[key] == value, (form, key)
        again = AutoModelForCausalLM.from_pretrained(folder)
        new = getattr(model.config, "rope_parameters", None)
        assert getattr(again.config, "rope_parameters", None) == new
        assert again.dtype == torch.float32


def test_a_model_needs_transformers_5_if_its_base_was_saved_by_it():
    assert transformers4.oldest_version({"transformers_version": "4.40.0.dev0"}) == "4.57"
    assert transformers4.oldest_version({"transformers_version": "5.23.0"}) == "5.0"
    assert transformers4.oldest_version({"rope_parameters": {}}) == "5.0"


def tokenizer_of(folder, **settings):
    """Returns the demo's tokenizer with changed settings, and saves it in the folder `saved`."""
    demo = ROOT / "jobs/demo/model"
    shutil.copytree(demo, folder / "base")
    given = json.loads((demo / "tokenizer_config.json").read_text())
    (folder / "base/tokenizer_config.json").write_text(json.dumps(given | settings))
    tokenizer = load_tokenizer(str(folder / "base"))
    transformers4.save_tokenizer(tokenizer, folder / "saved")
    return tokenizer


TOKENIZERS = {
    "plain": {},
    "qwen2": {"tokenizer_class": "Qwen2Tokenizer"},
    "extra": {"additional_special_tokens": ["<|eot_id|>", "<|start_header_id|>"]},
}


@pytest.mark.parametrize("settings", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_tokenizer_is_saved_with_a_class_that_both_versions_have(settings, tmp_path):
    tokenizer = tokenizer_of(tmp_path, **settings)
    written = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["model_input_names"] == ["input_ids", "attention_mask"]
    assert "extra_special_tokens" not in written
    shutil.copy(tmp_path / "base/config.json", tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert tokenizer_digest(again) == tokenizer_digest(tokenizer)
    assert again.all_special_tokens == tokenizer.all_special_tokens


LOAD = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
assert __version__ == "4.57.6", __version__
folder = Path(sys.argv[1])
ids, differences = torch.load(folder / "ids.pt"), {}
for logits in sorted(folder.glob("*/logits.pt")):
    eager = {"attn_implementation": "eager"} if logits.parent.name.startswith("gemma") else {}
    for form in ("kept", "made"):
        model = AutoModelForCausalLM.from_pretrained(logits.parent / form, torch_dtype="auto", **eager).eval()
        with torch.no_grad():
            off = (model(ids).logits - torch.load(logits)).abs().max().item()
        differences[f"{logits.parent.name} {form}"] = off
for text in sorted(folder.glob("*/text.json")):
    tokenizer = AutoTokenizer.from_pretrained(text.parent / "saved")
    words, expected, special = json.loads(text.read_text())
    got = dict(tokenizer(words))
    differences[text.parent.name] = float(got != expected or sorted(tokenizer.all_special_tokens) != special)
print(json.dumps(differences))
"""


@pytest.mark.slow
def test_transformers_4_computes_the_same(tmp_path):
    """Installs transformers 4 from PyPI into a temporary folder."""
    old = tmp_path / "old"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(old), *OLD]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip does not install {OLD[0]}: {done.stderr[-200:]}")
    ids = torch.randint(3, 300, (1, 175), generator=torch.Generator().manual_seed(0))
    torch.save(ids, tmp_path / "ids.pt")
    for case in FAMILIES:
        model, _, _ = saved(case, tmp_path / case)
        with torch.no_grad():
            torch.save(model(ids).logits, tmp_path / case / "logits.pt")
    words = "What is 17 plus 25? <|eot_id|> été\n"
    for name, settings in TOKENIZERS.items():
        folder = tmp_path / f"tokenizer-{name}"
        folder.mkdir()
        tokenizer = tokenizer_of(folder, **settings)
        Path(folder, "text.json").write_text(
            json.dumps([words, dict(tokenizer(words)), sorted(tokenizer.all_special_tokens)])
        )
    environment = {**os.environ, "PYTHONPATH": str(old), "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 2 * len(FAMILIES) + len(TOKENIZERS)
    assert {name: off for name, off in differences.items() if off} == {}
