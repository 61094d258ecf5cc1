"""The folder of an adapter in peft's format: writing it, reading it, and comparing it with a base (no torch import).

Only what this pipeline itself reads is checked here; peft checks the other settings when it loads the adapter.
"""

from __future__ import annotations

import os
import re
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError
from pipeline.models.files import HEAD_NAMES, SETTINGS, TENSORS, json_object
from pipeline.models.weights import FLOATING, Stored, not_finite, numbers_in, stored_in

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

    from pipeline.models.compatibility import Base

PREFIX = "base_model.model."  # peft's prefix of every name in an adapter file
HEAD = f"{PREFIX}score.weight"  # name of the scalar head in files written here
FIX = "save the adapter again, or name another adapter"
CHANGES_BASE = ("layer_replication", "trainable_token_indices", "alora_invocation_tokens")


def is_head(key: str) -> bool:
    """Returns whether a tensor of an adapter file is a scalar head, under any of the names that models give it."""
    return key.removeprefix(PREFIX).split(".")[0] in HEAD_NAMES


def write(folder: str | Path, config: LoraConfig, tensors: dict[str, Tensor]) -> None:
    """Writes adapter_config.json and adapter_model.safetensors.

    Args:
        config: the adapter's settings, with task type and base; not changed.
        tensors: the tensors of the adapter and its head, by their names in peft's files.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / TENSORS, metadata={"format": "pt"})
    config = copy(config)
    config.inference_mode = True
    for key, value in vars(config).items():
        if isinstance(value, set):  # a set's order differs from process to process
            setattr(config, key, sorted(value))
    config.save_pretrained(str(folder))


def adapts_lm_head(target_modules: Any) -> bool:
    """Returns whether peft's `target_modules`, a list of names or a pattern, include the lm head."""
    if not isinstance(target_modules, str):
        return any(str(name).rpartition(".")[2] == "lm_head" for name in target_modules or ())
    try:
        return target_modules == "lm_head" or bool(re.fullmatch(target_modules, "lm_head"))
    except re.error:
        return False


def settings(folder: str | Path) -> dict[str, Any]:
    """Returns the content of a LoRA adapter's adapter_config.json.

    Raises:
        InputError: if it is missing or damaged, of another kind of adapter, or changes the base that all roles share.
    """
    path = Path(folder) / SETTINGS
    if not os.path.lexists(path):
        raise InputError(f"{folder}: no adapter_config.json in it; expected the folder of a LoRA adapter")
    config = json_object(path, FIX)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {config.get('peft_type')!r:.80}; expected 'LORA'")
    if type(config.get("r")) is not int or config["r"] < 1:
        raise InputError(
            f"{path}: r: found {config.get('r')!r:.80}, expected an integer of at least 1; {FIX}"
        )
    for key in CHANGES_BASE:
        if config.get(key):
            raise InputError(
                f"{path}: {key}: found {config[key]!r:.80}: such an adapter changes what all roles share; {FIX}"
            )
    return config


def rank(folder: str | Path) -> int:
    """Returns the largest rank of an adapter's matrices."""
    given = settings(folder)
    return max([given["r"], *(given.get("rank_pattern") or {}).values()])


def tensors(folder: str | Path) -> dict[str, Stored]:
    """Returns {name: dtype and shape} of the tensors in adapter_model.safetensors.

    Raises:
        InputError: if it is missing or damaged, or a tensor does not hold finite floating-point numbers.
    """
    path = Path(folder) / TENSORS
    if not os.path.lexists(path):
        raise InputError(
            f"{path}: not there. Adapters are read from safetensors only (a pickled adapter_model.bin can run any code); "
            "save it again with safe_serialization=True"
        )
    stored = stored_in(path, FIX)
    for name, tensor in stored.items():
        if tensor.dtype not in FLOATING:
            raise InputError(
                f"{path}: {name} is of dtype {tensor.dtype}, expected one of {', '.join(FLOATING)}; {FIX}"
            )
    if damaged := not_finite(path):
        raise InputError(f"{path}: {damaged} holds NaN or infinity: its training diverged; {FIX}")
    return stored


def check(base: Base, folder: str | Path, scores: bool) -> None:
    """Rejects an adapter whose files are damaged or contradict each other, or whose shapes do not match this base.

    Args:
        scores: whether it must have a scalar head, or must have none.

    Raises:
        InputError: with the file and what is wrong in it.
    """
    config, stored = settings(folder), tensors(folder)
    path = Path(folder) / TENSORS
    heads = {key: tensor.shape for key, tensor in stored.items() if is_head(key)}
    if bool(heads) != scores:
        problem = "lacks the scalar head that" if scores else "holds a scalar head, unknown to"
        raise InputError(f"{path}: {problem} {SETTINGS}{' promises' * scores}; {FIX}")
    width = base.config.get("hidden_size")
    if scores and width and list(heads.values()) != [(1, width)]:
        shape = next(iter(heads.values()))
        raise InputError(
            f"{path}: head {', '.join(heads)} of shape {shape}; expected one weight of shape (1, {width})"
        )
    for key, tensor in stored.items():
        matrix = "lora_A" if ".lora_A." in key else "lora_B"
        if f".{matrix}." not in key or len(tensor.shape) != 2:
            continue
        rank, width = tensor.shape if matrix == "lora_A" else tensor.shape[::-1]
        if rank != config["r"] and not config.get("rank_pattern"):
            raise InputError(f"{path}: {key} is of rank {rank}, but {SETTINGS} says r={config['r']}; {FIX}")
        adapted = base.weight_shape(key.removeprefix(PREFIX).partition(f".{matrix}.")[0])
        if adapted is not None and width not in adapted:
            raise InputError(
                f"{path}: {key} has shape {tensor.shape}, and the weight that it adapts has {adapted}: "
                "the adapter was trained on another base"
            )


def learned(folder: str | Path, start: str | Path | None) -> bool:
    """Returns whether training changed an adapter.

    LoRA, section 4.1: https://arxiv.org/abs/2106.09685.

    Args:
        start: the folder that it started from. None: it started as a new adapter, whose B matrices are 0.
    """
    import numpy as np

    if start is None:
        return any(values.any() for name, values in numbers_in(Path(folder) / TENSORS) if "lora_B" in name)
    before = dict(numbers_in(Path(start) / TENSORS))
    after = dict(numbers_in(Path(folder) / TENSORS))
    return before.keys() != after.keys() or not all(
        np.array_equal(before[name], after[name]) for name in after
    )
