"""Autocast for tensors of a pretended GPU.

torch's autocast kernels check a tensor's C++ device, which is the CPU, and would cast nothing. The kernels here replace torch's
kernels for the key AutocastCUDA, for the operations in torch's CUDA table (ATen/autocast_mode.h) that language models use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tools.gpu.pretend.device import tree_leaves, tree_map
from tools.gpu.pretend.tensors import GpuTensor

LOWER = """linear matmul mm bmm addmm addmv addbmm baddbmm mv conv1d conv2d conv3d prelu linalg_vecdot
    scaled_dot_product_attention""".split()
FP32 = """acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm rms_norm cosine_similarity nll_loss cosine_embedding_loss
    poisson_nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
    cdist renorm logsumexp""".split()
FP32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList""".split()
WIDEST = "addcdiv addcmul atan2 bilinear cross dot index_put scatter_add tensordot cat stack".split()


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        floats = isinstance(x, GpuTensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if floats else x

    return tree_map(cast, tree)


def _widest(tree: Any) -> torch.dtype:
    floats = [x.dtype for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return torch.float32 if torch.float32 in floats or not floats else floats[0]


def _kernel(name: str, policy: list[str]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if policy is LOWER:
                args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cuda"))
            elif policy is WIDEST:
                args, kwargs = _cast((args, kwargs), _widest((args, kwargs)))
            elif policy is FP32:
                args, kwargs = _cast((args, kwargs), torch.float32)
            elif args[0].is_floating_point():
                place = [x.name for x in operation._schema.arguments].index("dtype")
                given = args[place] if place < len(args) else kwargs.get("dtype")
                args, kwargs = args[:place], {**kwargs, "dtype": given or torch.float32}
            return operation(*args, **kwargs)

    return kernel


@contextmanager
def kernels() -> Iterator[None]:
    """Replaces torch's kernels until the `with` block ends."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is replaced, which is intended
        for policy in (LOWER, FP32, FP32_RESULT, WIDEST):
            for name in policy:
                library.impl(name, _kernel(name, policy), "AutocastCUDA")
    try:
        yield
    finally:
        library._destroy()
