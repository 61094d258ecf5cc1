"""How a CPU multiplies fp32 matrices: by oneDNN where that is exact, else by torch's default.

torch.set_float32_matmul_precision("medium") lets torch take oneDNN with products rounded to bf16 where the processor has
units for that. Where it has none, oneDNN's products stay in fp32: on AMD they take half the time of torch's default, on
Intel about the same. So their error is looked at. Their speed is not: it varies with what else the machine does, and the
same seed would not give the same bits. `bf16_speedup` tells a processor that multiplies bfloat16 from one where torch
imitates it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

DEFAULT, MEDIUM = "highest", "medium"  # torch's names
LARGEST_ERROR = 1e-5  # fp32 stays below 2e-6, TF32 and bf16 lie above 1e-4
ROUNDS = 3


def decide(errors: Sequence[float], begun_with: str | None = None) -> tuple[str, str]:
    """The setting of a run, and a line that says why.

    Args:
        errors: of "medium" on each worker: it must be exact on all of them.
        begun_with: the setting that the run has had until now; it stays, unless it is inexact where the run continues.
    """
    inexact = [error for error in errors if not error < LARGEST_ERROR]  # NaN, too
    error, exact = (inexact or [max(errors)])[0], not inexact
    if begun_with == MEDIUM and not exact:
        return DEFAULT, (
            f'warning: until now this run multiplied fp32 matrices at precision "{MEDIUM}", which has an error of {error:.1e} '
            f'on this processor (limit {LARGEST_ERROR:.0e}); it continues at "{DEFAULT}": its figures equal those of an '
            "uninterrupted run up to rounding, no longer to the bit"
        )
    if begun_with is not None:
        return begun_with, f'fp32 products at precision "{begun_with}", as this run began'
    if not exact:
        return DEFAULT, (
            f'fp32 products at precision "{DEFAULT}", torch\'s default ("{MEDIUM}" has an error of {error:.1e} here, above '
            f"{LARGEST_ERROR:.0e})"
        )
    return MEDIUM, f'fp32 products at precision "{MEDIUM}", by oneDNN (error {error:.1e} here)'


def medium_error() -> float:
    """The largest difference of "medium" from fp64 on this processor, relative to the largest entry of the product.

    Of fixed shapes, whatever the model: those of a layer's forward, of the gradients of its input and of an adapter, and of
    a decoding step. It leaves torch's settings as they were.
    """
    draw = torch.Generator().manual_seed(0)
    x, W, grad = (torch.randn(shape, generator=draw) for shape in ((256, 768), (2048, 768), (256, 2048)))
    operands = [(x, W.t()), (grad, W), (grad[:, :16].t(), x), (x[:16], W.t())]
    with _one_thread(), _restored():
        torch.set_float32_matmul_precision(MEDIUM)
        return max(_error(a, b) for a, b in operands)


def bf16_speedup() -> float:
    """Seconds of a product in fp32 by torch's default over those in bfloat16: 2 or more in hardware, below 1 without."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=draw) for shape in ((64, 768), (768, 2048)))
    low_a, low_b = a.bfloat16(), b.bfloat16()
    with _one_thread(), _restored():
        torch.set_float32_matmul_precision(DEFAULT)
        return _best(lambda: a @ b) / _best(lambda: low_a @ low_b)


def _best(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of ROUNDS rounds, after one that is not counted."""
    seconds = []
    for _ in range(1 + ROUNDS):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return min(seconds[1:])


def _error(a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()
    return float(((a @ b) - exact).abs().max() / exact.abs().max())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several threads wait for each other, so that a neighbour's load on one core would count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
