"""A frozen base in shards over the workers of a run (FSDP2): `model.fsdp`. No rank ever holds the full base.

`load_shards` builds the base without memory (meta device), gives each rank its slices of the embedding and of every decoder
layer, and fills them from safetensors. The lm head is complete on every rank: every decoding step multiplies by it, and it is
1.5 % of the weights of a 70B Llama. Adapters are added afterwards. FSDP does not know them: they are complete on every rank, and
their gradients are averaged as without shards.

Every forward and backward gathers one layer at a time from all ranks. fsdp_sync.py keeps their forwards equal.
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
from pipeline.models import fsdp_sync
from pipeline.models.base import configured, fp32_head, freeze, score_head, unreadable
from pipeline.models.files import HEAD_NAMES
from pipeline.models.hub import base_file, base_json, source
from pipeline.models.weights import INDEX, SINGLE, stored_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pipeline.config.job import Model


def load_shards(
    model: Model,
    scorer_tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """Returns what models.base.load_base returns, in shards: each of N ranks of the process group has 1/N of its body.

    Every rank calls it with the same arguments, except for the device.

    Args:
        model: the job's `model` section.
        scorer_tokenizer: the tokenizer of a sequence-classification model; see load_base.
        device: this rank's device, to compute on.

    Raises:
        InputError: if the base has no layers to shard, or its files lack or misshape a weight.
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
    fsdp_sync.start(base.base_model)
    return base


def _shard(base: PreTrainedModel, mesh: DeviceMesh) -> None:
    body = base.base_model
    layers = getattr(body, "layers", None)
    if layers is None:
        raise InputError(
            f"{type(body).__name__} has no `layers` to shard one by one; set model.fsdp=false",
            key="model.fsdp",
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # Not the ForCausalLM, because SharedBase.body calls the body, and only a called module's hooks run. It is resharded
    # after each forward, because the backward may come much later; by default FSDP2 keeps the outermost module gathered.
    fully_shard(body, mesh=mesh, reshard_after_forward=True)


def _allocate(base: nn.Module, device: torch.device) -> None:
    """Gives the shards memory, and computes the buffers that no file holds (rotary frequencies)."""
    base.to_empty(device=device)
    for name, module in base.named_modules():
        computed = dict(module.named_buffers(recurse=False))
        if computed and not hasattr(module, "config"):
            raise InputError(
                f"{type(base).__name__}: {name} has buffers that no file holds, such as {min(computed)!r}, and they cannot be "
                "computed from its configuration; set model.fsdp=false",
                key="model.fsdp",
            )
        if computed:
            with torch.device(device):
                fresh = type(module)(module.config)
            for key, value in fresh.named_buffers(recurse=False):
                computed[key].copy_(value)


def _weight_files(model: Model) -> list[Path]:
    """Returns the base's safetensors files in the order in which transformers reads them, fetched from the hub if necessary."""
    name, revision = model.name_or_path, model.revision
    single = base_file(name, SINGLE, revision)
    if single is not None:  # a single file takes precedence over an index
        return [single]
    index = base_json(name, INDEX, revision)
    if index is None:
        raise InputError(
            f"{name!r} has no safetensors, and shards cannot be read from other files; set model.fsdp=false",
            key="model.fsdp",
        )
    found = {file: base_file(name, file, revision) for file in sorted(set(index["weight_map"].values()))}
    if missing := [file for file, path in found.items() if path is None]:
        raise InputError(
            f"{name!r} has no {missing[0]}, which its {INDEX} names; fetch the model again",
            key="model.name_or_path",
        )
    return [path for path in found.values() if path is not None]


@torch.no_grad()
def _fill(base: PreTrainedModel, files: list[Path], where: str) -> None:
    """Reads this rank's rows of each parameter. safetensors maps the files, so the other rows are not copied."""
    parameters = dict(base.named_parameters())
    # If files repeat a name, the last one counts, as in transformers
    place = {name: file for file in files for name in stored_in(file)}
    source = {name: name for name in parameters if name in place}
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is not None and base.config.get_text_config().tie_word_embeddings:
        # The files have one tensor for both. Here they are two, because both are frozen.
        names = {id(parameter): name for name, parameter in parameters.items()}
        pair = names[id(embedding.weight)], names[id(head.weight)]
        for name, twin in (pair, pair[::-1]):
            if twin in place:
                source.setdefault(name, twin)
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name, stored in source.items():
                if place[stored] == file:
                    _read(tensors.get_slice(stored), parameters[name], f"{file}: {stored}")
    missing = parameters.keys() - source.keys()
    if heads := [name for name in missing if name.startswith(HEAD_NAMES)]:
        # A scorer's new head is random, and equal on all ranks: each stage sets the same seed before it loads its base.
        base._init_weights(score_head(base))
        missing -= set(heads)
    if missing:
        raise InputError(
            f"the weight files of {where!r} lack {len(missing)} tensors, for example {min(missing)!r}. Fetch the model again; if "
            "the files have other names, which transformers translates, set model.fsdp=false",
            key="model.name_or_path",
        )


def _read(stored: Any, parameter: nn.Parameter, where: str) -> None:
    """Copies this rank's rows of a tensor. FSDP2 splits the rows as torch.chunk does.

    Args:
        stored: the tensor in its file, a slice of safetensors.
        where: file and name, for messages.
    """
    if tuple(stored.get_shape()) != tuple(parameter.shape):
        raise InputError(
            f"{where} has shape {tuple(stored.get_shape())} and config.json promises {tuple(parameter.shape)}; fetch or save the "
            "model again",
            key="model.name_or_path",
        )
    mine, begin = parameter.data, 0
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        mine, begin = parameter.to_local(), int(mesh.get_local_rank()) * -(-len(parameter) // mesh.size())
    if mine.numel():
        mine.copy_(stored[begin : begin + len(mine)])


def _read_generation_config(base: PreTrainedModel, model: Model) -> None:
    """Reads the generation configuration, which may name more tokens that end a completion, as from_pretrained does."""
    from transformers import GenerationConfig

    if base_file(model.name_or_path, "generation_config.json", model.revision) is not None:
        with unreadable(model):
            base.generation_config = GenerationConfig.from_pretrained(
                source(model.name_or_path), revision=model.revision
            )
