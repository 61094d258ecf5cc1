"""Multiplies half-precision matrices into an fp32 result, and determines the precision of a model's outputs.

torch computes the product of two bf16 matrices in fp32, but rounds the result to bf16, which has 8 significant bits. The rounding
error of a logit of 10 is up to 0.03, and the token's log-prob has a similar error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


def precision_of(base: Any, autocast: bool) -> str:
    """Returns `quantized`, `half` (half-precision products or weights) or `fp32`. A model's outputs depend on this precision."""
    if getattr(base, "is_quantized", False):
        return "quantized"
    return "half" if autocast or base.dtype != torch.float32 else "fp32"


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Returns the product (N, M) of `a` (N, K) and `b` (K, M), which have the same dtype. Half-precision products are in fp32."""
    if a.dtype not in HALF:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    # torch supports `out_dtype` only on CUDA. On other devices, a second product computes the rounding error of the first
    # product. The rounding error is small, so rounding it in turn hardly matters.
    product = a @ b
    return product.float().add_(product.addmm_(a, b, beta=-1))


def linear_fp32(x: Tensor, layer: nn.Linear, dtype: torch.dtype | None) -> Tensor:
    """Returns the output (..., M) of a frozen layer for x (..., K), in fp32 or higher precision.

    Args:
        dtype: dtype of the operands, or None for the dtype of the layer's weight.
    """
    weight = layer.weight
    # On a CPU, making a half-precision copy of the weight would take as long as the product.
    if dtype is None or (weight.device.type == "cpu" and weight.dtype not in HALF):
        dtype = weight.dtype
    with torch.autocast(x.device.type, enabled=False):
        y = _FrozenLinear.apply(x, weight, dtype)
        return y if layer.bias is None else y + layer.bias


class _FrozenLinear(torch.autograd.Function):
    """Computes y = x W' by `mm_fp32` with a frozen W. Defines the gradient, because autograd cannot differentiate `mm_fp32`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(W)
        ctx.dtype, ctx.x_dtype = dtype, x.dtype
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        return mm_fp32(rows, W.to(dtype).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (W,) = ctx.saved_tensors
        grad_rows = grads[0].reshape(-1, W.shape[0]).to(ctx.dtype)
        return (grad_rows @ W.to(ctx.dtype)).to(ctx.x_dtype).view(*grads[0].shape[:-1], -1), None, None
