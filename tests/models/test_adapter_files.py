"""The folder of an adapter against a base: damaged, contradictory and foreign files are named before anything is loaded."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy_models
from safetensors.numpy import load_file, save_file
from toy_models import DEMO, settings

from pipeline.errors import InputError
from pipeline.models import adapter_files
from pipeline.models.base import check_base
from pipeline.models.files import SETTINGS, TENSORS
from pipeline.registry import lineage

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
HEAD = "base_model.model.score.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("made")
    for name, head in (("policy", False), ("reward", True)):
        toy_models.make(str(folder / name), seed=0, head=head)
    return {name: folder / name for name in ("policy", "reward")}


@pytest.fixture
def policy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made["policy"], tmp_path / "policy"))


def rejected(folder: Path, says: str) -> None:
    with pytest.raises(InputError, match=rf"^.*/{folder.name}.*{says}"):
        adapter_files.check(check_base(settings(DEMO)), folder, scores=folder.name == "reward")


@pytest.mark.parametrize(
    "extra",
    [
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"lora_bias": True},
    ],
    ids=str,
)
def test_other_kinds_of_lora_fit_too(extra, tmp_path):
    shared = toy_models.shared_base()
    shared.add("policy", lora={"r": 4, "target_modules": "all-linear", **extra})
    shared.save("policy", tmp_path)
    adapter_files.check(check_base(settings(DEMO)), tmp_path, scores=False)


# ------------------------------------------------------------------------------------------- settings and tensors


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_type", "IA3", r"peft_type is 'IA3'; expected 'LORA'"),
        ("peft_type", None, r"peft_type is None; expected 'LORA'"),
        ("r", None, r"/adapter_config\.json: r: found None, expected an integer of at least 1"),
        (
            "r",
            8,
            r"/adapter_model\.safetensors: .*lora_A\.weight is of rank 4, but adapter_config\.json says r=8",
        ),
        ("trainable_token_indices", [1], "trainable_token_indices: found .*changes what all roles share"),
    ],
)
def test_settings_are_those_of_the_tensors(key, value, says, policy):
    changed_settings(policy, {key: value})
    rejected(policy, says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_modules": ["nope"]}, "peft rejects these settings"),
        ({"target_modules": ["q_proj"]}, "48 tensors differ, for example .*, and this base takes none"),
        ({"modules_to_save": ["embed_tokens"]}, "which all roles share"),
        ({"bias": "all"}, "which all roles share"),
        ({"use_dora": True}, "tensors differ, for example .*lora_magnitude_vector has shape none"),
        ({"task_type": "NOPE"}, r"/adapter_config\.json: peft rejects it"),
        ({"init_lora_weights": "x"}, "peft rejects these settings"),
    ],
    ids=str,
)
def test_what_only_peft_knows_is_found_when_it_is_loaded(change, says, policy):
    """The message names the folder, and the role is removed again."""
    changed_settings(policy, change)
    shared = toy_models.shared_base()
    before = sum(p.numel() for p in shared.parameters())
    with pytest.raises(InputError, match=rf"/{policy.name}.*{says}"):
        shared.add("policy", folder=policy)
    assert not shared.roles and sum(p.numel() for p in shared.parameters()) == before


def changed_settings(folder: Path, change: dict) -> None:
    content = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps({**content, **change}))


CONTENTS = {"cut": b'{"a":', "not UTF-8": b'{"a": "\xff"}', "a list": b"[1]", "NaN": b'{"a": NaN}'}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("file", [SETTINGS, "lineage.json"])
def test_json_that_is_none(file, kind, policy):
    (policy / file).write_bytes(CONTENTS[kind])
    with pytest.raises(InputError, match=rf"^.*/policy/{file}: (not valid JSON|found list)"):
        lineage.read(str(policy), "policy")
        adapter_files.check(check_base(settings(DEMO)), policy, scores=False)


@pytest.mark.parametrize("cut", [0, 200, -10])
def test_a_file_that_breaks_off(cut, policy):
    content = (policy / TENSORS).read_bytes()
    (policy / TENSORS).write_bytes(content[:cut])
    rejected(
        policy,
        r"/adapter_model\.safetensors: not a complete safetensors file of \d+ bytes .*; save the adapter again",
    )


TENSORS_OF = {
    "NaN": ("policy", lambda t: t[A].__setitem__((0, 0), np.nan), "q_proj.lora_A.weight holds NaN or infinity"),
    "infinity": ("policy", lambda t: t[B].__setitem__((0, 0), np.inf), "q_proj.lora_B.weight holds NaN or infinity"),
    "NaN in half precision": ("policy", lambda t: t.update({A: np.full((4, 128), np.nan, np.float16)}), "holds NaN or infinity"),
    "whole numbers": ("policy", lambda t: t.update({A: t[A].astype(np.int32)}), "is of dtype I32, expected one of F64, F32"),
    "another rank": ("policy", lambda t: t.update({A: t[A][:2].copy()}), r"q_proj\.lora_A\.weight is of rank 2, but .* says r=4"),
    "another width": ("policy", lambda t: t.update({A: np.zeros((4, 64), np.float32)}), r"has shape \(4, 64\), .* has \(128, 128\)"),
    "a head": ("policy", lambda t: t.update({HEAD: np.zeros((1, 128), np.float32)}), "holds a scalar head, unknown to"),
    "no head": ("reward", lambda t: t.pop(HEAD), r"lacks the scalar head that adapter_config\.json promises"),
    "two scores": ("reward", lambda t: t.update({HEAD: np.zeros((2, 128), np.float32)}), r"head .* of shape \(2, 128\); expected .* \(1, 128\)"),
    "two heads": ("reward", lambda t: t.update({HEAD.replace("score", "classifier"): t[HEAD]}), "head .*classifier.*expected one weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS_OF)
def test_tensors_are_those_that_the_base_takes(kind, made, tmp_path):
    name, change, says = TENSORS_OF[kind]
    folder = Path(shutil.copytree(made[name], tmp_path / name))
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    rejected(folder, says)


# ------------------------------------------------------------------------------------------- was anything learned


def changed(folder: Path, name: str, into: Path) -> Path:
    """A copy of an adapter with one number of one tensor moved by the least that fp32 can tell."""
    shutil.copytree(folder, into)
    numbers = load_file(into / TENSORS)
    numbers[name].flat[0] = np.nextafter(numbers[name].flat[0], np.float32(1))
    save_file(numbers, into / TENSORS)
    return into


def test_an_adapter_that_is_new_has_learned_nothing(tmp_path):
    shared = toy_models.shared_base()
    shared.add("policy", lora={"r": 4, "target_modules": "all-linear"})
    shared.save("policy", tmp_path / "new")
    assert not adapter_files.learned(tmp_path / "new", None)
    assert not adapter_files.learned(changed(tmp_path / "new", A, tmp_path / "a"), None), (
        "A alone changes no completion"
    )
    assert adapter_files.learned(changed(tmp_path / "new", B, tmp_path / "b"), None)


@pytest.mark.parametrize("name", [A, B])
def test_an_adapter_that_is_its_start_has_learned_nothing(policy, tmp_path, name):
    shutil.copytree(policy, tmp_path / "same")
    assert not adapter_files.learned(tmp_path / "same", policy)
    assert adapter_files.learned(changed(policy, name, tmp_path / "other"), policy)
