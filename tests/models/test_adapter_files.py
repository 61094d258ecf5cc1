"""Tests an adapter's folder against its base. Damaged or foreign files are named, if possible before anything is loaded."""

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
EMBEDDING = {
    f"base_model.model.model.embed_tokens.lora_embedding_{x}": np.zeros(shape, np.float32)
    for x, shape in (("A", (4, 99)), ("B", (128, 4)))
}


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
    adapter_files.check_adapter_fits_base(check_base(settings(DEMO)), folder, scores=folder.name == "reward")


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
    "a module": ("reward", SETTINGS, {"modules_to_save": ["embed_tokens"]}, "modules_to_save: found .*which changes what all roles share; merge it into its base"),
    "biases": ("policy", SETTINGS, {"bias": "all"}, "bias: found 'all', which changes what all roles share"),
    "settings cut": ("policy", SETTINGS, b'{"a":', r"adapter_config\.json: not valid JSON .*; save the adapter again"),
    "settings no object": ("policy", SETTINGS, b"[1]", r"adapter_config\.json: found list, expected a JSON object"),
    "lineage not UTF-8": ("policy", "lineage.json", b'{"a": "\xff"}', r"lineage\.json: not valid JSON"),
    "tensors cut": ("policy", TENSORS, b"\x08", r"adapter_model\.safetensors: not a complete safetensors file .*; save the adapter"),
    "another base": ("policy", TENSORS, lambda t: t.update({A: np.zeros((4, 64), np.float32)}), r"\(4, 64\), .* has \(128, 128\): .*another base"),
    "a head": ("policy", TENSORS, lambda t: t.update({HEAD: np.zeros((1, 128), np.float32)}), "holds a scalar head, unknown to"),
    "no such module": ("policy", SETTINGS, {"target_modules": ["nope"]}, r"tensors and target_modules of .* differ, for example in model\.layers"),
    "more modules": ("policy", SETTINGS, {"target_modules": ["q_proj"]}, "tensors and target_modules of .* differ"),
    "fewer modules": ("policy", TENSORS, lambda t: (t.pop(A), t.pop(B)), r"target_modules of .* differ, for example in model\.layers\.0\.self_attn\.q_proj"),
    "another rank": ("policy", SETTINGS, {"r": 10_000_000}, r"r: found 10000000 for model\..*, expected 4 as its tensors"),
    "a rank by pattern": ("policy", SETTINGS, {"rank_pattern": {".*q_proj": 8}}, r"r: found 8 for model\..*q_proj, expected 4"),
    "a huge alpha": ("policy", SETTINGS, {"lora_alpha": 1e300}, r"lora_alpha: found 1e\+300 for .*, expected above 0, up to 1000000"),
    "alpha NaN": ("policy", SETTINGS, {"alpha_pattern": {"q_proj": float("nan")}}, "lora_alpha: found nan for .*q_proj"),
    "alpha text": ("policy", SETTINGS, {"lora_alpha": "8"}, "lora_alpha: found '8'"),
    "no mapping": ("policy", SETTINGS, {"rank_pattern": [8]}, "rank_pattern: AttributeError"),
    "lookaround": ("policy", SETTINGS, {"alpha_pattern": {"(?!a)b": 8}}, r"alpha_pattern: .*\(\?!"),
    "no tensors": ("policy", TENSORS, lambda t: t.clear(), "holds no tensors of LoRA"),
    "other outputs": ("policy", TENSORS, lambda t: t.update({B: np.zeros((64, 4), np.float32)}), r"lora_B\.weight has shape \(64, 4\), .*another base"),
    "another vocabulary": ("policy", TENSORS, lambda t: t.update(EMBEDDING), r"lora_embedding_A has shape \(4, 99\), .*another base"),
    "deep": ("policy", SETTINGS, b'{"a":' + b"[" * 100_000, r"adapter_config\.json: not valid JSON \(RecursionError"),
    "KaSA": ("policy", SETTINGS, {"kasa_config": {"beta": 0.1}}, "kasa_config: found .*which changes what all roles share"),
    **{start: ("policy", SETTINGS, {"init_lora_weights": start}, f"init_lora_weights: found '{start.lower()}', which changes the base .*path_initial_model")
       for start in ("pissa", "PiSSA_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga")},
    "no head": ("reward", TENSORS, lambda t: t.pop(HEAD), r"lacks the scalar head that adapter_config\.json promises"),
}  # fmt: skip
LOADED = {
    "another task": ("policy", SETTINGS, {"task_type": "NOPE"}, "peft rejects these settings"),
    "NaN": ("policy", TENSORS, lambda t: t[A].__setitem__((0, 0), np.nan), "q_proj.lora_A.weight holds NaN or infinity"),
    "infinity": ("reward", TENSORS, lambda t: t[HEAD].__setitem__((0, 0), np.inf), "score.weight holds NaN or infinity"),
    "two scores": ("reward", TENSORS, lambda t: t.update({HEAD: np.zeros((2, 128), np.float32)}), r"score.weight has shape \(2, 128\); expected \(1, 128\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*BEFORE, *LOADED])
def test_a_folder_that_does_not_match_the_base_is_named(kind, copied, shared):
    """The error comes before a base is loaded, or when the adapter is loaded. In both cases no part of the role remains."""
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
def test_an_adapter_with_its_initial_weights_has_learned_nothing(name, copied, made, shared, tmp_path):
    """The smallest change of one weight counts. In a new adapter, only a change of B counts, because B starts at 0."""

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


def test_probes_that_are_not_a_list_are_named(tmp_path):
    for text in ("[" * 100_000, "{}"):
        (tmp_path / "probes.json").write_text(text)
        with pytest.raises(InputError, match=r"probes\.json: .*; remove it, or save the adapter again"):
            probes.read(str(tmp_path))


def test_a_rank_written_as_a_fraction_is_accepted(copied, shared):
    folder = copied("policy")
    content = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps({**content, "r": 4.0, "rank_pattern": {"q_proj": 4.0}}))
    check(folder)
    shared.add("x", folder=folder)
    shared.remove("x")


SLOW = r"(.*\w+)+\w+_projX"  # matching this with `re` would never end


@pytest.mark.parametrize("where", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_pattern_that_backtracks_for_ever_is_never_tried(where, copied, shared):
    folder = copied("policy")
    content = json.loads((folder / SETTINGS).read_text())
    value = {SLOW: 4} if where.endswith("pattern") else SLOW
    (folder / SETTINGS).write_text(json.dumps({**content, where: value}))
    check(folder)
    shared.add("x", folder=folder)
    adapted = {name for name, one in shared.base.named_modules() if "x" in getattr(one, "r", ())}
    assert adapter_files.described(folder)["parameters"] == sum(p.numel() for p in shared.parameters_of("x"))
    assert adapted == adapter_files.ranks(adapter_files.shapes(folder)).keys()
    shared.remove("x")


def test_patterns_set_the_ranks_and_alphas_of_modules(shared, tmp_path):
    """The first matching pattern wins, as in peft. A saved adapter has the same scaling after it is loaded."""
    extra = {
        "rank_pattern": {"k_proj": 2, r"layers\.1\..*": 3},
        "alpha_pattern": {r"[qk]_proj": 5, "q_proj": 7, "v_proj": 9, r"layers\.0\.self_attn\.v_proj": 3},
    }
    shared.add("made", lora={"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **extra})
    shared.save("made", tmp_path / "one")
    check(tmp_path / "one")
    shared.add("read", folder=tmp_path / "one", trainable=True)
    shared.save("read", tmp_path / "two")
    check(tmp_path / "two")
    shared.add("again", folder=tmp_path / "two")
    scaled = [one.scaling for one in shared.base.modules() if "made" in getattr(one, "r", ())]
    assert all(one["made"] == one["read"] == one["again"] for one in scaled)
    assert {one["made"] for one in scaled} == {5 / 4, 5 / 2, 5 / 3, 8 / 3, 8 / 4, 9 / 4, 9 / 3}
    for role in ("again", "read", "made"):
        shared.remove(role)


@pytest.mark.parametrize("target", ["embed_tokens", "q_proj"])
@pytest.mark.parametrize("start", [True, "gaussian", "orthogonal"])
def test_an_adapter_has_learned_when_its_product_is_not_zero(target, start, shared, tmp_path):
    """Embeddings start with A = 0, other layers with B = 0, and orthogonal adapters with neither."""
    if (target, start) == ("embed_tokens", "orthogonal"):
        pytest.skip("peft has none")
    shared.add("new", lora={"r": 4, "target_modules": [target], "init_lora_weights": start}, trainable=True)
    shared.save("new", tmp_path)
    assert not adapter_files.learned(tmp_path, None)
    for parameter in shared.parameters_of("new"):
        parameter.data += 1e-5
    shared.save("new", tmp_path)
    assert adapter_files.learned(tmp_path, None)
    shared.remove("new")
