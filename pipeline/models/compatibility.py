"""Checks a base's weights, its config.json, `lora` settings and adapters against each other, before a run starts.

    base = base.check_base(job.model)   # its files are complete, with as many layers as its config.json states
    check_lora(base, job.lora)     # the settings of a new adapter match modules of the base

Everything is read from the headers of the safetensors files, in milliseconds and for any architecture. Deeper contradictions
are found when a worker loads the model: transformers, peft and `base.check_loaded` then reject them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, about
from pipeline.models.files import HEAD_NAMES
from pipeline.models.hub import KEY, base_config, base_file, base_json, local, weight_files
from pipeline.models.weights import INDEX, SINGLE, Stored, stored_by_index, stored_in

if TYPE_CHECKING:
    from pipeline.config.job import Model

# A layer of a language model
LAYER = re.compile(r"(?:(?:model|transformer|gpt_neox)\.)?(?:layers|h)\.(\d+)\.")
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight", "gpt_neox.embed_in.weight")


@dataclass(frozen=True)
class Base:
    """A base as its files describe it."""

    model: Model
    config: dict[str, Any]
    tensors: dict[str, Stored]  # empty if its weights are not local, or not safetensors

    @property
    def plain_names(self) -> bool:
        """Returns False if transformers may rename or repack the tensors as it loads them."""
        special = self.config.get("quantization_config") or self.config.get("text_config")
        return not (
            special or self.model.trust_remote_code or any(".experts." in name for name in self.tensors)
        )

    def weight_shape(self, module: str) -> tuple[int, ...] | None:
        """Returns the shape of a module's weight, or None if the files have no such name."""
        # Some files of GPT-2 lack the `transformer.` before each name.
        names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
        stored = next((self.tensors[name] for name in names if name in self.tensors), None)
        return stored.shape if stored and self.plain_names else None


def check_weights(model: Model) -> dict[str, Stored]:
    """Returns {name: dtype and shape} of a base's tensors, from the headers of its files.

    The result is empty for pickles, and for weights on the hub that are split into several files.

    Raises:
        InputError: if a file is damaged or missing, the weights are pickles without `allow_pickle`, or config.json states
            another number of layers.
    """
    name, revision = model.name_or_path, model.revision
    single = base_file(name, SINGLE, revision)
    index = None if single else base_json(name, INDEX, revision)
    if single is None and index is None:
        _check_pickles(model)
        return {}
    tensors, file_of = dict[str, Stored](), (index or {}).get("weight_map", {})
    with about(KEY):
        if single is not None:
            tensors = stored_in(single)
        elif os.path.isdir(local(name)):
            tensors = stored_by_index(local(name), file_of)
    _check_layers(Base(model, base_config(name, revision), tensors), list(tensors or file_of))
    return tensors


def _check_pickles(model: Model) -> None:
    """Raises InputError if a base has no weights under their usual names, or pickled ones without `allow_pickle`."""
    name, folder = model.name_or_path, local(model.name_or_path)
    files = weight_files(folder) if os.path.isdir(folder) else []
    if os.path.isdir(folder) and not files:
        raise InputError(f"{name!r} holds no weights; expected *.safetensors in it", KEY)
    if files and files[0].suffix == ".safetensors":
        raise InputError(
            f"{name!r} holds {files[0].name}, but neither {SINGLE} nor {INDEX}; fetch or save the model again",
            KEY,
        )
    if not model.allow_pickle:
        raise InputError(
            f"{name!r} has pickled weights only (pytorch_model.bin), which can run any code when loaded; convert them to "
            "safetensors, or, if you trust them, set model.allow_pickle=true",
            KEY,
        )


def _check_layers(base: Base, names: list[str]) -> None:
    """Compares the number of layers with config.json: transformers drops the layers that it does not build.

    Args:
        names: the names of all tensors.
    """
    config = base.config
    if not base.plain_names:
        return
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    found = max((int(match[1]) + 1 for name in names if (match := LAYER.match(name))), default=0)
    # Layers that predict further tokens (DeepSeek-V3) follow the others; transformers leaves them out.
    most = (layers or 0) + (config.get("num_nextn_predict_layers") or 0)
    if found and layers is not None and not layers <= found <= most:
        raise InputError(
            f"the weight files of {base.model.name_or_path!r} have {found} layers, and config.json promises {layers}; fetch or save the model again",
            KEY,
        )


def _matching(name: str, given: Any, modules: list[str]) -> set[str]:
    """Returns the modules that a name or pattern of a setting matches, as peft matches.

    Args:
        given: the setting. peft compares the names in a list with the end of a module's name, and reads others as patterns.
    """
    if isinstance(given, list):  # the files of some bases lack the beginning of each name
        return {one for one in modules if f".{one}".endswith(f".{name}") or f".{name}".endswith(f".{one}")}
    pattern = name if isinstance(given, str) else rf"(.*\.)?({name})"
    return {module for module in modules if re.fullmatch(pattern, module)}


def check_lora(base: Base, lora: dict[str, Any]) -> None:
    """Checks that the names and patterns of a new adapter match modules of the base, at least one in total.

    peft ignores some names that match none.

    Args:
        lora: the job's `lora` section.

    Raises:
        InputError: with the name or pattern.
    """
    modules = [name.removesuffix(".weight") for name, tensor in base.tensors.items() if len(tensor.shape) > 1]
    modules = [name for name in modules if not name.startswith(HEAD_NAMES)]
    if not base.plain_names or not modules:
        return
    modules.append("lm_head")  # it has no tensor if it is tied to the embedding
    endings = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    chosen: dict[str, set[str]] = {}
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        given = lora.get(key)
        for name in [given] if isinstance(given, str) else given or ():
            if name == "all-linear":
                continue
            try:
                matches = _matching(name, given, modules)
            except re.error as error:
                raise InputError(f"{name!r} is no regular expression ({error})", f"lora.{key}") from error
            if not matches:
                raise InputError(
                    f"{name!r} matches no module of this base; expected "
                    + "all-linear, or " * (key == "target_modules")
                    + f"some of {', '.join(endings)}",
                    f"lora.{key}",
                )
            chosen[key] = chosen.get(key, set()) | matches
    linear = set(modules) - {name.removesuffix(".weight") for name in EMBEDDINGS} - {"lm_head"}
    if "exclude_modules" in chosen and chosen.get("target_modules", linear) <= chosen["exclude_modules"]:
        raise InputError(
            f"{lora['exclude_modules']!r} excludes every module of lora.target_modules, so nothing would be trained; exclude fewer",
            "lora.exclude_modules",
        )
    layers, count = lora.get("layers_to_transform"), base.config.get("num_hidden_layers")
    for layer in [layers] if isinstance(layers, int) else layers or ():
        if count is not None and not 0 <= layer < count:
            raise InputError(
                f"found {layer}, but this base has the layers 0 to {count - 1}", "lora.layers_to_transform"
            )
