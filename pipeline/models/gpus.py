"""What a GPU could compute: the peak of its datasheet, and the share of it that a run makes use of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Dense bf16 matrix products in TFLOP/s (SXM where there are several), by the word for it in torch's name of the device.
PEAK_TFLOPS = {"L4": 121, "A10G": 70, "A100": 312, "L40S": 362, "H100": 989, "H200": 989}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of bf16 products by the datasheet of a device; None for a CPU, or a GPU that is not in the table."""
    import torch

    if device.type != "cuda":
        return None
    words = re.split(r"[^A-Za-z0-9]+", torch.cuda.get_device_name(device))  # NVIDIA A100-SXM4-80GB
    return next((1e12 * PEAK_TFLOPS[word] for word in words if word in PEAK_TFLOPS), None)
