"""A base's files against its config.json, and a `lora` section against the base, from the headers of the files."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_models import DEMO, settings

from pipeline.errors import InputError
from pipeline.models.base import check_base, load_base
from pipeline.models.compatibility import Base, check_lora, check_weights
from pipeline.models.weights import INDEX, SINGLE, stored_in

UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "base"))


def rejected(folder, says, **changes) -> None:
    with pytest.raises(InputError, match=rf"^model\.name_or_path: .*{says}"):
        check_base(settings(folder, **changes))


GOOD = (DEMO / SINGLE).read_bytes()
BYTES = {
    "data cut": GOOD[:-10],
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n",
}


@pytest.mark.parametrize("kind", BYTES)
def test_a_damaged_file_is_named(kind, base):
    (base / SINGLE).write_bytes(BYTES[kind])
    rejected(
        base,
        r"/base/model\.safetensors: not a complete safetensors file of \d+ bytes .*; fetch or save the model again",
    )


@pytest.mark.parametrize("file", [SINGLE, "config.json"])
def test_a_dead_link_is_named(file, base):
    (base / file).unlink()
    os.symlink("/nowhere", base / file)
    rejected(base, rf"/base/{file}: cannot be read \(.*No such file.*\); fetch or save")


FILES = {
    "a file that is missing": ({"a": "b.safetensors"}, r"/base/b\.safetensors: cannot be read"),
    "a tensor that is missing": ({"x": "a.safetensors"}, r"a\.safetensors: lacks 'x', which .*index\.json places there"),
    "layers that are missing": ({UP: "a.safetensors"}, "have 3 layers, and config.json promises 4"),
    "another name": (None, r"holds a\.safetensors, but neither model\.safetensors nor model\.safetensors\.index\.json"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_an_index_and_its_files_agree(kind, base):
    weight_map, says = FILES[kind]
    (base / SINGLE).rename(base / "a.safetensors")
    if weight_map:
        (base / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    rejected(base, says)


def test_an_index_that_is_right(base):
    whole = stored_in(base / SINGLE)
    (base / SINGLE).rename(base / "a.safetensors")
    (base / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(whole, "a.safetensors")}))
    assert check_base(settings(base)).tensors == whole


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_hidden_layers", 5, "have 4 layers, and config.json promises 5"),
        ("num_hidden_layers", 3, "have 4 layers, and config.json promises 3"),
    ],
)  # fmt: skip
def test_config_json_is_that_of_the_weights(key, value, says, base):
    """Without the check of the layers, transformers would silently train a model without its last one."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, key: value}))
    rejected(base, says)
    with pytest.raises(InputError, match=says):
        load_base(settings(base, dtype="float32", load_in_4bit=False))


def test_layers_that_predict_further_tokens_may_follow(base):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 3, "num_nextn_predict_layers": 1})
    )
    check_weights(settings(base))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "nope"}, "model type `nope`"),
        ({"model_type": "t5"}, "for this kind of AutoModel: AutoModelForCausalLM"),
        ({"hidden_act": "nope"}, "nope"),
        ({"num_attention_heads": "x"}, "num_attention_heads"),
        ({"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
        (
            {"vocab_size": 100},
            r"'model\.embed_tokens\.weight' has shape \(827, 128\) and config\.json promises \(100, 128\)",
        ),
        ({"num_key_value_heads": 4}, r"has shape \(64, 128\) and config\.json promises \(128, 128\)"),
    ],
)
def test_what_transformers_rejects_is_an_error_of_the_base(changes, says, base):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=rf"^model\.name_or_path: .*{says}"):
        load_base(settings(base, dtype="float32", load_in_4bit=False))


@pytest.mark.parametrize("wanted", ["nope", "flash_attention_2", "flex_attention"])
def test_attention_that_is_not_available(wanted, base):
    with pytest.raises(
        InputError, match=rf"^model\.attn_implementation: '{wanted}' cannot be used with llama here .*set"
    ):
        check_base(settings(base, attn_implementation=wanted))


# ---------------------------------------------------------------------------------------------------------- lora

LORA = [
    ({"target_modules": ["nope"]}, r"lora\.target_modules: 'nope' matches no module .*expected all-linear, or some of .*q_proj"),
    ({"target_modules": ["q_proj", "k_prj"]}, r"lora\.target_modules: 'k_prj' matches no module"),
    ({"target_modules": ".*nope"}, r"lora\.target_modules: '\.\*nope' matches no module"),
    ({"target_modules": ["input_layernorm"]}, r"lora\.target_modules: 'input_layernorm' matches no module"),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0, 4]}, r"lora\.layers_to_transform: found 4, but .* layers 0 to 3"),
    ({"exclude_modules": ["nope"]}, r"lora\.exclude_modules: 'nope' matches no module of this base; expected some of"),
    ({"exclude_modules": ".*"}, r"lora\.exclude_modules: '\.\*' excludes every module of lora\.target_modules"),
    ({"exclude_modules": r"model\.layers\..*"}, r"lora\.exclude_modules: .*excludes every module"),
    ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj", "q_proj"]}, r"lora\.exclude_modules: .*every module"),
    ({"rank_pattern": {"nope": 2}}, r"lora\.rank_pattern: 'nope' matches no module"),
    ({"alpha_pattern": {"((": 2}}, r"lora\.alpha_pattern: '\(\(' is no regular expression"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), LORA, ids=[str(c) for c, _ in LORA])
def test_settings_that_match_no_module(changes, says):
    with pytest.raises(InputError, match=rf"^{says}"):
        check_lora(check_base(settings(DEMO)), {"r": 4, "target_modules": "all-linear", **changes})


@pytest.mark.parametrize(
    "lora",
    [{}, {"target_modules": ["q_proj", "up_proj"]}, {"target_modules": r".*\.(q|v)_proj"}, {"target_modules": ["layers.0.mlp.up_proj"]},
     {"target_modules": ["lm_head", "embed_tokens"]},
     {"target_modules": "all-linear", "exclude_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}, "use_dora": True},
     {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
     {"target_modules": ["q_proj"], "layers_to_transform": [0, 3], "layers_pattern": "layers"}],
    ids=str,
)  # fmt: skip
def test_settings_that_match(lora):
    check_lora(check_base(settings(DEMO)), lora)


def test_names_that_transformers_may_change_are_left_to_peft():
    """Experts are stored one by one and trained as one tensor; quantized and multimodal models have other names, too."""
    good = check_base(settings(DEMO))
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight": good.tensors[UP]}
    for config, tensors in (
        ({"text_config": {"vocab_size": 3}}, good.tensors),
        ({"quantization_config": {"bits": 4}}, good.tensors),
        ({}, {**good.tensors, **experts}),
        ({}, {}),  # weights that are not on this machine
    ):
        check_lora(Base(good.model, config, tensors), {"target_modules": ["nope"]})


def test_shapes_of_gpt2_without_its_prefix():
    shaped = SimpleNamespace(shape=(768, 2304))
    files = Base(settings(DEMO), {}, {"h.0.attn.c_attn.weight": shaped})
    assert files.weight_shape("transformer.h.0.attn.c_attn") == (768, 2304)
    assert files.weight_shape("transformer.h.9.attn.c_attn") is None
