"""Checks a base's weights and a `lora` section against each other, before a run starts (no torch import).

Everything is read from the headers of the safetensors files, in milliseconds and for any architecture. Deeper contradictions
are found when a worker loads the model: transformers, peft and `base.load_base` then reject them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, about, in_brief
from pipeline.models.hub import HEAD_NAMES, KEY, base_file, base_json, local

if TYPE_CHECKING:
    from pipeline.config.job import Model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]  # of the tensors of files, by name


@dataclass(frozen=True)
class Base:
    """A base as its files describe it."""

    model: Model
    config: dict[str, Any]
    shapes: Shapes  # empty if its weights are not local, or not safetensors

    @property
    def plain_names(self) -> bool:
        """Returns False if transformers may rename or repack the tensors as it loads them."""
        special = self.config.get("quantization_config") or self.config.get("text_config")
        experts = any(".experts." in name for name in self.shapes)
        return not (special or experts or self.model.trust_remote_code)

    def weight_shape(self, module: str) -> tuple[int, ...] | None:
        """Returns the shape of a module's weight, or None if the files have no such name."""
        # Some files of GPT-2 lack the `transformer.` before each name.
        names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
        return next((self.shapes[name] for name in names if name in self.shapes and self.plain_names), None)


def shapes_in(file: Path, fix: str = "fetch or save the model again") -> Shapes:
    """Returns the shapes in a safetensors file. Raises InputError, which ends with `fix`, if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        # Opening checks header, offsets, sizes and the file's length.
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: not a complete safetensors file ({in_brief(error)}); {fix}") from error


def check_weights(model: Model) -> Shapes:
    """Returns the shapes of a base's tensors, or {} for pickles, and for weights on the hub that are split into several files.

    Raises InputError if a file is damaged or missing, or the weights are pickles without `allow_pickle`.
    """
    with about(KEY):
        return {
            name: shape
            for file in safetensors_files(model, fetch=False)
            for name, shape in shapes_in(file).items()
        }


def safetensors_files(model: Model, fetch: bool) -> list[Path]:
    """Returns the weight files of a base in the order in which transformers reads them, or [] for pickles.

    Args:
        fetch: whether to fetch weights on the hub that are split into several files. Otherwise they are [], too.
    """
    name, revision = model.name_or_path, model.revision
    if single := base_file(name, SINGLE, revision):  # takes precedence over an index
        return [single]
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
    fetched = [base_file(name, file, revision) for file in files] if fetch else []
    return [file for file in fetched if file]


def check_lora(base: Base, lora: dict[str, Any]) -> None:
    """Raises InputError if a name or pattern of a new adapter matches no module of the base; peft ignores some of them.

    Args:
        lora: the job's `lora` section.
    """
    modules = [name.removesuffix(".weight") for name, shape in base.shapes.items() if len(shape) > 1]
    modules = [name for name in modules if not name.startswith(HEAD_NAMES)]
    if not base.plain_names or not modules:
        return
    modules.append("lm_head")  # it has no tensor if it is tied to the embedding
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        given = lora.get(key)
        for name in [given] if isinstance(given, str) else given or ():
            try:
                matches = name == "all-linear" or any(_matches(name, given, module) for module in modules)
            except re.error as error:
                raise InputError(f"{name!r} is no regular expression ({error})", f"lora.{key}") from error
            if not matches:
                endings = dict.fromkeys(module.rpartition(".")[2] for module in modules)
                raise InputError(
                    f"{name!r} matches no module of this base; expected some of {', '.join(endings)}",
                    f"lora.{key}",
                )


def _matches(name: str, given: Any, module: str) -> bool:
    """Returns whether a module matches as in peft: a list's names are ends of its name, all other settings patterns."""
    if isinstance(given, list):  # the files of some bases lack the beginning of each name
        return f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}")
    return bool(re.fullmatch(name if isinstance(given, str) else rf"(.*\.)?({name})", module))
