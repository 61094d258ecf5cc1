"""Reads and writes the folder of an adapter in peft's format, and checks that an adapter fits a base.

The checks cover only the settings that this pipeline reads. peft checks the other settings when it loads the adapter.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from copy import copy
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, in_brief
from pipeline.job.lora import is_named
from pipeline.models.compatibility import Base, Shapes, shapes_in
from pipeline.system.hub import HEAD_NAMES, SETTINGS, TENSORS, json_object

PREFIX = "base_model.model."  # peft's prefix of every tensor name in an adapter file
HEAD = f"{PREFIX}score.weight"  # name of the scalar head in the files that this pipeline writes
FIX = "save the adapter again, or name another adapter"
# Keys of adapter_config.json with which peft changes weights of the base.
CHANGES_BASE = (
    "bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "kasa_config",
)
# Prefixes of `init_lora_weights` (peft 0.21) with which peft changes the base. The adapter is valid only on the changed base.
RELATIVE = ("pissa", "olora", "corda", "loftq", "lora_ga")
MATRIX_A = ("A.weight", "embedding_A")  # suffixes of the name of a matrix A, after `.lora_`
MAX_ALPHA = 1e6  # maximum lora_alpha, the same as in the job schema


def is_head(key: str) -> bool:
    """Returns whether a tensor of an adapter file belongs to a scalar head. The head's name depends on the model's class."""
    return key.removeprefix(PREFIX).split(".")[0] in HEAD_NAMES


def write_adapter(folder: str | Path, config: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Writes adapter_config.json and adapter_model.safetensors. Returns the tensors' SHA-256 and size in bytes.

    Args:
        config: the adapter's peft.LoraConfig, with task type and base. The function does not change `config`.
        tensors: the tensors of the adapter and its head, with their names in peft's files.
    """
    from peft.utils.other import get_pattern_key
    from safetensors.torch import save

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    content = save(contiguous, metadata={"format": "pt"})
    (folder / TENSORS).write_bytes(content)
    config = copy(config)
    # When peft loads the adapter, the saved tensors replace the initial values, so this function saves peft's default
    # initialization.
    config.inference_mode, config.init_lora_weights = True, True
    modules = ranks_of_modules({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for pattern in ("rank_pattern", "alpha_pattern"):
        # peft applies the first pattern that matches a module, but sorts the patterns when it saves them.
        patterns = getattr(config, pattern) or {}
        keys = {module: get_pattern_key(patterns, module) for module in modules}
        setattr(config, pattern, {module: patterns[key] for module, key in keys.items() if key in patterns})
    for key, value in vars(config).items():
        if isinstance(value, set):  # sort, because the order of a set differs between processes
            setattr(config, key, sorted(value))
    config.save_pretrained(str(folder))
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def read_settings(folder: str | Path) -> dict[str, Any]:
    """Returns the content of a LoRA adapter's adapter_config.json.

    Raises InputError if the file is missing or damaged, if the adapter is not LoRA, or if the adapter changes the shared base.
    """
    path = Path(folder) / SETTINGS
    config = json_object(path, FIX)
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type is {config.get('peft_type')!r:.80}; expected 'LORA'")
    for key in CHANGES_BASE:
        value = config.get(key)
        if value and value != "none" and not (key == "modules_to_save" and set(value) <= set(HEAD_NAMES)):
            raise InputError(
                f"{path}: {key}: found {value!r:.80}, which changes the base that all roles share; merge the adapter into its base with "
                "peft's merge_and_unload(), and set model.name_or_path to the result"
            )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(RELATIVE):
        raise InputError(
            f"{path}: init_lora_weights: found {start!r:.80}, which changes the base, so the adapter fits only the changed base; "
            "convert it by peft's save_pretrained(path_initial_model_for_weight_conversion=ITS_START), or merge it into its own base"
        )
    return config


def read_shapes(folder: str | Path) -> Shapes:
    """Returns the shapes of an adapter's tensors. Raises InputError if the adapter's file is missing or damaged."""
    path = Path(folder) / TENSORS
    if not os.path.lexists(path):
        raise InputError(
            f"{path}: no such file. Adapters are read from safetensors only (a pickled adapter_model.bin can run any code); "
            "save it again with safe_serialization=True"
        )
    return shapes_in(path, FIX)


def ranks_of_modules(shapes: Shapes) -> dict[str, int]:
    """Returns {module: rank} for the LoRA matrices of an adapter."""
    parts = ((key.removeprefix(PREFIX).partition(".lora_"), shape) for key, shape in shapes.items())
    return {module: shape[0] for (module, _, part), shape in parts if part in MATRIX_A}


def exact_settings(folder: str | Path) -> dict[str, Any]:
    """Returns an adapter's settings for peft, with module names instead of patterns, and without initialization of the weights.

    Raises InputError if an alpha is invalid, or if a rank differs from the shape of the tensors, because peft would allocate
    matrices of any rank that the file sets.
    """
    path, settings, ranks = (
        Path(folder) / SETTINGS,
        read_settings(folder),
        ranks_of_modules(read_shapes(folder)),
    )
    if not ranks:
        raise InputError(f"{Path(folder) / TENSORS}: contains no LoRA tensors; {FIX}")
    exact: dict[str, Any] = {"target_modules": set(ranks), "init_lora_weights": False}
    exact |= dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    for key, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        exact[key] = settings.get(key, 8)
        values = dict.fromkeys(ranks, exact[key])
        try:
            # As in peft, the first matching pattern applies.
            for name, value in reversed((settings.get(pattern) or {}).items()):
                values |= {module: value for module in ranks if re.match(rf"(.*\.)?({name})$", module)}
        except (AttributeError, re.error) as error:
            raise InputError(f"{path}: {pattern}: {in_brief(error)}; {FIX}") from error
        for module, value in values.items():
            in_range = isinstance(value, (int, float)) and 0 < value <= MAX_ALPHA
            if key == "r" and not (in_range and value == ranks[module]):
                raise InputError(
                    f"{path}: r: found {value!r:.80} for {module}, but its tensors have rank {ranks[module]}; {FIX}"
                )
            if not in_range:
                raise InputError(
                    f"{path}: lora_alpha: found {value!r:.80} for {module}, expected a number above 0, up to {MAX_ALPHA:.0f}; {FIX}"
                )
        if key == "r":  # peft does not accept a float such as 8.0
            values = ranks
        exact[key] = next(iter(values.values()))
        exact[pattern] = {re.escape(name): value for name, value in values.items() if value != exact[key]}
    return exact


def largest_rank_in_folder(folder: str | Path) -> int:
    """Returns the largest rank of an adapter's matrices."""
    return max(ranks_of_modules(read_shapes(folder)).values())


def describe_adapter(folder: str | Path) -> dict[str, Any]:
    """Returns an adapter's settings. The key `parameters` contains the adapter's number of parameters, including the head."""
    return read_settings(folder) | {"parameters": sum(map(math.prod, read_shapes(folder).values()))}


def check_adapter_fits_base(base: Base, folder: str | Path, scores: bool, reference: str) -> None:
    """Raises InputError if an adapter's files are damaged, if it was trained on another base, or if it has the wrong head.

    Args:
        scores: whether the adapter must have a scalar head (True), or must not have a head (False).
        reference: the adapter's name in messages.
    """
    settings, path, shapes = read_settings(folder), Path(folder) / TENSORS, read_shapes(folder)
    promises_head = settings.get("task_type") == "SEQ_CLS"
    if promises_head != scores:  # without a saved head, peft would add a random head
        kind, stages, example = (
            "a reward adapter (it has a scalar head)",
            "`sft`, `dpo`, `kto` or `ppo`",
            "sft",
        )
        if scores:
            kind, stages, example = "an adapter without a scalar head, so it cannot score", "`rm`", "rm"
        expected = f"expected an adapter that {stages} trained, e.g. models:/rlhf-{example}@champion"
        raise InputError(f"{reference} is {kind}; {expected}")
    if any(map(is_head, shapes)) != scores:
        lacks = "lacks the" if scores else "contains a"
        says = "mentions" if scores else "does not mention"
        raise InputError(f"{path}: {lacks} scalar head that {SETTINGS} {says}; {FIX}")
    modules = [*exact_settings(folder)["target_modules"]]
    for key, shape in shapes.items():
        module, is_lora, part = key.removeprefix(PREFIX).partition(".lora_")
        # peft also saves weights of the base if the adapter adapts the embeddings.
        if not is_lora and not is_head(key):
            raise InputError(
                f"{path}: {key} is a weight of the base, which all roles share; if it equals the base's own weight, save the adapter with "
                "save_embedding_layers=False. Otherwise, merge the adapter into its base and set model.name_or_path to the result"
            )
        base_shape = base.shape_of(module)
        if base_shape is not None and not {*(shape[-1:] if part in MATRIX_A else shape[:1])} <= {*base_shape}:
            raise InputError(
                f"{path}: {key} has shape {shape}, and the weight that it adapts has {base_shape}: the adapter was trained on "
                "another base"
            )
    targets = settings.get("target_modules")
    if isinstance(targets, list):
        all_modules = not (settings.get("exclude_modules") or settings.get("layers_to_transform"))
        for module in [*modules, *(base.modules if all_modules else [])]:
            if scores and module == "lm_head":  # a reward model has a scalar head instead of an lm head
                continue
            if is_named(targets, module) != is_named(modules, module):
                problem = f"tensors and target_modules of {SETTINGS} differ, for example in {module}"
                raise InputError(f"{path}: {problem}; {FIX}")


def was_trained(folder: str | Path, start: str | Path | None) -> bool:
    """Returns whether training changed an adapter.

    Args:
        start: the adapter's folder before training, or None if the adapter was new. peft initializes B with 0 in a linear layer,
            and A with 0 in an embedding, except with `init_lora_weights: orthogonal`.
    """
    import torch
    from safetensors.torch import load_file

    after = load_file(Path(folder) / TENSORS)
    if start is None:
        initially_zero = (".lora_B.weight", ".lora_B.bias", ".lora_embedding_A")
        return any(bool(tensor.any()) for name, tensor in after.items() if name.endswith(initially_zero))
    before = load_file(Path(start) / TENSORS)
    return before.keys() != after.keys() or not all(
        torch.equal(before[name].float(), after[name].float()) for name in after
    )
