"""Loads a frozen base sharded over the workers of a run (FSDP2), with `model.fsdp`. No rank ever holds the full base.

`load_shards` builds the base on the meta device, without memory. Each rank then allocates its slices of the embedding and of
every decoder layer, and reads them from safetensors. Every rank has the full lm head, because every decoding step uses it. In a
70B Llama, the lm head is 1.5 % of the weights. Adapters are added afterwards, without FSDP. Every rank has the full adapters, and
their gradients are averaged in the same way as without shards.

Every forward and backward gathers one layer at a time from all ranks. fsdp_sync.py makes all ranks run the same forwards.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pipeline.errors import InputError
from pipeline.models import fsdp_sync
from pipeline.models.base import (
    base_configuration,
    errors_of_files,
    fp32_head,
    freeze,
    score_head,
)
from pipeline.models.compatibility import safetensors_files
from pipeline.system.hub import HEAD_NAMES


def load_shards(
    model: Any, scorer_tokenizer: Any = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """Loads the same model as base.load_base, but each of the N ranks of the process group has only 1/N of the body.

    Every rank must call this function. Takes the arguments of load_base. Only the argument `device` may differ between ranks.

    Raises InputError if the base has no layers to shard, or if its files lack a weight or have wrong shapes.
    """
    device = torch.device(device)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    config, auto = base_configuration(model, scorer_tokenizer)
    options: dict[str, Any] = {"dtype": getattr(torch, model.dtype)}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    with torch.device("meta"), errors_of_files(model):
        base = auto.from_config(config, trust_remote_code=model.trust_remote_code, **options)
    base.requires_grad_(False)
    layers = getattr(base.base_model, "layers", None)
    if layers is None:
        raise InputError(
            f"{type(base.base_model).__name__} has no `layers` to shard one by one; set model.fsdp=false",
            key="model.fsdp",
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # Shard the body and not the ForCausalLM, because SharedBase.body calls the body, and FSDP runs the hooks of a module only
    # if the module is called. By default, FSDP2 does not reshard the outermost module after a forward, but the backward may come
    # much later.
    fully_shard(base.base_model, mesh=mesh, reshard_after_forward=True)
    _allocate(base, device)
    _fill(base, safetensors_files(model, fetch=True), model.name_or_path)
    freeze(base)
    if scorer_tokenizer is not None:
        fp32_head(base)
    fsdp_sync.current = fsdp_sync.Lockstep(base.base_model)
    return base


def _allocate(base: nn.Module, device: torch.device) -> None:
    """Allocates memory for the shards, and computes the buffers that no file contains, such as rotary frequencies."""
    base.to_empty(device=device)
    for name, module in base.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers and not hasattr(module, "config"):
            raise InputError(
                f"{type(base).__name__}: {name} has buffers that no file contains, such as {min(buffers)!r}, and these cannot be "
                "computed from the model's configuration; set model.fsdp=false",
                key="model.fsdp",
            )
        if buffers:
            with torch.device(device):
                module_copy = type(module)(module.config)
            for key, value in module_copy.named_buffers(recurse=False):
                buffers[key].copy_(value)


@torch.no_grad()
def _fill(base: PreTrainedModel, files: list[Path], base_name: str) -> None:
    """Reads this rank's rows of each parameter. safetensors memory-maps the files, so other ranks' rows are not read."""
    head, embedding, twins = base.get_output_embeddings(), base.get_input_embeddings(), dict[str, str]()
    if head is not None and base.config.get_text_config().tie_word_embeddings:
        # The files contain one tensor for two tied weights, which are separate tensors in memory, because both are frozen.
        pair = [name for name, p in base.named_parameters() if p is head.weight or p is embedding.weight]
        twins = dict(zip(pair, pair[::-1], strict=True))
    missing = []
    with ExitStack() as stack:
        readers = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        # If several files contain a tensor of the same name, the last file is used, as in transformers.
        sources = {name: tensors for tensors in readers for name in tensors.keys()}  # noqa: SIM118  (not a dict)
        for name, parameter in base.named_parameters():
            tensor_name = name if name in sources else twins.get(name, name)
            if tensor_name in sources:
                _read(sources[tensor_name].get_slice(tensor_name), parameter, f"{base_name}: {tensor_name}")
            elif not name.startswith(HEAD_NAMES):
                missing.append(name)
            else:
                # A new reward head is random, but the same on all ranks, because every rank sets the same seed.
                base._init_weights(score_head(base))
    if missing:
        raise InputError(
            f"the safetensors of {base_name!r} lack {len(missing)} tensors, for example {min(missing)!r}. Fetch the model again. If "
            "its weights are pickles, or if transformers renames its tensors, set model.fsdp=false",
            key="model.name_or_path",
        )


def _read(tensor: Any, parameter: nn.Parameter, name: str) -> None:
    """Copies this rank's rows of a tensor in a file into a parameter. FSDP2 splits rows in the same way as torch.chunk."""
    if tuple(tensor.get_shape()) != tuple(parameter.shape):
        raise InputError(
            f"{name} has shape {tuple(tensor.get_shape())} but config.json says {tuple(parameter.shape)}; fetch or save the "
            "model again",
            key="model.name_or_path",
        )
    shard, start = parameter.data, 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        shard, start = parameter.to_local(), int(mesh.get_local_rank()) * -(-len(parameter) // mesh.size())
    if shard.numel():
        shard.copy_(tensor[start : start + len(shard)])
