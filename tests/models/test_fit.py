"""A base's files against its config.json, and a `lora` section against the base: found from names and shapes alone."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running import ROOT
from safetensors.torch import load_file, save_file
from toy_models import DEMO, settings

from pipeline.errors import InputError
from pipeline.models import llama
from pipeline.models.fit import check_base, check_lora
from pipeline.models.weights import INDEX, SINGLE, stored_in_model

UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "base"))


def refused(folder, says, **changes) -> None:
    with pytest.raises(InputError, match=rf"^model\.name_or_path: .*{says}"):
        check_base(settings(folder, **changes))


# -------------------------------------------------------------------------------------------------- weight files


GOOD = (DEMO / SINGLE).read_bytes()
HUGE = struct.pack("<Q", 1 << 63)
BYTES = {
    "nothing": b"",
    "a few bytes": b"abc",
    "header cut": GOOD[:100],
    "header of 2**63 bytes": HUGE + GOOD[8:],
    "data cut": GOOD[:-10],
    "more data than tensors": GOOD + b"xx",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n",
}


@pytest.mark.parametrize("kind", BYTES)
def test_a_damaged_file_is_named(kind, base):
    (base / SINGLE).write_bytes(BYTES[kind])
    refused(
        base,
        r"/base/model\.safetensors: not a whole safetensors file of \d+ bytes .*; fetch or save the model again",
    )


def test_a_file_without_tensors(base):
    (base / SINGLE).write_bytes(struct.pack("<Q", 2) + b"{}")
    refused(base, r"model\.safetensors holds no tensors; fetch")


@pytest.mark.parametrize("file", [SINGLE, "config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("make", "says"),
    [(os.mkdir, "a folder"), (os.mkfifo, "no regular file"), (lambda at: os.symlink("/nowhere", at), "a link to '/nowhere'")],
    ids=["folder", "pipe", "dead link"],
)  # fmt: skip
def test_what_is_no_file_is_not_read(file, make, says, base):
    (base / file).unlink()
    make(base / file)
    refused(base, rf"/base/{file}: found {says}.*, expected a file; fetch or save")


TENSORS = {
    "missing": (lambda t: t.pop(UP), rf"1 of its tensors: '{UP}' is missing"),
    "no embedding": (lambda t: t.pop("model.embed_tokens.weight"), "2 of its tensors: 'lm_head.weight' is missing"),
    "transposed": (lambda t: t.update({UP: t[UP].T.contiguous()}), r"has shape \(128, 256\) and config.json promises \(256, 128\)"),
    "whole numbers": (lambda t: t.update({UP: t[UP].to(torch.int8)}), rf"tensor '{UP}' is of dtype I8, expected one of F64, F32"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_are_those_that_config_json_promises(kind, base):
    change, says = TENSORS[kind]
    tensors = load_file(base / SINGLE)
    change(tensors)
    save_file(tensors, base / SINGLE)
    refused(base, says)


def split(base, weight_map) -> None:
    (base / SINGLE).rename(base / "a.safetensors")
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (base / INDEX).write_text(text)


INDEXES = {
    "breaks off": ("{", "not valid JSON"),
    "a list": ("[1]", "found list, expected a JSON object"),
    "no map": ("{}", "`weight_map` is not a mapping"),
    "files that are numbers": ({"a": 1}, "`weight_map` is not a mapping"),
    "a file that is missing": ({"a": "b.safetensors"}, r"/base/b\.safetensors: found nothing"),
    "a tensor that is missing": ({"x": "a.safetensors"}, r"a\.safetensors: lacks 1 tensors that .*index\.json places there, 'x'"),
    "a way out": ({"a": "../../../etc/passwd"}, r"names the file '\.\./.*expected a \.safetensors file beside it"),
    "a part of the tensors": ({UP: "a.safetensors"}, "num_hidden_layers=4, and its weight files hold 1 tensors in all"),
}  # fmt: skip


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_and_its_files_agree(kind, base):
    content, says = INDEXES[kind]
    split(base, content)
    refused(base, says)


def test_an_index_that_is_right(base):
    split(base, dict.fromkeys(stored_in_model(base), "a.safetensors"))
    assert check_base(settings(base)).plain


def test_files_under_other_names(base):
    (base / SINGLE).rename(base / "weights.safetensors")
    refused(
        base,
        r"holds weights\.safetensors, but neither model\.safetensors nor model\.safetensors\.index\.json",
    )


# --------------------------------------------------------------------------------------------------- config.json

CONFIG = [
    ("vocab_size", [0, -1, True, 1.5, "827", 10**12], r"vocab_size: found .*expected a whole number from 1 to 16777216"),
    ("vocab_size", [100], r"'model\.embed_tokens\.weight' has shape \(827, 128\) and config\.json promises \(100, 128\)"),
    ("hidden_size", [130], r"hidden size \(130\) is not a multiple of the number of attention heads"),
    ("hidden_size", [256], "misshape 38 of its tensors"),
    ("num_hidden_layers", [10**9], r"num_hidden_layers: found 1000000000, expected a whole number from 1 to 10000"),
    ("num_hidden_layers", [9999], r"num_hidden_layers=9999, and its weight files hold 38 tensors in all"),
    ("num_hidden_layers", [5], r"9 of its tensors: 'model\.layers\.4"),
    ("num_key_value_heads", [4], r"has shape \(64, 128\) and config\.json promises \(128, 128\)"),
    ("tie_word_embeddings", [False], r"'lm_head\.weight' is missing"),
    ("model_type", ["nope"], "names model_type 'nope', unknown here"),
    ("model_type", [5], "model_type: found 5, expected a str"),
    ("model_type", ["gpt2"], "lack or misshape 53 of its tensors: 'lm_head.weight' is missing"),
    ("model_type", ["t5"], "cannot be loaded as AutoModelForCausalLM"),
    ("hidden_act", ["nope"], "transformers cannot make a model of .*nope"),
    ("rms_norm_eps", [0, -1, "x", float("inf")], "rms_norm_eps: found .*expected a finite number above 0"),
    ("rms_norm_eps", [float("nan")], r"/base/config\.json: not valid JSON .*NaN"),
    ("rope_parameters", [{"rope_type": "default", "rope_theta": -1.0}], "rope_theta: found -1.0, expected a finite number"),
    ("rope_parameters", [5, {"rope_type": "nope"}], "transformers cannot make a model of "),
    ("pad_token_id", [10**6], "transformers cannot make a model of .*Padding_idx"),
    ("architectures", [5], "architectures: found 5, expected a list"),
    ("text_config", [5], "text_config: found 5, expected a dict"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [(k, v, s) for k, values, s in CONFIG for v in values],
    ids=[f"{k}={v}" for k, values, _ in CONFIG for v in values],
)
def test_config_json_is_that_of_the_weights(key, value, says, base):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, key: value}))
    refused(base, says)


@pytest.mark.parametrize(
    "content", [b"", b'{"a":', b'{"a": "\xff"}', b"[1]", b'{"a":' * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"],
    ids=["nothing", "cut", "not UTF-8", "a list", "deep", "huge number"],
)  # fmt: skip
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_json_that_is_none(file, content, base):
    (base / file).write_bytes(content)
    refused(base, rf"/base/{file}: (not valid JSON|found list)")


def test_a_generation_config_that_transformers_refuses(base):
    (base / "generation_config.json").write_text('{"cache_implementation": "nope"}')
    refused(base, "transformers cannot make a model of .*cache_implementation")


@pytest.mark.parametrize("wanted", ["nope", "flash_attention_2", "flex_attention", ""])
def test_attention_that_is_not_to_be_had(wanted, base):
    with pytest.raises(
        InputError, match=rf"^model\.attn_implementation: '{wanted}' cannot be used with llama here .*type"
    ):
        check_base(settings(base, attn_implementation=wanted))
    check_base(settings(base, attn_implementation="eager"))


def test_a_plain_llama_is_what_transformers_makes_of_it():
    """The shortcut says what the library would say; what it does not know, it leaves to the library."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((DEMO / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO))
    named = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert llama.layout(config) == named
    linear = {n.rpartition(".")[2] for n, m in model.model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear == llama.LINEAR
    for changes in ({"model_type": "mistral"}, {"attention_bias": True}, {"head_dim": None}, {"further": 1}):
        assert llama.layout({**config, **changes}) is None


def test_a_good_base_costs_no_torch():
    code = (
        "import sys\nfrom types import SimpleNamespace\nfrom pipeline.models.fit import check_base, check_lora\n"
        f"base = check_base(SimpleNamespace(**{vars(settings(DEMO))!r}))\n"
        "check_lora(base, {'r': 4, 'target_modules': 'all-linear'}, scorer=True)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ---------------------------------------------------------------------------------------------------------- lora

LORA = [
    ({"target_modules": ["nope"]}, r"lora\.target_modules: 'nope' matches no module .*expected all-linear, or some of .*q_proj"),
    ({"target_modules": ["q_proj", "k_prj"]}, r"lora\.target_modules: 'k_prj' matches no module"),
    ({"target_modules": ".*nope"}, r"lora\.target_modules: '\.\*nope' matches no module"),
    ({"target_modules": "(("}, r"lora\.target_modules: '\(\(' is no regular expression"),
    ({"target_modules": ["input_layernorm"]}, r"lora\.target_modules: 'input_layernorm' matches no module"),
    ({"target_modules": []}, r"lora: peft refuses these settings .*target_modules"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0, 4]}, r"lora\.layers_to_transform: found 4, but .* layers 0 to 3"),
    ({"target_modules": ["q_proj"], "layers_to_transform": -1}, r"lora\.layers_to_transform: found -1"),
    ({"exclude_modules": ["nope"]}, r"lora\.exclude_modules: 'nope' matches no module of this base; expected some of"),
    ({"exclude_modules": ".*"}, r"lora: peft refuses these settings .*All modules were excluded"),
    ({"rank_pattern": {"nope": 2}}, r"lora: peft refuses these settings .*rank_pattern .*'nope'"),
    ({"alpha_pattern": {"nope": 2}}, r"lora: peft refuses these settings .*alpha_pattern .*'nope'"),
    ({"alpha_pattern": {"((": 2}}, r"lora\.alpha_pattern: '\(\(' is no regular expression"),
    ({"rank_pattern": {"q_proj": "x"}}, r"lora: peft refuses these settings"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), LORA, ids=[str(c) for c, _ in LORA])
@pytest.mark.parametrize("scorer", [False, True])
def test_settings_that_find_no_module(changes, says, scorer):
    with pytest.raises(InputError, match=rf"^{says}"):
        check_lora(check_base(settings(DEMO)), {"r": 4, "target_modules": "all-linear", **changes}, scorer)


@pytest.mark.parametrize(
    "lora",
    [{}, {"target_modules": ["q_proj", "up_proj"]}, {"target_modules": r".*\.(q|v)_proj"}, {"target_modules": ["layers.0.mlp.up_proj"]},
     {"target_modules": "all-linear", "exclude_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}, "use_dora": True},
     {"target_modules": ["q_proj"], "layers_to_transform": [0, 3], "layers_pattern": "layers"}],
    ids=str,
)  # fmt: skip
def test_settings_that_find_theirs(lora):
    check_lora(check_base(settings(DEMO)), lora, scorer=False)
