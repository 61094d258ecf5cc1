"""A frozen base in shards over the workers of a run (FSDP2): no rank holds it whole, loading included.

`load_shards` builds the base without memory (meta device), gives each rank its slices of every decoder layer, of the
embedding and of the lm head, and fills them from safetensors. Adapters are added afterwards: FSDP does not know them, so
they are whole on every rank, and their gradients are averaged as without shards.

Every forward and backward gathers one layer at a time from all ranks: all ranks must make the same number of them.
No stage uses this yet: there is no key `model.fsdp` in a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pipeline.errors import InputError
from pipeline.models.weights import stored_in


def load_shards(config: Any, folder: Path, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """A frozen AutoModelForCausalLM of which this rank holds 1 / mesh.size() of every weight.

    Args:
        config: transformers' configuration of the base.
        folder: holds its *.safetensors.
        mesh: of one dimension, over all ranks, of the device that computes.
        dtype: of the weights in memory.

    Raises:
        InputError: when embedding and lm head share a weight, or the files lack or misshape one.
    """
    from transformers import AutoModelForCausalLM

    if config.get_text_config().tie_word_embeddings:
        raise InputError(
            f"{str(folder)!r} uses one weight as embedding and lm head, which cannot be sharded apart; take a base without "
            "tied embeddings",
            key="model.name_or_path",
        )
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base.eval().requires_grad_(False)
    body = base.base_model
    layers = getattr(body, "layers", None)
    if layers is None:
        raise InputError(
            f"{type(body).__name__} has no `layers`, to be sharded one by one; load this base whole",
            key="model.name_or_path",
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # The body and not the ForCausalLM: SharedBase.body calls the body, and only hooks of what is called run.
    for part in (body, base.get_output_embeddings()):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    _allocate(base, torch.device(mesh.device_type))
    _fill(base, folder)
    return base


def _allocate(base: nn.Module, device: torch.device) -> None:
    """Give the shards memory, and compute the buffers that no file holds (rotary frequencies)."""
    base.to_empty(device=device)
    for name, module in base.named_modules():
        computed = dict(module.named_buffers(recurse=False))
        if computed and not hasattr(module, "config"):
            raise InputError(
                f"{type(base).__name__}: {name} has buffers that no file holds, {min(computed)!r} for one, which cannot be "
                "computed from its configuration; load this base whole",
                key="model.name_or_path",
            )
        if computed:
            with torch.device(device):
                fresh = type(module)(module.config)
            for key, value in fresh.named_buffers(recurse=False):
                computed[key].copy_(value)


@torch.no_grad()
def _fill(base: nn.Module, folder: Path) -> None:
    """Read this rank's rows of each parameter: safetensors maps the file, so the rest is not copied."""
    missing = dict(base.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        stored = stored_in(file)
        with safe_open(file, framework="pt") as tensors:
            for name in stored.keys() & missing.keys():
                parameter = missing.pop(name)
                assert isinstance(parameter, DTensor)
                if stored[name].shape != tuple(parameter.shape):
                    raise InputError(
                        f"{file}: {name} has shape {stored[name].shape} and config.json promises {tuple(parameter.shape)}; "
                        "fetch or save the model again",
                        key="model.name_or_path",
                    )
                mine = parameter.to_local()
                if mine.numel():
                    begin = _first_row(parameter)
                    mine.copy_(tensors.get_slice(name)[begin : begin + len(mine)])
    if missing:
        raise InputError(
            f"the weight files of {str(folder)!r} lack {len(missing)} of its tensors: {min(missing)!r}; "
            "fetch or save the model again",
            key="model.name_or_path",
        )


def _first_row(parameter: DTensor) -> int:
    """The row of the whole parameter at which this rank's shard begins: FSDP2 cuts as torch.chunk does."""
    mesh = parameter.device_mesh
    return int(mesh.get_local_rank()) * -(-len(parameter) // mesh.size())
