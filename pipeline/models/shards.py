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
from pipeline.models.hub import base_file, base_json, local
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
    if getattr(config, "quantization_config", None):
        raise InputError(
            f"{model.name_or_path!r} has quantised weights, which FSDP cannot gather; type model.fsdp=false",
            key="model.fsdp",
        )
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
    # The body and not the ForCausalLM: SharedBase.body calls the body, and only hooks of what is called run. Resharded after
    # each forward, which FSDP2 by itself does not do with the outermost module: its backward may be long in coming.
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
    """The base's safetensors files in the order in which transformers reads them, fetched from the hub unless it is a folder."""
    name, revision = model.name_or_path, model.revision
    single = base_file(name, SINGLE, revision)
    if single is not None:  # it comes before an index
        return [single]
    index = base_json(name, INDEX, revision)
    if index is None:
        raise InputError(
            f"{str(local(name))!r} has no safetensors, which alone can be read in shards; type model.fsdp=false",
            key="model.fsdp",
        )
    files = []
    for each in sorted(set(index["weight_map"].values())):
        file = base_file(name, each, revision)
        if file is None:
            raise InputError(
                f"{str(local(name))!r} has no {each}, which its {INDEX} names; fetch the model again",
                key="model.name_or_path",
            )
        files.append(file)
    return files


@torch.no_grad()
def _fill(base: PreTrainedModel, files: list[Path], where: str) -> None:
    """Read this rank's rows of each parameter: safetensors maps the file, so the rest is not copied."""
    parameters = dict(base.named_parameters())
    missing = dict(parameters)
    for file in files:
        stored = stored_in(file)
        with safe_open(file, framework="pt") as tensors:
            # What a later file has as well is read again, as in transformers.
            for name in stored.keys() & parameters.keys():
                _read(tensors, name, parameters[name], stored[name].shape, file)
                missing.pop(name, None)
    _fill_tied(base, files, missing)
    if heads := [name for name in missing if name.startswith(HEAD_NAMES)]:
        # A scorer's new head: random, and alike on all ranks, since each stage seeds them alike before it loads its base.
        base._init_weights(score_head(base))
        for name in heads:
            del missing[name]
    if missing:
        raise InputError(
            f"the weight files of {where!r} have no tensors called {min(missing)!r} and so on, {len(missing)} in all. Fetch the "
            "model again; if they have other names there, which are translated as a whole base is loaded, type model.fsdp=false",
            key="model.name_or_path",
        )


def _fill_tied(base: PreTrainedModel, files: list[Path], missing: dict[str, nn.Parameter]) -> None:
    """Embedding and lm head that are one weight have one tensor in the files. Here they are two, for both are frozen."""
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is None or not base.config.get_text_config().tie_word_embeddings:
        return
    names = {id(parameter): name for name, parameter in base.named_parameters()}
    pair = [names[id(embedding.weight)], names[id(head.weight)]]
    lacking = [name for name in pair if name in missing]
    if len(lacking) != 1:
        return
    there = next(name for name in pair if name not in lacking)
    for file in files:
        stored = stored_in(file)
        if there in stored:
            with safe_open(file, framework="pt") as tensors:
                _read(tensors, there, missing.pop(lacking[0]), stored[there].shape, file)
            return


def _read(tensors: Any, name: str, parameter: nn.Parameter, shape: tuple[int, ...], file: Path) -> None:
    if shape != tuple(parameter.shape):
        raise InputError(
            f"{file}: {name} has shape {shape} and config.json promises {tuple(parameter.shape)}; fetch or save the model again",
            key="model.name_or_path",
        )
    mine, begin = _rows(parameter)
    if mine.numel():
        mine.copy_(tensors.get_slice(name)[begin : begin + len(mine)])


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
