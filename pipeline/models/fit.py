"""Checks base weights, config.json and `lora` against each other by names and shapes, before a run starts.

    base = check_base(job.model)               # its files hold the tensors that its config.json promises
    check_lora(base, job.lora, scorer=False)   # the settings of a new adapter match modules of the base

Plain Llamas are checked in milliseconds against a table of their tensors (llama.py). For all others, and for any
mismatch, transformers and peft decide, on the meta device: that takes three seconds.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, about, in_brief
from pipeline.models.adapter_files import HEAD_NAMES
from pipeline.models.base import architecture, check_loaded, model_classes, unreadable, without_load_report
from pipeline.models.base_files import base_config, base_file, base_json, local, weight_files
from pipeline.models.llama import LINEAR as LLAMA_LINEAR
from pipeline.models.llama import Layout, layout
from pipeline.models.weights import FLOATING, INDEX, SINGLE, Stored, stored_in, stored_in_model

if TYPE_CHECKING:
    from pipeline.config import Model


@dataclass(frozen=True)
class Base:
    """A base as its files describe it."""

    model: Model
    config: dict[str, Any]
    tensors: dict[str, Stored]  # empty if its weights are not local, or not safetensors
    scorer: bool = False  # a sequence-classification model with its head
    gpu: bool = False  # the run uses GPUs, which this process may lack

    @property
    def plain(self) -> Layout | None:
        """{name: shape} of its tensors, if it is a plain Llama."""
        return None if self.scorer else layout(self.config)

    @property
    def checkable(self) -> bool:
        """False for models with code of their own, and for quantised weights, whose shapes only their loader knows."""
        return not (self.config.get("quantization_config") or self.model.trust_remote_code)


# ----------------------------------------------------------------------------------------------- its weight files


def check_weights(model: Model) -> dict[str, Stored]:
    """{name: dtype and shape} of a base's tensors, from the headers of its files (no torch import).

    Empty for sharded weights on the hub and for pickles, which cannot be read like that.

    Raises:
        InputError: when a file is damaged or missing, or the weights are pickles without `allow_pickle`.
    """
    folder = local(model.name_or_path)
    if not os.path.isdir(folder):
        return _check_hub_weights(model)
    with about("model.name_or_path"):
        tensors = stored_in_model(folder)
    if tensors:
        return tensors
    if os.path.lexists(folder / SINGLE):
        raise InputError(
            f"{folder / SINGLE} holds no tensors; fetch or save the model again", key="model.name_or_path"
        )
    files = weight_files(folder)
    if not files:
        raise InputError(
            f"{str(folder)!r} holds no weights; expected *.safetensors in it", key="model.name_or_path"
        )
    if files[0].suffix == ".safetensors":
        raise InputError(
            f"{str(folder)!r} holds {files[0].name}, but neither {SINGLE} nor {INDEX}; fetch or save the "
            "model again",
            key="model.name_or_path",
        )
    _check_pickles(model)
    return {}


def _check_hub_weights(model: Model) -> dict[str, Stored]:
    file = base_file(model.name_or_path, SINGLE, model.revision)
    if file is not None:
        with about("model.name_or_path"):
            return stored_in(file)
    if base_file(model.name_or_path, INDEX, model.revision) is None:
        _check_pickles(model)
    return {}


def _check_pickles(model: Model) -> None:
    if not model.allow_pickle:
        raise InputError(
            f"{model.name_or_path!r} has pickled weights only (pytorch_model.bin), which can run any "
            "code when loaded; convert them to safetensors, or, if you trust them, set model.allow_pickle=true",
            key="model.name_or_path",
        )


# --------------------------------------------------------------------------------------------------- the base


def check_base(model: Model, scorer: bool = False, gpu: bool = False, weights: bool = True) -> Base:
    """Check that a base's files hold the tensors that its config.json promises, in their shapes.

    Args:
        scorer: whether it is a reward model, with a scalar head.
        gpu: whether the run uses GPUs, which this process may lack.
        weights: whether to check its weights, or config.json alone.

    Raises:
        InputError: names the tensor or key that is wrong.
    """
    config = base_config(model.name_or_path, model.revision)
    _check_generation(model)
    tensors = check_weights(model) if weights else {}
    base = Base(model, config, tensors, scorer, gpu)
    if not base.checkable:
        return base
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    known = base.plain and (not weights or base.plain == shapes)
    if not known:
        skeleton(base)
    if model.attn_implementation not in (None, *(("eager", "sdpa") if known else ())):
        check_attention(base)
    for name, tensor in tensors.items():
        if name.endswith("weight") and tensor.dtype not in FLOATING:
            raise InputError(
                f"{model.name_or_path!r}: tensor {name!r} is of dtype {tensor.dtype}, expected one of "
                f"{', '.join(FLOATING)}; fetch or save the model again",
                key="model.name_or_path",
            )
    return base


def _check_generation(model: Model) -> None:
    """Raises InputError if transformers refuses generation_config.json.

    Skips its import if the file holds only token ids, which tokenizer.py checks, and booleans.
    """
    config = base_json(model.name_or_path, "generation_config.json", model.revision) or {}
    if all(key.endswith(("_token_id", "_version")) or type(value) is bool for key, value in config.items()):
        return
    from transformers import GenerationConfig

    with without_load_report(), unreadable(model):
        GenerationConfig.from_dict(config)


def skeleton(base: Base, scorer: bool | None = None) -> Any:
    """The model on the meta device, loaded by transformers from the names and shapes of the base's tensors.

    Args:
        scorer: whether it gets the scalar head of a new reward model, which the files need not have. None: `base.scorer`.

    Raises:
        InputError: when the files and config.json do not agree.
    """
    import logging

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its import recommends another package
    import torch
    from transformers.utils import logging as transformers_logging

    _check_count_of_layers(base)
    wants_score = base.scorer if scorer is None else scorer
    config, auto = architecture(base.model, wants_score)
    transformers_logging.disable_progress_bar()
    try:
        with without_load_report(), unreadable(base.model):
            if not base.tensors:
                with torch.device("meta"):
                    return auto.from_config(config)
            loaded, info = model_classes(wants_score)[type(config)].from_pretrained(
                None,
                config=config,
                state_dict={
                    name: torch.empty(tensor.shape, device="meta") for name, tensor in base.tensors.items()
                },
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,  # report them, for check_loaded to refuse
                output_loading_info=True,
            )
    finally:
        transformers_logging.enable_progress_bar()
    check_loaded(base.model.name_or_path, info, scorer=bool(scorer))
    return loaded


def _check_count_of_layers(base: Base) -> None:
    """Raises InputError if config.json has more layers than there are tensors, before that many are built."""
    text = base.config.get("text_config") or base.config
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if base.tensors and isinstance(text.get(key), int) and text[key] > len(base.tensors):
            raise InputError(
                f"config.json of {base.model.name_or_path!r} says {key}={text[key]}, and its weight files "
                f"hold {len(base.tensors)} tensors in all; fetch the model again",
                key="model.name_or_path",
            )


def check_attention(base: Base) -> None:
    """Check `model.attn_implementation`.

    Raises:
        InputError: when it is unknown, not for this architecture, or its package is missing.
    """
    import importlib.util

    import torch

    attention = base.model.attn_implementation
    config, auto = architecture(base.model, base.scorer)
    try:
        with torch.device("meta"):
            auto.from_config(config, attn_implementation=attention)
        if attention == "flex_attention" and not base.gpu:
            raise ValueError("it has no backward on a CPU")
    except Exception as error:  # the hub, kernels and each package raise types of their own
        if importlib.util.find_spec("flash_attn") and base.gpu and not torch.cuda.is_available():
            return  # installed, but it needs a GPU, which the workers have and this process lacks
        raise InputError(
            f"{attention!r} cannot be used with {config.model_type} here ({in_brief(error)}); take the "
            "key out, or type model.attn_implementation=sdpa (or eager)",
            key="model.attn_implementation",
        ) from error


# ------------------------------------------------------------------------------------------------ a new adapter


def check_lora(base: Base, lora: dict[str, Any], scorer: bool) -> None:
    """Check the settings of a new adapter.

    Args:
        lora: the job's `lora` section.
        scorer: whether the adapter is for a reward model.

    Raises:
        InputError: when peft refuses them, or a name or pattern in them matches no module of the base.
    """
    targets = lora.get("target_modules")
    simple = lora.keys() <= {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "bias"}
    listed = isinstance(targets, list) and targets and LLAMA_LINEAR.issuperset(map(str, targets))
    if not base.checkable or (base.plain and simple and (targets == "all-linear" or listed)):
        return
    model = skeleton(base, scorer)
    modules = [
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "ndim", 0) > 1 and not name.startswith(HEAD_NAMES)
    ]
    for key in ("target_modules", "exclude_modules"):
        if lora.get(key) != "all-linear":
            _check_names(key, lora.get(key), modules)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in lora.get(key) or ():
            _matches(key, rf"(.*\.)?({pattern})", modules, pattern)  # as peft matches it
    _check_layers(lora, model.config.get_text_config().num_hidden_layers)
    _adapt(model, lora)


def _check_names(key: str, modules: Any, names: list[str]) -> None:
    """Raises InputError unless each of `lora.key` matches one of `names`: a list by their ends, a regex as a whole."""
    for module in [modules] if isinstance(modules, str) else modules or ():
        if isinstance(modules, str):
            matches = _matches(key, module, names)
        else:
            matches = any(name == module or name.endswith(f".{module}") for name in names)
        if not matches:
            choices = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise InputError(
                f"lora.{key}: {module!r} matches no module of this base; expected "
                + ("all-linear, or " if key == "target_modules" else "")
                + f"some of {choices}"
            )


def _matches(key: str, pattern: str, names: list[str], shown: str | None = None) -> bool:
    """Whether a regular expression matches one of `names` as a whole.

    Args:
        shown: the pattern as the job has it, for messages.

    Raises:
        InputError: when it is not a regular expression.
    """
    try:
        return any(re.fullmatch(pattern, name) for name in names)
    except (re.error, RecursionError) as error:
        raise InputError(
            f"{shown or pattern!r} is no regular expression ({error})", key=f"lora.{key}"
        ) from error


def _check_layers(lora: dict[str, Any], count: int) -> None:
    layers = lora.get("layers_to_transform")
    for layer in [layers] if isinstance(layers, int) else layers or ():
        if not 0 <= layer < count:
            raise InputError(
                f"found {layer}, but this base has the layers 0 to {count - 1}",
                key="lora.layers_to_transform",
            )


def _adapt(model: Any, lora: dict[str, Any]) -> None:
    """Add the adapter as a worker will. Raises InputError if peft refuses it, or warns of settings that match nothing."""
    from pipeline.models.adapters import SharedBase

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", RuntimeWarning)  # a pattern or parameter that matches nothing
            SharedBase(model).add("policy", lora=lora)
    except InputError:
        raise
    except Exception as error:  # peft checks some settings, and fails in many ways over others
        raise InputError(f"peft refuses these settings ({in_brief(error)}); fix them", key="lora") from error
