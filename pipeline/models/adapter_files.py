"""An adapter's folder in peft's format: writing it, reading its settings and tensors, and checking them against a base.

Reading and checking look at names and shapes alone, and import no torch.
"""

from __future__ import annotations

import os
import re
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, in_brief
from pipeline.models.files import json_object
from pipeline.models.llama import LINEAR, Layout
from pipeline.models.weights import FLOATING, Stored, not_finite, numbers_in, stored_in

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

    from pipeline.models.fit import Base

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's, before every name in an adapter file
HEAD_NAMES = ("score", "classifier", "classification_head")
HEAD = f"{PREFIX}score.weight"  # name of the scalar head in files written here
MEND = "save the adapter again, or name another one"
CHANGES_BASE = ("layer_replication", "trainable_token_indices", "alora_invocation_tokens")
EMPTY: tuple[Any, ...] = (None, False, [], {})
# Values of the settings of a plain adapter; settings that are not listed are EMPTY.
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
    """Whether a tensor of an adapter file is a scalar head, by whichever name its model calls it."""
    return key.removeprefix(PREFIX).split(".")[0] in HEAD_NAMES


def write(folder: str | Path, config: LoraConfig, tensors: dict[str, Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors.

    Args:
        config: of the adapter, with its task type and base; not changed.
        tensors: of the adapter and its head, by their names in peft's files.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / TENSORS, metadata={"format": "pt"})
    config = copy(config)
    config.inference_mode = True
    config.save_pretrained(str(folder))


def adapts_lm_head(target_modules: Any) -> bool:
    """Whether peft's `target_modules`, a list of names or a pattern, stand for the lm head too."""
    if not isinstance(target_modules, str):
        return any(str(name).rpartition(".")[2] == "lm_head" for name in target_modules or ())
    try:
        return target_modules == "lm_head" or bool(re.fullmatch(target_modules, "lm_head"))
    except re.error:
        return False


def settings(folder: str | Path) -> dict[str, Any]:
    """The content of a LoRA adapter's adapter_config.json.

    Raises:
        InputError: when it is missing or damaged, of another kind of adapter, or one of its values is impossible.
    """
    path = Path(folder) / SETTINGS
    if not os.path.lexists(path):
        raise InputError(f"{folder}: no adapter_config.json in it; expected the folder of a LoRA adapter")
    config = json_object(path, MEND)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {config.get('peft_type')!r:.80}; expected 'LORA'")
    rank, alpha, dropout, targets = (
        config.get(key) for key in ("r", "lora_alpha", "lora_dropout", "target_modules")
    )
    if type(rank) is not int or not 1 <= rank <= 1 << 16:
        raise InputError(f"{path}: r: found {rank!r:.80}, expected a whole number from 1; {MEND}")
    if not _is_positive(alpha):
        raise InputError(f"{path}: lora_alpha: found {alpha!r:.80}, expected a number above 0; {MEND}")
    for key in ("alpha_pattern", "rank_pattern"):
        values = config.get(key) or {}
        if not isinstance(values, dict) or not all(map(_is_positive, values.values())):
            raise InputError(
                f"{path}: {key}: found {values!r:.80}, expected numbers above 0 by module; {MEND}"
            )
    if dropout is not None and (type(dropout) not in (int, float) or not 0 <= dropout < 1):
        raise InputError(
            f"{path}: lora_dropout: found {dropout!r:.80}, expected 0 <= lora_dropout < 1; {MEND}"
        )
    listed = targets if isinstance(targets, list) else []
    if not isinstance(targets, (str, list, type(None))) or not all(isinstance(n, str) for n in listed):
        raise InputError(f"{path}: target_modules: found {targets!r:.80}, expected names of modules; {MEND}")
    for key in CHANGES_BASE:
        if config.get(key):
            raise InputError(
                f"{path}: {key}: found {config[key]!r:.80}: such an adapter changes what all roles share; {MEND}"
            )
    return config


def rank(folder: str | Path) -> int:
    """The largest rank of an adapter's matrices."""
    given = settings(folder)
    return max([given["r"], *(given.get("rank_pattern") or {}).values()])


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e9


def tensors(folder: str | Path) -> dict[str, Stored]:
    """{name: dtype and shape} of the tensors in adapter_model.safetensors.

    Raises:
        InputError: when it is missing or damaged, or a tensor is not of finite floating-point numbers.
    """
    path = Path(folder) / TENSORS
    if not os.path.lexists(path):
        raise InputError(
            f"{path}: not there. Adapters are read from safetensors only (a pickled adapter_model.bin can run any code); "
            "save it again with safe_serialization=True"
        )
    stored = stored_in(path, MEND)
    for name, tensor in stored.items():
        if tensor.dtype not in FLOATING:
            raise InputError(
                f"{path}: {name} is of dtype {tensor.dtype}, expected one of {', '.join(FLOATING)}; {MEND}"
            )
    if damaged := not_finite(path):
        raise InputError(f"{path}: {damaged} holds NaN or infinity: its training diverged; {MEND}")
    return stored


def check(base: Base, folder: str | Path, scores: bool) -> None:
    """Refuse an adapter whose files are damaged, disagree, or do not belong to this base.

    Args:
        scores: whether it must have a scalar head, or must have none.

    Raises:
        InputError: naming the file and what is wrong in it.
    """
    config, stored = settings(folder), tensors(folder)
    path = Path(folder) / TENSORS
    heads = {key: tensor.shape for key, tensor in stored.items() if is_head(key)}
    if bool(heads) != scores:
        problem = (
            "lacks the scalar head that" if scores else "holds a scalar head, of which nothing is said in"
        )
        raise InputError(f"{path}: {problem} {SETTINGS}{' promises' * scores}; {MEND}")
    if not config.get("rank_pattern"):
        _check_rank(path, config["r"], stored)
    lora = {key: tensor.shape for key, tensor in stored.items() if key not in heads}
    head_fits = len(heads) == scores and set(heads.values()) <= {(1, base.config.get("hidden_size"))}
    fits = base.plain and head_fits and lora == _layout(base.plain, config)
    if base.checkable and not fits:
        _ask_peft(base, folder, scores)


def learned(folder: str | Path, start: str | Path | None) -> bool:
    """Whether training changed an adapter, compared with the one in `start`; None: with a new one, whose B matrices are 0.

    LoRA, section 4.1: https://arxiv.org/abs/2106.09685.
    """
    import numpy as np

    if start is None:
        return any(values.any() for name, values in numbers_in(Path(folder) / TENSORS) if "lora_B" in name)
    before = dict(numbers_in(Path(start) / TENSORS))
    after = dict(numbers_in(Path(folder) / TENSORS))
    return before.keys() != after.keys() or not all(
        np.array_equal(before[name], after[name]) for name in after
    )


def _check_rank(path: Path, rank: int, stored: dict[str, Stored]) -> None:
    for key, tensor in stored.items():
        side = {"lora_A": 0, "lora_B": 1}.get(key.split(".")[-2] if key.count(".") else "")
        if side is not None and len(tensor.shape) == 2 and tensor.shape[side] != rank:
            raise InputError(
                f"{path}: {key} is of rank {tensor.shape[side]}, but {SETTINGS} says r={rank}; {MEND}"
            )


def _layout(base: Layout, config: dict[str, Any]) -> Layout | None:
    """{name: shape} of the tensors of a plain adapter on a plain Llama; None for any other kind."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not LINEAR.issuperset(targets):
        return None
    if not all(_is_plain(key, value) for key, value in config.items()):
        return None
    layout: Layout = {}
    for name, shape in base.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            layout[f"{PREFIX}{module}.lora_A.weight"] = (config["r"], shape[1])
            layout[f"{PREFIX}{module}.lora_B.weight"] = (shape[0], config["r"])
    return layout


def _is_plain(key: str, value: Any) -> bool:
    """Whether a setting is as in a plain adapter, whose tensors `_layout` knows."""
    return key in CHECKED or value in PLAIN.get(key, EMPTY) or (key in TEXTS and isinstance(value, str))


def _ask_peft(base: Base, folder: str | Path, scores: bool) -> None:
    """Load the adapter onto the base on the meta device, as a worker will load it with its numbers."""
    from pipeline.models.adapters import SharedBase
    from pipeline.models.fit import skeleton

    model = skeleton(base)
    try:
        SharedBase(model).add("adapter", folder=folder, head=scores)
    except InputError:
        raise
    except Exception as error:  # peft checks some settings, and fails in many ways over others
        raise InputError(
            f"{Path(folder) / SETTINGS}: peft cannot make this adapter on {base.model.name_or_path!r} ({in_brief(error)}); {MEND}"
        ) from error
