"""Counts the parameters of a job's model and the bytes that a token needs, without loading weights.

Builds the model with one layer and with two layers, runs both on fake tensors, and counts what autograd would save for the
backward pass. The difference between the two models is the size of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.errors import InputError
from pipeline.job import Model
from pipeline.system.hub import base_config
from pipeline.writing.memory import kv_bytes

# Parts of the config.json of gated models, so that `plan` needs neither access rights nor a network for these models.
_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
SHAPES: dict[str, dict[str, Any]] = {
    f"meta-llama/Llama-3.1-{size}{kind}": {**_LLAMA_3, **shape}
    for size, shape in (("8B", _8B), ("70B", _70B))
    for kind in ("", "-Instruct")
}
NF4_BYTES = 0.516  # bytes per NF4 weight: half a byte, plus its share of the quantization constants


def config_of(model: Model) -> tuple[dict[str, Any], str | None]:
    """Returns (the base's config.json, None), or (the base's values in SHAPES, the reason) if the file cannot be read."""
    try:
        return base_config(model.name_or_path, model.revision), None
    except InputError as error:
        if model.name_or_path not in SHAPES:
            raise
        return SHAPES[model.name_or_path], error.message


class Shape:
    """The sizes of a base with adapters: parameters, bytes of weights, bytes per token of activations.

    Args:
        model: the `model` section, with the dtype of the frozen base.
        lora: the settings of a new adapter.
        head: whether an adapter has a scalar head. Reward models have a head, and so do critics that start from a reward model.
    """

    def __init__(self, model: Model, lora: dict[str, Any], head: bool = False) -> None:
        import logging

        # Hide a recommendation that bitsandbytes logs on import.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        from transformers import AutoConfig

        from pipeline.models.base import context_length

        raw, self.unread = config_of(model)  # `unread`: why config.json cannot be read, or None
        self.context = context_length(raw) or 2048
        self.model = _Model(json.dumps(raw, sort_keys=True), model.dtype, head)
        self.lora = json.dumps(lora, sort_keys=True)
        self.text = text = AutoConfig.for_model(**raw).get_text_config()
        self.layers, self.vocabulary, self.hidden = text.num_hidden_layers, text.vocab_size, text.hidden_size
        self.dtype_bytes = 4 if model.dtype == "float32" else 2
        single, double = (_count(self.model, self.lora, layers) for layers in (1, 2))
        totals = {key: single[key] + (self.layers - 1) * (double[key] - single[key]) for key in single}
        self.parameters = totals["parameters"]
        # Bytes of one layer, in the dtype of the base.
        self.layer = (double["parameters"] - single["parameters"]) * self.dtype_bytes
        self.embedding = self.vocabulary * self.hidden * self.dtype_bytes
        quantized = totals["linear"] if model.load_in_4bit else 0
        self.weights = (self.parameters - quantized) * self.dtype_bytes + quantized * NF4_BYTES
        # Bytes that a decoding step reads and writes. For a matrix product, bitsandbytes writes and reads a copy of each NF4
        # weight in the compute dtype (functional.dequantize_4bit). Only the kernel for a batch of one row needs no copy.
        self.moved = self.weights + 2.0 * quantized * self.dtype_bytes

    def sharded(self, workers: int, lm_head: bool) -> float:
        """Returns the bytes of the base on each worker with `model.fsdp`: a shard of the body, and with `lm_head` the lm head."""
        body = self.weights - self.embedding * (not self.text.tie_word_embeddings)
        return body / workers + self.embedding * lm_head

    def adapter(self, lora: dict[str, Any]) -> int:
        """Returns the number of parameters of an adapter with the peft settings `lora`, including its head."""
        settings = json.dumps(lora, sort_keys=True)
        single, double = (_count(self.model, settings, layers)["adapter"] for layers in (1, 2))
        return single + (self.layers - 1) * (double - single)

    def activations(self, rows: int, width: int, bf16: bool, checkpointing: bool) -> float:
        """Returns the bytes that a forward of one role saves for backward, plus the temporary tensors of one layer."""
        single, double = (bytes_saved(self.model, self.lora, layers, rows, width, bf16) for layers in (1, 2))
        layer, rest = double - single, max(0.0, 2 * single - double)
        passing = rows * width * self.forward(bf16)
        if not checkpointing:
            return rest + layer * self.layers + passing
        return rest + layer + rows * width * self.hidden * self._width(bf16) * self.layers + passing

    def forward(self, bf16: bool) -> float:
        """Returns the bytes per token of a layer's temporary tensors: three tensors of the MLP's intermediate size."""
        return 3.0 * (getattr(self.text, "intermediate_size", None) or 4 * self.hidden) * self._width(bf16)

    def cache(self, bf16: bool) -> float:
        """Returns the bytes of one token's keys and values in all layers."""
        return kv_bytes(self.text, self._width(bf16))

    @property
    def keeps_other_state(self) -> bool:
        """Returns whether a layer has more state than keys and values, so that the decoder reads all prompts in one forward."""
        kinds = getattr(self.text, "layer_types", None) or ()
        return any(kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds)

    def _width(self, bf16: bool) -> int:
        return 2 if bf16 else self.dtype_bytes


@dataclass(frozen=True)
class _Model:
    """The settings of a job that determine the counts of parameters and bytes. Serves as the key of the cached counts."""

    config: str  # config.json
    dtype: str
    head: bool


@cache
def _count(model: _Model, lora: str, layers: int) -> dict[str, int]:
    """Counts the parameters of a model with `layers` layers: in the base, in its linear layers, and in its adapter.

    The linear layers do not include the lm head.
    """
    import torch

    with _fake(model, lora, layers) as shared:
        base = [p for name, p in shared.base.named_parameters() if "lora_" not in name]
        modules = [m for m in shared.base.base_model.modules() if isinstance(m, torch.nn.Linear)]
        linear = {id(p) for module in modules for p in module.parameters()}
        return {
            "parameters": sum(p.numel() for p in base),
            "linear": sum(p.numel() for p in base if id(p) in linear),
            "adapter": sum(p.numel() for p in shared.parameters_of("policy")),
        }


@cache
def bytes_saved(model: _Model, lora: str, layers: int, rows: int, width: int, bf16: bool) -> float:
    """Returns the bytes of the tensors, except parameters, that autograd saves in a forward pass through `layers` layers."""
    from unittest.mock import patch

    import torch

    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with _fake(model, lora, layers, bf16) as shared:
        parameters = {p.untyped_storage()._cdata for p in shared.parameters()}
        ids = torch.zeros(rows, width, dtype=torch.long)
        # transformers (5.23) reads the values of position_ids to detect packed rows. Fake tensors have no values, so
        # transformers would add a mask. Remove the patch when transformers supports fake tensors as position_ids.
        unpacked = patch("transformers.masking_utils.find_packed_sequence_indices", lambda *_, **__: None)
        with unpacked, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = shared.hidden("policy", ids)
        del hidden
        return float(sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in parameters))


@contextmanager
def _fake(model: _Model, lora: str, layers: int, bf16: bool = False) -> Iterator[Any]:
    """Yields a SharedBase of fake tensors with one trainable role."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.models.adapters import SharedBase

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    config = AutoConfig.for_model(**json.loads(model.config))
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, model.dtype))
        shared = SharedBase(base, autocast=torch.bfloat16 if bf16 else None)
        shared.add("policy", lora=json.loads(lora), head=model.head, trainable=True)
    with FakeTensorMode():
        # Replace meta tensors by fake tensors on the CPU, which support autocast. Tied weights stay tied.
        fakes: dict[int, Any] = {}
        for module in shared.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    fake = torch.nn.Parameter(on_cpu(p), requires_grad=p.requires_grad)
                    module._parameters[name] = fakes.setdefault(id(p), fake)
            for name, b in module._buffers.items():
                module._buffers[name] = None if b is None else on_cpu(b)
        shared._parameters_by_key.clear()
        yield shared
