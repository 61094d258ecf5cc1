"""Tests the checks of an adapter's folder against its base, and whether an adapter has learned."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy_models
from safetensors.numpy import load_file, save_file
from toy_models import DEMO, settings

from pipeline.errors import InputError
from pipeline.models import adapter_files, probes
from pipeline.models.base import check_base
from pipeline.registry import lineage
from pipeline.system.hub import SETTINGS, TENSORS

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
    base = check_base(settings(DEMO))
    adapter_files.check_adapter_fits_base(base, folder, folder.name == "reward", str(folder))


def change_tensors(folder: Path, change) -> Path:
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    return folder


@pytest.mark.parametrize(
    "extra",
    [
        {"rank_pattern": {"q_proj": 2}},
        {"target_modules": ["lm_head", "embed_tokens"]},
    ],
    ids=str,
)
def test_adapters_with_uncommon_settings_fit_their_base(extra, shared, tmp_path):
    shared.add("policy", lora={"r": 4, "target_modules": "all-linear", **extra})
    shared.save("policy", tmp_path)
    shared.remove("policy")
    check(tmp_path)


def zeros(*shape):
    return np.zeros(shape, np.float32)


# {what is wrong: (adapter, file, the file's new content or a change of its content, message)}
FOUND_BEFORE_LOADING = {
    "another kind": ("policy", SETTINGS, {"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
    "a trained module": ("reward", SETTINGS, {"modules_to_save": ["embed_tokens"]}, "modules_to_save: found .*which changes the base that all roles share; merge the adapter into its base"),
    "trained biases": ("policy", SETTINGS, {"bias": "all"}, "bias: found 'all', which changes the base that all roles share"),
    "PiSSA": ("policy", SETTINGS, {"init_lora_weights": "PiSSA_niter_4"}, "init_lora_weights: found 'pissa_niter_4', which changes the base, .*path_initial_model"),
    "settings cut": ("policy", SETTINGS, b'{"a":', r"adapter_config\.json: not valid JSON .*; save the adapter again"),
    "lineage not UTF-8": ("policy", "lineage.json", b'{"a": "\xff"}', r"lineage\.json: not valid JSON"),
    "tensors cut": ("policy", TENSORS, b"\x08", r"adapter_model\.safetensors: not a complete safetensors file .*; save the adapter"),
    "no tensors": ("policy", TENSORS, lambda t: t.clear(), "contains no LoRA tensors"),
    "other inputs": ("policy", TENSORS, lambda t: t.update({A: zeros(4, 64)}), r"\(4, 64\), .* has \(128, 128\): .*another base"),
    "fewer modules": ("policy", TENSORS, lambda t: (t.pop(A), t.pop(B)), r"target_modules of .* differ, for example in model\.layers\.0\.self_attn\.q_proj"),
    "another rank": ("policy", SETTINGS, {"r": 10_000_000}, r"r: found 10000000 for model\..*, but its tensors have rank 4"),
    "a rank by pattern": ("policy", SETTINGS, {"rank_pattern": {".*q_proj": 8}}, r"r: found 8 for model\..*q_proj, but its tensors have rank 4"),
    "a huge alpha": ("policy", SETTINGS, {"lora_alpha": 1e300}, r"lora_alpha: found 1e\+300 for .*, expected a number above 0, up to 1000000"),
    "alpha NaN": ("policy", SETTINGS, {"alpha_pattern": {"q_proj": float("nan")}}, "lora_alpha: found nan for .*q_proj"),
    "alpha text": ("policy", SETTINGS, {"lora_alpha": "8"}, "lora_alpha: found '8'"),
    "no mapping": ("policy", SETTINGS, {"rank_pattern": [8]}, "rank_pattern: AttributeError"),
    "a weight of the base": ("policy", TENSORS, lambda t: t.update({f"{A.partition('.lora_')[0]}.base_layer.weight": zeros(1, 1)}), "q_proj.base_layer.weight is a weight of the base, .*merge the adapter into its base"),
    "an unknown head": ("policy", TENSORS, lambda t: t.update({HEAD: zeros(1, 128)}), "contains a scalar head that .* does not mention"),
    "a lost head": ("reward", TENSORS, lambda t: t.pop(HEAD), r"lacks the scalar head that adapter_config\.json mentions"),
    "a reward as policy": ("policy", SETTINGS, {"task_type": "SEQ_CLS"}, "is a reward adapter .*expected an adapter that `sft`"),
    "a policy as reward": ("reward", SETTINGS, {"task_type": "CAUSAL_LM"}, "is an adapter without a scalar head, so it cannot score; expected an adapter that `rm`"),
}  # fmt: skip
FOUND_WHEN_LOADING = {
    "an unknown task": ("policy", SETTINGS, {"task_type": "NOPE"}, "peft rejects these settings"),
    "NaN": ("policy", TENSORS, lambda t: t[A].__setitem__((0, 0), np.nan), "q_proj.lora_A.weight contains NaN or infinity"),
    "two scores": ("reward", TENSORS, lambda t: t.update({HEAD: zeros(2, 128)}), r"score.weight has shape \(2, 128\); expected \(1, 128\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*FOUND_BEFORE_LOADING, *FOUND_WHEN_LOADING])
def test_a_folder_that_does_not_match_the_base_is_an_error(kind, copied, shared):
    """Most errors are found before a base is loaded. If loading an adapter fails, no part of its role remains in the model."""
    name, file, change, says = {**FOUND_BEFORE_LOADING, **FOUND_WHEN_LOADING}[kind]
    folder = copied(name)
    if isinstance(change, dict):
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**content, **change}))
    elif isinstance(change, bytes):
        (folder / file).write_bytes(change)
    else:
        change_tensors(folder, change)
    before = sum(p.numel() for p in shared.parameters())
    with pytest.raises(InputError, match=rf"^.*/{name}.*{says}"):
        if kind in FOUND_WHEN_LOADING:
            check(folder)
            shared.add("x", folder=folder)
        else:
            lineage.read(str(folder), name)
            check(folder)
    assert not shared.roles and sum(p.numel() for p in shared.parameters()) == before


def test_damaged_probes_are_an_error(tmp_path):
    for text in ("[" * 100_000, "[1]", '{"input_ids": []}'):
        (tmp_path / "probes.json").write_text(text)
        with pytest.raises(InputError, match=r"probes\.json: .*; remove it, or save the adapter again"):
            probes.read_probes(str(tmp_path))


SLOW = r"(.*\w+)+\w+_projX"  # `re` would backtrack for years to match this pattern


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_a_pattern_that_backtracks_forever_does_not_stop_the_loading(key, copied, shared):
    folder = copied("policy")
    content = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps({**content, key: SLOW}))
    check(folder)
    shared.add("x", folder=folder)
    adapted = {name for name, one in shared.base.named_modules() if "x" in getattr(one, "r", ())}
    assert adapted == adapter_files.ranks_of_modules(adapter_files.read_shapes(folder)).keys()
    shared.remove("x")


def test_patterns_set_the_ranks_and_alphas_of_modules(shared, tmp_path):
    """As in peft, the first matching pattern is used. After saving and loading, an adapter has the same scaling."""
    extra = {
        "rank_pattern": {"k_proj": 2, r"layers\.1\..*": 3},
        "alpha_pattern": {r"[qk]_proj": 5, "q_proj": 7, "v_proj": 9, r"layers\.0\.self_attn\.v_proj": 3},
    }
    shared.add("made", lora={"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **extra})
    shared.save("made", tmp_path / "one")
    check(tmp_path / "one")
    shared.add("read", folder=tmp_path / "one", trainable=True)
    shared.save("read", tmp_path / "two")
    shared.add("again", folder=tmp_path / "two")
    scaled = [one.scaling for one in shared.base.modules() if "made" in getattr(one, "r", ())]
    assert all(one["made"] == one["read"] == one["again"] for one in scaled)
    assert {one["made"] for one in scaled} == {5 / 4, 5 / 2, 5 / 3, 8 / 3, 8 / 4, 9 / 4, 9 / 3}
    for role in ("again", "read", "made"):
        shared.remove(role)


def test_the_smallest_change_of_a_weight_means_that_an_adapter_has_learned(copied, made):
    def move(tensors):
        tensors[A].flat[0] = np.nextafter(tensors[A].flat[0], np.float32(1))

    folder = copied("policy")
    assert not adapter_files.was_trained(folder, made["policy"])
    assert adapter_files.was_trained(change_tensors(folder, move), made["policy"])


@pytest.mark.parametrize("target", ["q_proj", "embed_tokens"])
def test_a_new_adapter_has_learned_if_its_product_is_not_zero(target, shared, tmp_path):
    """peft initializes B to 0 in linear layers, and A to 0 in embeddings."""
    shared.add("new", lora={"r": 4, "target_modules": [target]}, trainable=True)
    shared.save("new", tmp_path)
    assert not adapter_files.was_trained(tmp_path, None)
    for parameter in shared.parameters_of("new"):
        parameter.data += 1e-5
    shared.save("new", tmp_path)
    assert adapter_files.was_trained(tmp_path, None)
    shared.remove("new")
