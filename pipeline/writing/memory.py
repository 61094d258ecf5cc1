"""Memory of decoding: rows that fit into the free memory, and the share of a GPU that vLLM needs."""

import math
import os
from pathlib import Path
from typing import Any

GIB = 2**30
SHARE = 0.5  # share of the free memory for decoding; the rest is for the prompts' forward and other phases
# Bytes of a row for each token of the vocabulary: logits, probabilities, and their sums in float64.
SAMPLING_BYTES = 20
# Assumed memory of vLLM's largest activations, its CUDA graphs, and the CUDA context of its process.
WORKSPACE = 3 * GIB
LARGEST = 0.95  # largest share of a GPU's free memory for vLLM
MOST_ROWS = 256  # rows that vLLM decodes at once
BATCHED_TOKENS = 8192  # tokens of one forward of vLLM, which splits longer prompts
CGROUP = Path("/sys/fs/cgroup")


def kv_bytes(config: Any, itemsize: int) -> int:
    """Returns the bytes of keys and values of one token in all layers of a text model with this config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * itemsize


def decoding_rows(shared: Any, most: int, longest: int) -> tuple[int, float]:
    """Returns (rows, bytes): the completions to decode at once, up to `most`, and the memory that they may take.

    Args:
        shared: the SharedBase.
        longest: tokens of the longest prompt and completion together.
    """
    config = shared.base.config.get_text_config()
    row = kv_bytes(config, shared.base.dtype.itemsize) * longest + SAMPLING_BYTES * shared.vocab_size
    room = SHARE * free_bytes(shared.device)
    return (max(1, int(room // row)) if room < most * row else most), room


def free_bytes(device: Any) -> float:
    """Returns the bytes that this process can still allocate on a torch.device, or infinity if the system does not report it."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    # The workers of a node share its memory.
    return free_of_node() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_of_node() -> float:
    """Returns the bytes of memory available here, within the container's limit, or infinity if Linux does not report it."""
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
        # Cached files count as used, but the kernel drops them if memory runs short.
        found.append(free + float(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return max(0.0, min(found))


def memory_share(total: float, free: float, weights: float, kv_bytes: float, rows: int, length: int) -> float:
    """Returns the share of a GPU of `total` bytes that vLLM needs, in hundredths: its gpu_memory_utilization.

    At most LARGEST of what is free, or vLLM does not start: with a cache for fewer rows, vLLM decodes in turns.

    Args:
        free: bytes that the trainer, which has loaded its own base, leaves.
        weights: bytes of the base.
        kv_bytes: keys and values of one token in all layers.
        rows: completions of one worker in an update.
        length: tokens of the longest prompt and completion together.
    """
    needed = weights + kv_bytes * min(rows, MOST_ROWS) * length + WORKSPACE
    return min(math.ceil(100 * needed / total), math.floor(100 * LARGEST * free / total)) / 100
