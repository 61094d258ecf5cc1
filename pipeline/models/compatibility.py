"""Checks before a run starts that a `lora` section fits the weights of the base (without importing torch).

The checks read only the headers of safetensors files, which takes milliseconds. When a worker loads the
model, transformers, peft and `base.load_base` detect all other conflicts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, in_brief, show_value
from pipeline.job import lora as lora_section
from pipeline.system.hub import HEAD_NAMES, KEY, base_file, base_json, local

if TYPE_CHECKING:
    from pipeline.job.job import Model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LM_HEADS = ("lm_head", "embed_out")  # transformers' names of the lm head
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")  # names of the token embeddings

Shapes = dict[str, tuple[int, ...]]  # shapes of the tensors in files, by name


@dataclass(frozen=True)
class Base:
    """Describes a base by its config.json and the shapes of its tensors."""

    model: Model
    config: dict[str, Any]
    shapes: Shapes  # tensor shapes, or {} if the weights are not local, or not safetensors

    @property
    def plain_names(self) -> bool:
        """Returns False if transformers may rename or repack the tensors when it loads them."""
        special = self.config.get("quantization_config") or self.config.get("text_config")
        experts = any(".experts." in name for name in self.shapes)
        return not (special or experts or self.model.trust_remote_code)

    @property
    def modules(self) -> list[str]:
        """Returns the names of the modules that peft can adapt, or [] if the files do not show them."""
        names = [name.removesuffix(".weight") for name, shape in self.shapes.items() if len(shape) > 1]
        names = [name for name in names if not name.startswith(HEAD_NAMES)]
        # If the lm head is tied to the embedding, the files have no tensor for the lm head.
        return [*dict.fromkeys([*names, "lm_head"])] if names and self.plain_names else []

    @property
    def tied(self) -> bool:
        """Returns whether the lm head is tied to the embedding, by config.json or because the weight files have no lm head."""
        heads = [name for name in self.shapes if name.removesuffix(".weight").endswith(LM_HEADS)]
        return bool(self.config.get("tie_word_embeddings", self.shapes and not heads))

    def shape_of(self, module: str, part: str = "weight") -> tuple[int, ...] | None:
        """Returns the shape of a module's weight or bias, or None if the files have no such tensor."""
        # In some files of GPT-2, the names lack the prefix `transformer.`.
        names = (f"{module}.{part}", f"{module.partition('.')[2]}.{part}")
        return next((self.shapes[name] for name in names if name in self.shapes and self.plain_names), None)


def shapes_in(file: Path, fix: str = "fetch or save the model again") -> Shapes:
    """Returns the shapes in a safetensors file. Raises InputError with the advice `fix` if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        # safe_open checks the header, and that the tensors' offsets and sizes match the length of the file.
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: not a complete safetensors file ({in_brief(error)}); {fix}") from error


def safetensors_files(model: Model, fetch: bool) -> list[Path]:
    """Returns the weight files of a base in the order in which transformers reads them, or [] if the weights are pickles.

    Args:
        fetch: whether to download Hub weights that are split into several files. If False, returns [] for split weights.
    """
    name, revision = model.name_or_path, model.revision
    if path := base_file(name, SINGLE, revision):  # transformers prefers a single file to an index
        return [path]
    index = base_json(name, INDEX, revision)
    if index is None and not model.allow_pickle:
        raise InputError(
            f"{name!r} has neither {SINGLE} nor {INDEX}; fetch or save the model again. Pickled weights (pytorch_model.bin) can "
            "run any code when loaded: convert them to safetensors, or, if you trust them, set model.allow_pickle=true",
            KEY,
        )
    files = sorted(set((index or {}).get("weight_map", {}).values()))
    if os.path.isdir(local(name)):
        return [local(name) / file for file in files]
    paths = [base_file(name, file, revision) for file in files] if fetch else []
    return [file for file in paths if file]


def check_lora(base: Base, lora: dict[str, Any], scores: bool = False) -> None:
    """Raises InputError if a new adapter does not fit the base, or could not be merged into the base after training.

    peft itself ignores some names, patterns and layers that match no module.

    Args:
        lora: the job's `lora` section.
        scores: whether the adapter is a reward model's.
    """
    modules, targets = base.modules, lora.get("target_modules")
    endings = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern") if modules else ():
        value = lora.get(key)
        for name in lora_section.listed_modules(value):
            try:
                is_match = any(lora_section.matches_module(name, value, module) for module in modules)
            except re.error as error:
                raise InputError(f"{name!r} is no regular expression ({error})", f"lora.{key}") from error
            if not is_match and name != "all-linear":
                raise InputError(
                    f"{name!r} matches no module of this base; expected some of {endings}", f"lora.{key}"
                )
    if targets in (None, "all-linear"):
        adapted = [name for name in modules if not name.endswith((*LM_HEADS, *EMBEDDINGS, "wpe"))]
    else:
        adapted = [
            name
            for name in modules or lora_section.listed_modules(targets)
            if lora_section.is_named(targets, name)
        ]
    adapted = [name for name in adapted if not lora_section.is_named(lora.get("exclude_modules"), name)]
    if not adapted and (modules or targets == []):
        message = f"found {show_value(targets)}, so no module would be adapted; expected some of {endings or 'its modules'}"
        raise InputError(message, "lora.target_modules")
    layer_names = "|".join(lora_section.listed_modules(lora.get("layers_pattern"))) or "[^.]*"
    matches = (re.search(rf"(?:^|\.)(?:{layer_names})\.(?P<index>\d+)\.", name) for name in adapted)
    layers = sorted({int(match["index"]) for match in matches if match})
    for index in lora_section.listed_modules(lora.get("layers_to_transform")) if modules else ():
        if index not in layers:
            available = f"layers {layers[0]} to {layers[-1]}" if layers else "no layers of that name"
            raise InputError(f"found {index}, but these modules have {available}", "lora.layers_to_transform")
    if problem := find_unmergeable(base, adapted, bool(lora.get("lora_bias")), scores):
        raise problem


def find_unmergeable(base: Base, adapted: Iterable[str], bias: bool, scores: bool) -> InputError | None:
    """Returns an error if an adapter on the modules `adapted` cannot be merged into its base, or None if it can be merged.

    Args:
        bias: whether the adapter has biases (`lora_bias`).
        scores: whether the adapter is a reward model's, which has no lm head.
    """
    for module in adapted:
        name = module.rpartition(".")[2]
        if base.tied and not scores and name in (*LM_HEADS, *EMBEDDINGS):
            twin = "embeddings" if name in LM_HEADS else "lm head"
            fix = "merging the adapter would change both weights; train an adapter without this module"
            problem = f"adapts {name}, which this base ties to its {twin}: {fix}"
            return InputError(problem, "lora.target_modules")
        if bias and base.shape_of(module) and not base.shape_of(module, "bias"):
            fix = "train an adapter with lora.lora_bias=false"
            problem = f"adds a bias to {name}, which has none in this base, so the adapter could not be merged; {fix}"
            return InputError(problem, "lora.lora_bias")
    return None
