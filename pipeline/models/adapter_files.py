"""The folder of an adapter in peft's format: writing it, reading it, and comparing it with a base.

Only what this pipeline itself reads is checked here; peft checks the other settings when it loads the adapter.
"""

from __future__ import annotations

import hashlib
import os
import re
from copy import copy
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.models.compatibility import Base, Shapes, shapes_in
from pipeline.models.hub import HEAD_NAMES, SETTINGS, TENSORS, json_object

PREFIX = "base_model.model."  # peft's prefix of every name in an adapter file
HEAD = f"{PREFIX}score.weight"  # name of the scalar head in files written here
FIX = "save the adapter again, or name another adapter"
# Settings of adapters that change the base.
CHANGES_BASE = (
    "bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


def is_head(key: str) -> bool:
    """Returns whether a tensor of an adapter file is a scalar head, under any of the names that models give it."""
    return key.removeprefix(PREFIX).split(".")[0] in HEAD_NAMES


def write(folder: str | Path, config: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Writes adapter_config.json and adapter_model.safetensors. Returns SHA-256 and bytes of the latter, as it is in memory.

    Args:
        config: the adapter's peft.LoraConfig, with task type and base; not changed.
        tensors: the tensors of the adapter and its head, by their names in peft's files.
    """
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    content = save(contiguous, metadata={"format": "pt"})
    (folder / TENSORS).write_bytes(content)
    config = copy(config)
    config.inference_mode = True
    for key, value in vars(config).items():
        if isinstance(value, set):  # a set's order differs from process to process
            setattr(config, key, sorted(value))
    config.save_pretrained(str(folder))
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


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

    Raises InputError if it is missing or damaged, of another kind of adapter, or changes the base that all roles share.
    """
    path = Path(folder) / SETTINGS
    config = json_object(path, FIX)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {config.get('peft_type')!r:.80}; expected 'LORA'")
    for key in CHANGES_BASE:
        value = config.get(key)
        if value and value != "none" and not (key == "modules_to_save" and set(value) <= set(HEAD_NAMES)):
            raise InputError(f"{path}: {key}: found {value!r:.80}, which changes what all roles share; {FIX}")
    return config


def rank(folder: str | Path) -> int:
    """Returns the largest rank of an adapter's matrices."""
    given = settings(folder)
    return max([given["r"], *(given.get("rank_pattern") or {}).values()])


def shapes(folder: str | Path) -> Shapes:
    """Returns the shapes of an adapter's tensors. Raises InputError if its file is missing or damaged."""
    path = Path(folder) / TENSORS
    if not os.path.lexists(path):
        raise InputError(
            f"{path}: not there. Adapters are read from safetensors only (a pickled adapter_model.bin can run any code); "
            "save it again with safe_serialization=True"
        )
    return shapes_in(path, FIX)


def check(base: Base, folder: str | Path, scores: bool) -> None:
    """Raises InputError if an adapter's files are damaged, or it was trained on another base.

    Args:
        scores: whether it must have a scalar head, or must have none.
    """
    settings(folder)
    path, found = Path(folder) / TENSORS, shapes(folder)
    if any(map(is_head, found)) != scores:
        problem = "lacks the scalar head that" if scores else "holds a scalar head, unknown to"
        raise InputError(f"{path}: {problem} {SETTINGS}{' promises' * scores}; {FIX}")
    for key, shape in found.items():
        module, is_lora_a, _ = key.removeprefix(PREFIX).partition(".lora_A.")
        adapted = base.weight_shape(module) if is_lora_a else None
        if adapted is not None and shape[-1] not in adapted:
            raise InputError(
                f"{path}: {key} has shape {shape}, and the weight that it adapts has {adapted}: the adapter was trained on "
                "another base"
            )


def learned(folder: str | Path, start: str | Path | None) -> bool:
    """Returns whether training changed an adapter.

    Args:
        start: the folder that it started from. None: it was new, with B = 0 (section 4.1 of https://arxiv.org/abs/2106.09685).
    """
    import torch
    from safetensors.torch import load_file

    after = load_file(Path(folder) / TENSORS)
    if start is None:
        return any(tensor.any() for name, tensor in after.items() if "lora_B" in name)
    before = load_file(Path(start) / TENSORS)
    return before.keys() != after.keys() or not all(
        torch.equal(before[name].float(), after[name].float()) for name in after
    )
