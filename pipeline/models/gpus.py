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


def peak_flops(device: Any) -> float | None:
    """Returns the peak bf16 FLOP/s of a torch.device according to its datasheet, or None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    import torch

    words = re.split(r"[^A-Za-z0-9]+", torch.cuda.get_device_name(device))  # e.g. NVIDIA A100-SXM4-80GB
    return next((1e12 * PEAK_TFLOPS[word] for word in words if word in PEAK_TFLOPS), None)
