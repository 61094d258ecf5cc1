"""Lists the GPUs of this machine, and looks up their peak FLOP/s in a table of datasheet values."""

from __future__ import annotations

import re
from typing import Any

# Peak TFLOP/s of dense bf16 matrix products, by a word in torch's device name. For a GPU with several versions, the value is for
# the SXM version.
PEAK_TFLOPS = {"L4": 121, "A10G": 70, "A100": 312, "L40S": 362, "H100": 989, "H200": 989}


def list_local_gpus() -> list[tuple[str, float]]:
    """Returns (name, bytes of memory) for each GPU that torch can use."""
    import torch

    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(gpu.name, float(gpu.total_memory)) for gpu in devices]


def model_flops_utilization(
    device: Any, base: Any, tokens: float, passes: float, seconds: float
) -> dict[str, float]:
    """Returns the metric `mfu`: FLOPs of a model's passes, divided by the FLOPs that the GPU could do in `seconds`.

    Returns {} for a device without a known peak.

    A forward takes 2 FLOPs per token and parameter. A backward through frozen weights also takes 2 FLOPs, because only
    activations have gradients. The FLOPs of recomputed activations are not included (MFU, Chowdhery et al. 2022, section 4.1).

    Args:
        base: the base. `num_parameters` counts each 4-bit weight of an NF4 base.
        tokens: tokens per GPU.
        passes: number of forwards and backwards of each token.
    """
    peak = peak_flops(device)
    return {"mfu": 2 * base.num_parameters() * tokens * passes / (seconds * peak)} if peak else {}


def peak_flops(device: Any) -> float | None:
    """Returns the peak bf16 FLOP/s of a torch.device according to its datasheet, or None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    import torch

    words = re.split(r"[^A-Za-z0-9]+", torch.cuda.get_device_name(device))  # e.g. NVIDIA A100-SXM4-80GB
    return next((1e12 * PEAK_TFLOPS[word] for word in words if word in PEAK_TFLOPS), None)
