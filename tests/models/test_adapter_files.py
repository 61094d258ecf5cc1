"""The folder of an adapter against a base: damaged and foreign files are named, if possible before anything is loaded."""

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
from pipeline.models.hub import SETTINGS, TENSORS
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
def copied(made, tmp_path):
    return lambda name: Path(shutil.copytree(made[name], tmp_path / name))


@pytest.fixture(scope="module")
def shared():
    return toy_models.shared_base()


def check(folder: Path) -> None:
    adapter_files.check(check_base(settings(DEMO)), folder, scores=folder.name == "reward")


def tensors_changed(folder: Path, change) -> Path:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    return folder


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
def test_other_kinds_of_lora_fit_too(extra, shared, tmp_path):
    shared.add("policy", lora={"r": 4, "target_modules": "all-linear", **extra})
    shared.save("policy", tmp_path)
    shared.remove("policy")
    check(tmp_path)


# {what is wrong: (adapter, file, its content or a change of it, the message)}
BEFORE = {
    "another kind": ("policy", SETTINGS, {"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
    "tokens": ("policy", SETTINGS, {"trainable_token_indices": [1]}, "trainable_token_indices: found .*which changes what all roles share"),
    "a module": ("reward", SETTINGS, {"modules_to_save": ["embed_tokens"]}, "modules_to_save: found .*which changes what all roles share"),
    "biases": ("policy", SETTINGS, {"bias": "all"}, "bias: found 'all', which changes what all roles share"),
    "settings cut": ("policy", SETTINGS, b'{"a":', r"adapter_config\.json: not valid JSON .*; save the adapter again"),
    "settings no object": ("policy", SETTINGS, b"[1]", r"adapter_config\.json: found list, expected a JSON object"),
    "lineage not UTF-8": ("policy", "lineage.json", b'{"a": "\xff"}', r"lineage\.json: not valid JSON"),
    "tensors cut": ("policy", TENSORS, b"\x08", r"adapter_model\.safetensors: not a complete safetensors file .*; save the adapter"),
    "another base": ("policy", TENSORS, lambda t: t.update({A: np.zeros((4, 64), np.float32)}), r"\(4, 64\), .* has \(128, 128\): .*another base"),
    "a head": ("policy", TENSORS, lambda t: t.update({HEAD: np.zeros((1, 128), np.float32)}), "holds a scalar head, unknown to"),
    "no head": ("reward", TENSORS, lambda t: t.pop(HEAD), r"lacks the scalar head that adapter_config\.json promises"),
}  # fmt: skip
LOADED = {
    "no such module": ("policy", SETTINGS, {"target_modules": ["nope"]}, "peft rejects these settings"),
    "other modules": ("policy", SETTINGS, {"target_modules": ["q_proj"]}, "48 tensors differ, for example .*; expected none"),
    "no pattern": ("policy", SETTINGS, {"target_modules": "(("}, "peft rejects these settings"),
    "another task": ("policy", SETTINGS, {"task_type": "NOPE"}, "peft rejects these settings"),
    "another rank": ("policy", SETTINGS, {"r": 8}, r"56 tensors differ, for example .*\(4, \d+\); expected \(8, \d+\)"),
    "NaN": ("policy", TENSORS, lambda t: t[A].__setitem__((0, 0), np.nan), "q_proj.lora_A.weight holds NaN or infinity"),
    "infinity": ("reward", TENSORS, lambda t: t[HEAD].__setitem__((0, 0), np.inf), "score.weight holds NaN or infinity"),
    "two scores": ("reward", TENSORS, lambda t: t.update({HEAD: np.zeros((2, 128), np.float32)}), r"score.weight has shape \(2, 128\); expected \(1, 128\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*BEFORE, *LOADED])
def test_what_does_not_fit_is_named(kind, copied, shared):
    """Before a base is loaded, or when the adapter is; then nothing of its role stays."""
    name, file, change, says = {**BEFORE, **LOADED}[kind]
    folder = copied(name)
    if isinstance(change, dict):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **change}))
    elif isinstance(change, bytes):
        (folder / file).write_bytes(change)
    else:
        tensors_changed(folder, change)
    before = sum(p.numel() for p in shared.parameters())
    with pytest.raises(InputError, match=rf"^.*/{name}/.*{says}"):
        if kind in LOADED:
            check(folder)
            shared.add("x", folder=folder)
        else:
            lineage.read(str(folder), name)
            check(folder)
    assert not shared.roles and sum(p.numel() for p in shared.parameters()) == before


@pytest.mark.parametrize("name", [A, B])
def test_an_adapter_that_is_its_start_has_learned_nothing(name, copied, made, shared, tmp_path):
    """The least change of a number counts; of a new adapter, one of B, because A alone changes no completion."""

    def moved(tensors):
        tensors[name].flat[0] = np.nextafter(tensors[name].flat[0], np.float32(1))

    start = copied("policy")
    assert not adapter_files.learned(start, made["policy"])
    assert adapter_files.learned(tensors_changed(start, moved), made["policy"])
    shared.add("new", lora={"r": 4, "target_modules": "all-linear"})
    shared.save("new", tmp_path / "new")
    shared.remove("new")
    assert not adapter_files.learned(tmp_path / "new", None)
    assert adapter_files.learned(tensors_changed(tmp_path / "new", moved), None) == (name == B)
