"""How many completions a worker decodes at once: as many as the memory that is free holds."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pipeline.models.adapters import SharedBase

GIB = 2**30
SHARE = 0.5  # of the free memory; the rest is for the prompts' forward, and for what other phases hold then
# Of a row, for each token of the vocabulary: logits, probabilities and their sums in float64.
SAMPLING_BYTES = 20
CGROUP = Path("/sys/fs/cgroup")


def kv_bytes(config: Any, itemsize: int) -> int:
    """Bytes of keys and values of one token in all layers of a text model with this config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * itemsize


def decoding_rows(shared: SharedBase, most: int, longest: int) -> tuple[int, float]:
    """(rows, bytes): the completions to decode at once, up to `most`, and the memory that is free for them.

    Args:
        longest: tokens of the longest prompt and completion together.
    """
    config = shared.base.config.get_text_config()
    row = kv_bytes(config, shared.base.dtype.itemsize) * longest + SAMPLING_BYTES * shared.vocab_size
    room = SHARE * free_bytes(shared.device)
    return (max(1, int(room // row)) if room < most * row else most), room


def free_bytes(device: torch.device) -> float:
    """Bytes that this process can still allocate on a device; infinity where the system does not say."""
    import torch

    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    # The workers of a node share its memory.
    return free_of_node() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_of_node() -> float:
    """Bytes of memory that are available here, within the container's limit; infinity where Linux does not say."""
    found = [math.inf]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable")]
    for folder, limit, usage in (
        (CGROUP, "memory.max", "memory.current"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
    ):
        try:
            free = int((folder / limit).read_text()) - int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such file, or no limit: "max"
            continue
        # The usage contains cached files, which give way.
        found.append(free + float(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return max(0.0, min(found))
