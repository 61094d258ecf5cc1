"""Chooses how a process on a CPU multiplies fp32 matrices. It depends on the base's hidden size and on the processor.

torch.set_float32_matmul_precision("medium") lets oneDNN multiply. It rounds to bf16 if the processor has units for that. If
not, its products are exact in fp32 and take half the time of torch's default on AMD, about the same on Intel. Each oneDNN
product costs about 15 microseconds to set up, so small bases are multiplied by torch's default, "highest". Attention always
is, because torch's flash attention multiplies block by block, and at "medium" each block is a oneDNN product (9 times as slow
for rows of 26 tokens, equal from 512 tokens on).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HIGHEST, MEDIUM = "highest", "medium"  # torch's names
MAX_ERROR = 1e-5  # fp32 stays below 2e-6, TF32 and bf16 lie above 1e-4
MIN_HIDDEN_SIZE = 512  # from this size on, oneDNN multiplies faster than torch's default

_plain_attention = F.scaled_dot_product_attention


def configure(hidden_size: int, device: str) -> str:
    """Sets the precision of this process's fp32 products with a base of that hidden size. Returns a line that says why.

    On a GPU it changes nothing: "medium" is TF32 or less there.
    """
    if device != "cpu":
        precision = torch.get_float32_matmul_precision()
        tf32 = "without TF32" if precision == HIGHEST else "with TF32 or less"
        return f'fp32 products at precision "{precision}", on a GPU {tf32}'
    precision, why = HIGHEST, f"torch's default (hidden size {hidden_size}, below {MIN_HIDDEN_SIZE})"
    if hidden_size >= MIN_HIDDEN_SIZE:
        error = medium_error()
        why = f'torch\'s default ("{MEDIUM}" has an error of {error:.1e} here, above {MAX_ERROR:.0e})'
        if error < MAX_ERROR:  # not if it is NaN
            precision, why = MEDIUM, f"by oneDNN (error {error:.1e} here)"
    torch.set_float32_matmul_precision(precision)
    F.scaled_dot_product_attention = attention
    return f'fp32 products at precision "{precision}", {why}'


def medium_error() -> float:
    """Returns the largest difference of "medium" from fp64 on this processor, relative to the product's largest entry.

    It multiplies fixed shapes: a layer's forward, the gradients of its input and of an adapter, a decoding step.
    """
    draw = torch.Generator().manual_seed(0)
    x, W, grad = (torch.randn(shape, generator=draw) for shape in ((256, 768), (2048, 768), (256, 2048)))
    operands = [(x, W.t()), (grad, W), (grad[:, :16].t(), x), (x[:16], W.t())]
    with _precision(MEDIUM):
        return max(_error(a, b) for a, b in operands)


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """Computes torch's scaled_dot_product_attention and its gradients at "highest" (see above).

    Remove when torch's flash attention on a CPU leaves small products to MKL at "medium" (torch 2.13:
    at::native::cpublas::gemm takes oneDNN).
    """
    if torch.get_float32_matmul_precision() == HIGHEST:
        return _plain_attention(*args, **kwargs)
    with _precision(HIGHEST):
        out = _plain_attention(*args, **kwargs)
    if out.grad_fn is not None:
        out.grad_fn.register_prehook(lambda _: torch.set_float32_matmul_precision(HIGHEST))
        out.grad_fn.register_hook(lambda *_: torch.set_float32_matmul_precision(MEDIUM))
    return out


def _error(a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()
    return float(((a @ b) - exact).abs().max() / exact.abs().max())


@contextmanager
def _precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
