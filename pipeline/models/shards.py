"""A frozen base in shards over the workers of a run (FSDP2): `model.fsdp`. No rank holds it whole, loading included.

`load_shards` builds the base without memory (meta device), gives each rank its slices of the embedding and of every decoder
layer, and fills them from safetensors. The lm head stays whole on every rank: every decoding step multiplies by it, and of a
70B Llama it is 1.5 % of the weights. Adapters are added afterwards: FSDP does not know them, so they are whole on every rank,
and their gradients are averaged as without shards.

Every forward and backward gathers one layer at a time from all ranks; lockstep.py sees to it that all make as many.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeline.errors import InputError
from pipeline.models import lockstep
from pipeline.models.adapter_files import HEAD_NAMES
from pipeline.models.base import configured, fp32_head, freeze, score_head, source, unreadable
from pipeline.models.base_files import base_file, base_json, local
from pipeline.models.weights import INDEX, SINGLE, stored_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pipeline.config import Model


def load_shards(
    model: Model,
    scorer_tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """What models.base.load_base returns, in shards: each rank of the process group has 1 / their number of its body.

    Every rank calls it, with the same arguments but for the device.

    Args:
        model: the job's `model` section.
        scorer_tokenizer: asks for a sequence-classification model; see load_base.
        device: of this rank, to compute on.

    Raises:
        InputError: when the base has no layers to shard, or its files lack or misshape a weight.
    """
    device = torch.device(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    config, auto = configured(model, scorer_tokenizer)
    options: dict[str, Any] = {"dtype": getattr(torch, model.dtype)}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    with torch.device("meta"), unreadable(model):
        base = auto.from_config(config, trust_remote_code=model.trust_remote_code, **options)
    base.requires_grad_(False)
    _shard(base, mesh)
    _allocate(base, device)
    _fill(base, _weight_files(model), model.name_or_path)
    freeze(base)
    if scorer_tokenizer is not None:
        fp32_head(base)
    else:
        _read_generation_config(base, model)
    lockstep.start(base.base_model)
    return base


def _shard(base: PreTrainedModel, mesh: DeviceMesh) -> None:
    body = base.base_model
    layers = getattr(body, "layers", None)
    if layers is None:
        raise InputError(
            f"{type(body).__name__} has no `layers`, to be sharded one by one; type model.fsdp=false",
            key="model.fsdp",
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # The body and not the ForCausalLM: SharedBase.body calls the body, and only hooks of what is called run.
    fully_shard(body, mesh=mesh, reshard_after_forward=True)


def _allocate(base: nn.Module, device: torch.device) -> None:
    """Give the shards memory, and compute the buffers that no file holds (rotary frequencies)."""
    base.to_empty(device=device)
    for name, module in base.named_modules():
        computed = dict(module.named_buffers(recurse=False))
        if computed and not hasattr(module, "config"):
            raise InputError(
                f"{type(base).__name__}: {name} has buffers that no file holds, {min(computed)!r} for one, which cannot be "
                "computed from its configuration; type model.fsdp=false",
                key="model.fsdp",
            )
        if computed:
            with torch.device(device):
                fresh = type(module)(module.config)
            for key, value in fresh.named_buffers(recurse=False):
                computed[key].copy_(value)


def _weight_files(model: Model) -> list[Path]:
    """The base's safetensors files, fetched from the hub unless it is a folder."""
    name, revision = model.name_or_path, model.revision
    index = base_json(name, INDEX, revision)
    names = sorted(set(index["weight_map"].values())) if index else [SINGLE]
    files = [base_file(name, each, revision) for each in names]
    if any(file is None for file in files):
        raise InputError(
            f"{str(local(name))!r} has no {names[files.index(None)]}; a base in shards is read from safetensors alone",
            key="model.name_or_path",
        )
    return [file for file in files if file is not None]


@torch.no_grad()
def _fill(base: PreTrainedModel, files: list[Path], where: str) -> None:
    """Read this rank's rows of each parameter: safetensors maps the file, so the rest is not copied."""
    missing = dict(base.named_parameters())
    # An lm head that is the embedding has no tensor of its own in the files; here the two are apart, for both are frozen.
    also = {}
    if (
        base.config.get_text_config().tie_word_embeddings
        and (head := base.get_output_embeddings()) is not None
    ):
        names = {parameter: name for name, parameter in missing.items()}
        embedding = base.get_input_embeddings()
        also[names[embedding.weight]] = missing.pop(names[head.weight])
    for file in files:
        stored = stored_in(file)
        with safe_open(file, framework="pt") as tensors:
            for name in stored.keys() & missing.keys():
                for parameter in (missing.pop(name), *([also[name]] if name in also else [])):
                    if stored[name].shape != tuple(parameter.shape):
                        raise InputError(
                            f"{file}: {name} has shape {stored[name].shape} and config.json promises "
                            f"{tuple(parameter.shape)}; fetch or save the model again",
                            key="model.name_or_path",
                        )
                    mine, begin = _rows(parameter)
                    if mine.numel():
                        mine.copy_(tensors.get_slice(name)[begin : begin + len(mine)])
    for name in [name for name in missing if name.startswith(HEAD_NAMES)]:
        missing.pop(name)
        base._init_weights(score_head(base))  # with the random numbers that transformers' loading takes
    if missing:
        raise InputError(
            f"the weight files of {where!r} lack {len(missing)} of its tensors: {min(missing)!r}; fetch or save the model again",
            key="model.name_or_path",
        )


def _rows(parameter: nn.Parameter) -> tuple[torch.Tensor, int]:
    """What this rank holds of a parameter, and the row of the whole at which it begins: FSDP2 cuts as torch.chunk does."""
    if not isinstance(parameter, DTensor):
        return parameter.data, 0
    mesh = parameter.device_mesh
    return parameter.to_local(), int(mesh.get_local_rank()) * -(-len(parameter) // mesh.size())


def _read_generation_config(base: PreTrainedModel, model: Model) -> None:
    """As from_pretrained does: it may name further tokens that end a completion."""
    from transformers import GenerationConfig

    if base_file(model.name_or_path, "generation_config.json", model.revision) is not None:
        with unreadable(model):
            base.generation_config = GenerationConfig.from_pretrained(
                source(model.name_or_path), revision=model.revision
            )
