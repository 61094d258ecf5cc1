"""An adapter's folder: its settings and tensors, and whether they fit a base; found from names and shapes (no torch import)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, in_brief
from pipeline.models.files import json_object
from pipeline.models.llama import LINEAR, Layout
from pipeline.models.weights import FLOATING, Stored, not_finite, numbers_in, stored_in

if TYPE_CHECKING:
    from pipeline.models.fit import Base

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # what peft puts before every name in an adapter file
HEAD_NAMES = ("score", "classifier", "classification_head")
MEND = "save the adapter again, or name another one"
CHANGES_BASE = ("layer_replication", "trainable_token_indices", "alora_invocation_tokens")
EMPTY: tuple[Any, ...] = (None, False, [], {})
# Settings as a plain adapter has them; those that are not here are EMPTY in it.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True,),
    "inference_mode": (True, False),
    "use_rslora": (True, False),
    "task_type": ("CAUSAL_LM", "SEQ_CLS"),
    "modules_to_save": (None, [], ["score"], ["classifier", "score"]),
    "megatron_core": ("megatron.core",),
    "qalora_group_size": (16,),
}
CHECKED = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules")  # by `settings`
TEXTS = ("base_model_name_or_path", "revision", "peft_version")


def is_head(key: str) -> bool:
    """Whether a tensor of an adapter file is a scalar head, under whichever name its model has for it."""
    return key.removeprefix(PREFIX).split(".")[0] in HEAD_NAMES


def settings(folder: str | Path) -> dict[str, Any]:
    """What adapter_config.json says, where it is of a LoRA adapter.

    Raises:
        InputError: when it is damaged, of another kind of adapter, or its rank or scale are none.
    """
    path = Path(folder) / SETTINGS
    if not os.path.lexists(path):
        raise InputError(f"{folder}: no adapter_config.json in it; expected the folder of a LoRA adapter")
    said = json_object(path, MEND)
    if said.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {said.get('peft_type')!r:.80}; expected 'LORA'")
    rank, alpha, dropout, targets = (
        said.get(key) for key in ("r", "lora_alpha", "lora_dropout", "target_modules")
    )
    if type(rank) is not int or not 1 <= rank <= 1 << 16:
        raise InputError(f"{path}: r: found {rank!r:.80}, expected a whole number from 1; {MEND}")
    if not _scales(alpha):
        raise InputError(f"{path}: lora_alpha: found {alpha!r:.80}, expected a number above 0; {MEND}")
    for key in ("alpha_pattern", "rank_pattern"):
        values = said.get(key) or {}
        if not isinstance(values, dict) or not all(map(_scales, values.values())):
            raise InputError(
                f"{path}: {key}: found {values!r:.80}, expected numbers above 0 by module; {MEND}"
            )
    if dropout is not None and (type(dropout) not in (int, float) or not 0 <= dropout < 1):
        raise InputError(
            f"{path}: lora_dropout: found {dropout!r:.80}, expected 0 <= lora_dropout < 1; {MEND}"
        )
    if not isinstance(targets, (str, list, type(None))) or not all(
        isinstance(one, str) for one in targets or ()
    ):
        raise InputError(f"{path}: target_modules: found {targets!r:.80}, expected names of modules; {MEND}")
    for key in CHANGES_BASE:
        if said.get(key):
            raise InputError(
                f"{path}: {key}: found {said[key]!r:.80}: such an adapter changes what all roles share; {MEND}"
            )
    return said


def _scales(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e9


def tensors(folder: str | Path) -> dict[str, Stored]:
    """{tensor: dtype and shape} of adapter_model.safetensors.

    Raises:
        InputError: when it is missing or damaged, or holds what are no finite numbers.
    """
    path = Path(folder) / TENSORS
    if not os.path.lexists(path):
        raise InputError(
            f"{path}: not there. Adapters are read from safetensors only (a pickled adapter_model.bin can run any code); "
            "save it again with safe_serialization=True"
        )
    found = stored_in(path, MEND)
    for name, one in found.items():
        if one.dtype not in FLOATING:
            raise InputError(
                f"{path}: {name} is of dtype {one.dtype}, expected one of {', '.join(FLOATING)}; {MEND}"
            )
    if spoiled := not_finite(path):
        raise InputError(f"{path}: {spoiled} holds NaN or infinity: its training diverged; {MEND}")
    return found


def check(base: Base, folder: str | Path, scores: bool) -> None:
    """Refuses an adapter whose files are damaged, disagree, or do not belong to this base.

    Args:
        scores: whether it is to have a scalar head.

    Raises:
        InputError: naming the file and what is wrong in it.
    """
    said, found = settings(folder), tensors(folder)
    path = Path(folder) / TENSORS
    heads = {key: one.shape for key, one in found.items() if is_head(key)}
    if bool(heads) != scores:
        problem = (
            "lacks the scalar head that" if scores else "holds a scalar head, of which nothing is said in"
        )
        raise InputError(f"{path}: {problem} {SETTINGS}{' promises' * scores}; {MEND}")
    if not said.get("rank_pattern"):
        _check_rank(path, said["r"], found)
    others = {key: one.shape for key, one in found.items() if key not in heads}
    one_head = len(heads) == scores and set(heads.values()) <= {(1, base.config.get("hidden_size"))}
    known = base.plain and one_head and others == _layout(base.plain, said)
    if base.checkable and not known:
        _ask_peft(base, folder, scores)


def learned(folder: str | Path, start: str | Path | None) -> bool:
    """Whether training changed an adapter: from the one in `start`, or from a new one, whose B matrices are 0 (LoRA, section
    4.1: https://arxiv.org/abs/2106.09685)."""
    import numpy as np

    if start is None:
        return any(values.any() for name, values in numbers_in(Path(folder) / TENSORS) if "lora_B" in name)
    before = dict(numbers_in(Path(start) / TENSORS))
    after = dict(numbers_in(Path(folder) / TENSORS))
    return before.keys() != after.keys() or not all(
        np.array_equal(before[name], after[name]) for name in after
    )


def _check_rank(path: Path, rank: int, found: dict[str, Stored]) -> None:
    for key, one in found.items():
        side = {"lora_A": 0, "lora_B": 1}.get(key.split(".")[-2] if key.count(".") else "")
        if side is not None and len(one.shape) == 2 and one.shape[side] != rank:
            raise InputError(
                f"{path}: {key} is of rank {one.shape[side]}, but {SETTINGS} says r={rank}; {MEND}"
            )


def _layout(base: Layout, said: dict[str, Any]) -> Layout | None:
    """The tensors of a plain adapter on a plain Llama; None for any other kind."""
    targets = said.get("target_modules")
    if not isinstance(targets, list) or not LINEAR.issuperset(targets):
        return None
    if not all(_is_plain(key, value) for key, value in said.items()):
        return None
    found: Layout = {}
    for name, shape in base.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            found[f"{PREFIX}{module}.lora_A.weight"] = (said["r"], shape[1])
            found[f"{PREFIX}{module}.lora_B.weight"] = (shape[0], said["r"])
    return found


def _is_plain(key: str, value: Any) -> bool:
    return key in CHECKED or value in PLAIN.get(key, EMPTY) or (key in TEXTS and isinstance(value, str))


def _ask_peft(base: Base, folder: str | Path, scores: bool) -> None:
    """Loads the adapter onto the base on the meta device, as a worker will do it with numbers."""
    from pipeline.models.adapters import SharedBase
    from pipeline.models.fit import skeleton

    model = skeleton(base)
    try:
        SharedBase(model).add("adapter", folder=folder, head=scores)
    except InputError:
        raise
    except Exception as error:  # peft checks some settings, and stumbles over others
        raise InputError(
            f"{Path(folder) / SETTINGS}: peft cannot make this adapter on {base.model.name_or_path!r} ({in_brief(error)}); {MEND}"
        ) from error
