"""An adapter's folder against a base: damaged, contradictory and foreign files are named before anything is loaded."""

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import toy_models
from running import ROOT
from safetensors.numpy import load_file, save_file
from toy_models import DEMO, settings

from pipeline.errors import InputError
from pipeline.models import adapter_files
from pipeline.models.adapter_files import SETTINGS, TENSORS
from pipeline.models.fit import check_base
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


@pytest.fixture
def reward(made, tmp_path) -> Path:
    return Path(shutil.copytree(made["reward"], tmp_path / "reward"))


def refused(folder: Path, says: str) -> None:
    with pytest.raises(InputError, match=rf"^.*/{folder.name}.*{says}"):
        adapter_files.check(check_base(settings(DEMO)), folder, scores=folder.name == "reward")


def test_what_fits_is_not_asked_about_twice(made):
    """In milliseconds, without torch: names and shapes follow from the settings and the base."""
    code = (
        "import sys\nfrom types import SimpleNamespace\nfrom pipeline.models import adapter_files\n"
        "from pipeline.models.fit import check_base\n"
        f"base = check_base(SimpleNamespace(**{vars(settings(DEMO))!r}))\n"
        f"adapter_files.check(base, {str(made['policy'])!r}, False)\nadapter_files.check(base, {str(made['reward'])!r}, True)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    "extra",
    [
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"target_modules": r".*\.q_proj"},
        {"lora_bias": True},
    ],
    ids=str,
)
def test_other_kinds_of_lora_fit_too(extra, tmp_path):
    shared = toy_models.shared_base()
    shared.add("policy", lora={"r": 4, "target_modules": "all-linear", **extra})
    shared.save("policy", tmp_path)
    adapter_files.check(check_base(settings(DEMO)), tmp_path, scores=False)


# -------------------------------------------------------------------------------------------------------- settings

SAID = [
    ("peft_type", ["IA3", 5, None], r"peft_type is .*; expected 'LORA'"),
    ("r", [0, -1, "4", None, 1.5, True, 10**9], r"/adapter_config\.json: r: found .*, expected a whole number from 1"),
    ("r", [8], r"/adapter_model\.safetensors: .*lora_A\.weight is of rank 4, but adapter_config\.json says r=8"),
    ("lora_alpha", ["x", None, float("inf"), 10**400, 0, -5, True], r"lora_alpha: found .*, expected a number above 0"),
    ("alpha_pattern", [{"q_proj": 1e300}, {"q_proj": 0}, {"q_proj": True}], r"alpha_pattern: found .*, expected numbers above 0"),
    ("lora_dropout", ["x", -1, 2], r"lora_dropout: found .*, expected 0 <= lora_dropout < 1"),
    ("target_modules", [5, [5], {}], r"target_modules: found .*, expected names of modules"),
    ("target_modules", [["nope"], [], "(("], r"/adapter_config\.json: peft cannot make this adapter on .*demo/model"),
    ("target_modules", [["q_proj"], ["q_proj", "nope"]], "not an adapter for this base .*48 tensors are on one side only"),
    ("task_type", ["NOPE", 5], "peft cannot make this adapter"),
    ("modules_to_save", [["embed_tokens"], "x"], "which all roles share|peft cannot make"),
    ("bias", ["all"], "which all roles share"),
    ("rank_pattern", [{"((": 1}], "peft cannot make this adapter"),
    ("rank_pattern", [5, {"q_proj": "x"}], r"rank_pattern: found .*, expected numbers above 0"),
    ("init_lora_weights", ["x", 5], "peft cannot make this adapter"),
    ("use_dora", [True], "tensors are on one side only, .*lora_magnitude_vector"),
    ("trainable_token_indices", [[1]], "trainable_token_indices: found .*changes what all roles share"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [(k, v, s) for k, values, s in SAID for v in values],
    ids=[f"{k}={str(v)[:12]}" for k, values, _ in SAID for v in values],
)
def test_settings_are_those_of_the_tensors(key, value, says, policy):
    said = json.loads((policy / SETTINGS).read_text())
    (policy / SETTINGS).write_text(json.dumps({**said, key: value}))
    with pytest.raises(InputError, match=says):
        adapter_files.check(check_base(settings(DEMO)), policy, scores=False)


@pytest.mark.parametrize("key", ["peft_type", "r", "lora_alpha", "target_modules"])
def test_settings_that_are_missing(key, policy):
    said = json.loads((policy / SETTINGS).read_text())
    del said[key]
    (policy / SETTINGS).write_text(json.dumps(said))
    refused(policy, "")


JSONS = {
    "nothing": b"", "cut": b'{"a":', "not UTF-8": b'{"a": "\xff"}', "a list": b"[1]", "deep": b'{"a":' * 100_000, "NaN": b'{"a": NaN}'
}  # fmt: skip


@pytest.mark.parametrize("kind", JSONS)
@pytest.mark.parametrize("file", [SETTINGS, "lineage.json"])
def test_json_that_is_none(file, kind, policy):
    (policy / file).write_bytes(JSONS[kind])
    with pytest.raises(InputError, match=rf"^.*/policy/{file}: (not valid JSON|found list)"):
        lineage.read(str(policy), "policy")
        adapter_files.check(check_base(settings(DEMO)), policy, scores=False)


# --------------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("cut", [0, 7, 200, -10])
def test_a_file_that_breaks_off(cut, policy):
    content = (policy / TENSORS).read_bytes()
    (policy / TENSORS).unlink()
    (policy / TENSORS).write_bytes(content[:cut])
    refused(
        policy,
        r"/adapter_model\.safetensors: not a whole safetensors file of \d+ bytes .*; save the adapter again",
    )


def test_a_header_longer_than_any_file(policy):
    content = (policy / TENSORS).read_bytes()
    (policy / TENSORS).unlink()
    (policy / TENSORS).write_bytes(struct.pack("<Q", 1 << 63) + content[8:])
    refused(policy, r"/adapter_model\.safetensors: not a whole safetensors file")


CHANGES = {
    "NaN": (lambda t: t[A].__setitem__((0, 0), np.nan), "q_proj.lora_A.weight holds NaN or infinity"),
    "infinity": (lambda t: t[B].__setitem__((0, 0), np.inf), "q_proj.lora_B.weight holds NaN or infinity"),
    "NaN in half precision": (lambda t: t.update({A: np.full((4, 128), np.nan, np.float16)}), "holds NaN or infinity"),
    "whole numbers": (lambda t: t.update({A: t[A].astype(np.int32)}), "is of dtype I32, expected one of F64, F32"),
    "a tensor missing": (lambda t: t.pop(A), "1 tensors are on one side only, base_model.*q_proj.lora_A.weight for one"),
    "a tensor more": (lambda t: t.update(x=np.zeros(3, np.float32)), "1 tensors are on one side only, x for one"),
    "a layer more": (lambda t: t.update({A.replace("s.0", "s.9"): t[A]}), "1 tensors are on one side only, .*layers.9"),
    "another rank": (lambda t: t.update({A: t[A][:2].copy()}), r"q_proj\.lora_A\.weight is of rank 2, but .* says r=4"),
    "another width": (lambda t: t.update({A: np.zeros((4, 64), np.float32)}), r"has shape \(4, 64\), this base takes \(4, 128\)"),
    "no dimensions": (lambda t: t.update({A: np.zeros((), np.float32)}), r"has shape \(\), this base takes"),
    "a head": (lambda t: t.update({HEAD: np.zeros((1, 128), np.float32)}), "holds a scalar head, of which nothing is said"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_tensors_are_those_that_the_base_takes(kind, policy):
    change, says = CHANGES[kind]
    tensors = load_file(policy / TENSORS)
    change(tensors)
    save_file(tensors, policy / TENSORS)
    refused(policy, says)


HEADS = {
    "none": (lambda t: t.pop(HEAD), r"lacks the scalar head that adapter_config\.json promises"),
    "two scores": (lambda t: t.update({HEAD: np.zeros((2, 128), np.float32)}), r"head .* of shape \(2, 128\); expected .* \(1, 128\)"),
    "another width": (lambda t: t.update({HEAD: np.zeros((1, 64), np.float32)}), r"head .* of shape \(1, 64\)"),
    "NaN": (lambda t: t[HEAD].fill(np.nan), "score.weight holds NaN or infinity"),
    "two heads": (lambda t: t.update({HEAD.replace("score", "classifier"): t[HEAD]}), "head .*classifier.*expected one weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_is_no_scalar_head_of_this_base(kind, reward):
    change, says = HEADS[kind]
    tensors = load_file(reward / TENSORS)
    change(tensors)
    save_file(tensors, reward / TENSORS)
    refused(reward, says)


@pytest.mark.parametrize("file", [SETTINGS, TENSORS, "lineage.json"])
@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda at: os.symlink("/nowhere", at)], ids=["folder", "pipe", "dead link"]
)
def test_what_is_no_file_is_not_read(file, make, policy):
    (policy / file).unlink(missing_ok=True)
    make(policy / file)
    with pytest.raises(InputError, match=rf"^.*/policy/{file}: found .*, expected a file"):
        lineage.read(str(policy), "policy")
        adapter_files.check(check_base(settings(DEMO)), policy, scores=False)


# --------------------------------------------------------------------------------------------------------- lineage

LINEAGE = [
    ("base", [5, [], {}, {"digest": 5, "name_or_path": "x"}, {"digest": "x"}]),
    ("reward", [5, {}, {"mean": "x", "std": 1}, {"mean": 0, "std": 0}, {"mean": 0, "std": 1, "more": 1},
                {"mean": float("inf"), "std": 1}, {"mean": 10**400, "std": 1}, {"mean": True, "std": 1}]),
    ("parents", [5, []]),
    ("data", ["x"]),
    ("versions", [[1]]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [(k, v) for k, values in LINEAGE for v in values],
    ids=[f"{k}={str(v)[:30]}" for k, values in LINEAGE for v in values],
)
def test_lineage_says_what_a_stage_writes(key, value, policy):
    (policy / "lineage.json").write_text(json.dumps({"stage": "sft", key: value}))
    with pytest.raises(
        InputError, match=rf"^.*/policy/lineage\.json: {key}.*: found .*, expected .*; bring the file back"
    ):
        lineage.read(str(policy), "policy")


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
