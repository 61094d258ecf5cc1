"""Computes peft's LoRA layer as one fused operation, in forward and backward.

With x (..., K), the frozen W (N, K), A (r, K), B (N, r) and the scaling s, a LoRA layer is y = x W' + s (x A') B'. peft
runs a separate operation for the base's product, for A, for B, for the scaling and for the sum. The operations for B, for the
scaling and for the sum each write a tensor of the layer's full output width. The fused layer adds the adapter's product to the
base's product in place (BLAS: C += s A B). The fused layer's results differ from peft's only in the order of additions and in
rounding. Like peft, the fused layer stores x and x A' for backward.

Under autocast, peft casts x to the adapter's fp32 and back. The fused layer casts A and B to autocast's dtype instead.
Within `cast_once`, the fused layer casts A and B only once. The parameters stay in fp32, and their gradients are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from pipeline.models.precision import mm_fp32


def fuse_lora_layers(model: nn.Module) -> None:
    """Turns the plain LoRA layers of a model into fused layers, in place. The parameters and their names do not change.

    Sets `__class__`, because peft 0.21 chooses the classes of its layers itself. peft's hook for other classes,
    LoraConfig._register_custom_module, is private. Remove this function when peft accepts custom layer classes, or fuses its
    layers.
    """
    for layer in model.modules():
        if type(layer) is Linear and type(layer.get_base_layer()) is nn.Linear:
            layer.__class__ = FusedLinear


_casts: dict[tuple[int, torch.dtype], Tensor] | None = None


@contextmanager
def cast_once() -> Iterator[None]:
    """Within the block, each adapter is cast to autocast's dtype only once, instead of in every forward and backward.

    No adapter may change within the block. PPO uses `cast_once` for a rollout, and for the micro-batches of an optimizer step.
    """
    global _casts
    outer, _casts = _casts, {} if _casts is None else _casts
    try:
        yield
    finally:
        _casts = outer


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if _casts is None or weight.dtype == dtype:
        return weight.to(dtype)
    key = (weight.data_ptr(), dtype)
    if key not in _casts:
        _casts[key] = weight.detach().to(dtype)
    return _casts[key]


class MixedBatch(NamedTuple):
    """A batch whose rows have different adapters."""

    rows_of: dict[str, Tensor]  # adapter -> indices of the rows that use it
    names: list[str]  # each row's adapter, or "__base__"


class FusedLinear(Linear):
    """Replaces the forward of peft's `lora.Linear` while one plain adapter is active on a frozen base.

    In all other cases, peft's own forward runs. Examples are a trained base, a half-precision base without autocast, dropout,
    DoRA, merged adapters, and several active adapters. Quantized layers are not instances of this class, because peft has
    separate classes for quantized layers.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if mixed := kwargs.pop("mixed", None):
            return self._mixed(x, mixed)
        device = x.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if args or kwargs or not self._fused(x, autocast):
            return super().forward(x, *args, **kwargs)
        base, name = self.get_base_layer(), self.active_adapters[0]
        A, B = self.lora_A[name].weight, self.lora_B[name].weight
        operands = (x, base.weight, A, B, self.scaling[name], autocast or x.dtype)
        # Without gradients, skip the autograd function, because calling it takes as long as a small matrix product.
        y = _Product.apply(*operands) if torch.is_grad_enabled() else _product(*operands)[0]
        return y if base.bias is None else y + base.bias.to(y.dtype)

    def mixes(self, batch: MixedBatch) -> bool:
        """Returns whether `_mixed` supports this layer with the adapters of the batch."""
        return not self.merged and all(self._plain(name) for name in batch.rows_of if name in self.lora_A)

    def _mixed(self, x: Tensor, batch: MixedBatch) -> Tensor:
        """Returns the output (B, ..., N) for rows x (B, ..., K). Each row uses its own adapter, or no adapter."""
        y = self.get_base_layer()(x)
        for name, index in batch.rows_of.items():
            if name in self.lora_A:
                rows = self._cast_input_dtype(x[index], self.lora_A[name].weight.dtype)
                update = self.lora_B[name](self.lora_A[name](rows)).mul_(self.scaling[name])
                y.index_add_(0, index, update.to(y.dtype))
        return y

    def _plain(self, name: str) -> bool:
        """Returns whether an adapter is only the product B A, without DoRA, bias or dropout."""
        return (
            name not in self.lora_variant
            and self.lora_B[name].bias is None
            and isinstance(self.lora_dropout[name], nn.Identity)
        )

    def _fused(self, x: Tensor, autocast: torch.dtype | None) -> bool:
        """Returns whether the fused forward applies to input `x`."""
        names, weight = self.active_adapters, self.get_base_layer().weight
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return False
        same_dtype = x.dtype == weight.dtype == self.lora_A[names[0]].weight.dtype
        return self._plain(names[0]) and not weight.requires_grad and (autocast is not None or same_dtype)


def _product(
    x: Tensor, W: Tensor, A: Tensor, B: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y = x W' + s (x A') B' in `dtype`, then x reshaped to rows, and x A'."""
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    low = rows @ _cast(A, dtype).t()
    y = (rows @ W.t().to(dtype)).addmm_(low, _cast(B, dtype).t(), alpha=scale)
    return y.view(*x.shape[:-1], -1), rows, low


class _Product(torch.autograd.Function):
    """Computes `_product` with a frozen W. The gradients have the dtypes of x, A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, A: Tensor, B: Tensor, scale: float, dtype: torch.dtype
    ) -> Tensor:
        y, rows, low = _product(x, W, A, B, scale, dtype)
        ctx.save_for_backward(rows, low, W, A, B)
        ctx.scale, ctx.dtype, ctx.x_dtype = scale, dtype, x.dtype
        return y

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]:
        rows, low, W, A, B = ctx.saved_tensors
        # In the first layer, x needs no gradient. In a frozen role, A and B need no gradients.
        needs_x, _, needs_A, needs_B, _, _ = ctx.needs_input_grad
        grad_rows = grad.reshape(-1, grad.shape[-1])
        low_grad = (grad_rows @ _cast(B, ctx.dtype)).mul_(ctx.scale)
        x_grad = A_grad = B_grad = None
        if needs_x:
            x_grad = (grad_rows @ W.to(ctx.dtype)).addmm_(low_grad, _cast(A, ctx.dtype))
            x_grad = x_grad.to(ctx.x_dtype).view(*grad.shape[:-1], -1)
        if needs_A:
            A_grad = mm_fp32(low_grad.t(), rows).to(A.dtype)
        if needs_B:
            B_grad = mm_fp32(low.t(), grad_rows).mul_(ctx.scale).t().to(B.dtype)
        return x_grad, None, A_grad, B_grad, None, None
