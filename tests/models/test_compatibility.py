"""Tests the checks of a base's files against its config.json, and of a `lora` section against the base."""

import json
import os
import shutil
from pathlib import Path

import pytest
from toy_models import DEMO, settings

from pipeline.errors import InputError
from pipeline.models.base import check_base, load_base
from pipeline.models.compatibility import INDEX, SINGLE, Base, check_lora, shapes_in

UP = "model.layers.2.mlp.up_proj.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"


@pytest.fixture
def base(tmp_path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "base"))


def load(folder, **changes):
    return load_base(settings(folder, dtype="float32", load_in_4bit=False, **changes))


def rename(base: Path, weight_map) -> None:
    (base / SINGLE).rename(base / "a.safetensors")
    if weight_map:
        (base / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def replace_by_dead_link(base: Path, file: str) -> None:
    (base / file).unlink()
    os.symlink("/nowhere", base / file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda base: (base / SINGLE).write_bytes(LFS), rf"/{SINGLE}: not a complete safetensors file .*; fetch or save"),
        (lambda base: replace_by_dead_link(base, "config.json"), r"/config\.json: cannot be read \(No such file"),
        (lambda base: rename(base, {"a": "b.safetensors"}), r"/b\.safetensors: not a complete .*No such file"),
        (lambda base: rename(base, None), rf"has neither {SINGLE} nor {INDEX}; fetch"),
    ],
    ids=["Git LFS", "dead link", "index", "another name"],
)  # fmt: skip
def test_a_damaged_file_is_named(change, says, base):
    change(base)
    with pytest.raises(InputError, match=rf"^model\.name_or_path: .*{says}"):
        check_base(settings(base))


def test_weights_in_several_files_are_found_by_their_index(base):
    whole = shapes_in(base / SINGLE)
    rename(base, dict.fromkeys(whole, "a.safetensors"))
    assert check_base(settings(base)).shapes == whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "nope"}, "model type `nope`"),
        (
            {"num_hidden_layers": 5},
            r"9 tensors are missing or have another shape, for example model\.layers\.4\.",
        ),
        ({"vocab_size": 100}, r"model\.embed_tokens\.weight \(another shape\)"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_an_error_of_the_base(changes, says, base):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=rf"^model\.name_or_path: .*{says}"):
        load(base)


def test_an_unknown_attention_is_an_error_of_its_key(base):
    says = r"^model\.attn_implementation: .*not supported.*attn_implementation=sdpa"
    with pytest.raises(InputError, match=says):
        load(base, attn_implementation="nope")


# ---------------------------------------------------------------------------------------------------------- lora


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_modules": ["q_proj", "k_prj"]}, r"target_modules: 'k_prj' matches no module .*expected some of .*q_proj"),
        ({"target_modules": ".*nope"}, r"target_modules: '\.\*nope' matches no module"),
        ({"rank_pattern": {"nope": 2}}, r"rank_pattern: 'nope' matches no module"),
        ({"alpha_pattern": {"((": 2}}, r"alpha_pattern: '\(\(' is no regular expression"),
        ({"target_modules": []}, r"target_modules: found \[\], so no module would be adapted; expected some of .*q_proj"),
        ({"target_modules": ["q_proj"], "exclude_modules": ".*"}, "target_modules: found .*, so no module would be adapted"),
        ({"target_modules": ["embed_tokens"]}, "target_modules: adapts embed_tokens, which this base ties to its lm head"),
        ({"target_modules": "lm_head"}, "target_modules: adapts lm_head, which this base ties to its embeddings"),
        ({"lora_bias": True}, r"lora_bias: adds a bias to \w+_proj, which has none in this base"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 7]}, "layers_to_transform: found 7, but these modules have layers 0 to 3"),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "h"}, "layers_to_transform: found 0, but these modules have no layers of that name"),
    ],
    ids=str,
)  # fmt: skip
def test_lora_settings_that_do_not_fit_the_base_are_rejected(changes, says):
    with pytest.raises(InputError, match=rf"^lora\.{says}"):
        check_lora(check_base(settings(DEMO)), {"target_modules": "all-linear", **changes})


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["layers.0.mlp.up_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 3], "layers_pattern": "layers"},
        {"target_modules": "all-linear", "exclude_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}},
    ],
    ids=str,
)
def test_lora_settings_that_fit_the_base_are_accepted(lora):
    check_lora(check_base(settings(DEMO)), lora)


def test_embeddings_and_biases_may_be_adapted_if_they_can_be_merged():
    good = check_base(settings(DEMO))
    untied = Base(good.model, {**good.config, "tie_word_embeddings": False}, good.shapes)
    embeddings = {"target_modules": ["embed_tokens"]}
    check_lora(untied, embeddings)
    check_lora(good, embeddings, scores=True)  # a reward model has no lm head
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in good.shapes.items()}
    check_lora(Base(good.model, good.config, {**good.shapes, **biases}), {"lora_bias": True})
    # If config.json lacks tie_word_embeddings, a base counts as tied if its weight files have no lm head.
    config = {key: value for key, value in good.config.items() if key != "tie_word_embeddings"}
    assert Base(good.model, config, good.shapes).tied
    assert not Base(good.model, config, {**good.shapes, "lm_head.weight": (9, 9)}).tied


def test_names_that_transformers_may_change_are_not_checked():
    """transformers merges separate experts into one tensor, and renames weights of quantized and multimodal models."""
    good = check_base(settings(DEMO))
    experts = {"model.layers.0.mlp.experts.0.up_proj.weight": good.shapes[UP]}
    for config, shapes in (
        ({"text_config": {"vocab_size": 3}}, good.shapes),
        ({"quantization_config": {"bits": 4}}, good.shapes),
        ({}, {**good.shapes, **experts}),
        ({}, {}),  # as if the weight files were not on this machine
    ):
        check_lora(Base(good.model, config, shapes), {"target_modules": ["nope"]})
