"""Computes how many rows fit into the free memory for decoding, and which fraction of a GPU's memory vLLM needs."""

import math
import os
from pathlib import Path
from typing import Any

GIB = 2**30
DECODING_SHARE = 0.5  # fraction of the free memory for decoding; prompts and other phases need the rest
# Bytes per row and vocabulary entry: logits, probabilities, and the probabilities' cumulative sums in float64.
SAMPLING_BYTES = 20
# Assumed memory of vLLM's largest activations, its CUDA graphs, and the CUDA context of its process.
VLLM_WORKSPACE = 3 * GIB
MAX_VLLM_SHARE = 0.95  # maximum fraction of a GPU's free memory for vLLM
MAX_VLLM_ROWS = 256  # maximum rows that vLLM decodes at the same time
MAX_VLLM_TOKENS = 8192  # maximum tokens in one of vLLM's forwards; vLLM splits longer prompts
CGROUP = Path("/sys/fs/cgroup")  # files with the container's memory limits


def kv_bytes(config: Any, itemsize: int) -> int:
    """Returns the bytes of one token's keys and values in all layers of a text model with the given config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * itemsize


def decoding_rows(shared: Any, max_rows: int, longest: int) -> tuple[int, float]:
    """Returns (rows, bytes): the number of completions to decode at the same time, at most `max_rows`, and the memory for them.

    Args:
        shared: the SharedBase.
        longest: maximum tokens of a prompt with its completion.
    """
    config = shared.base.config.get_text_config()
    row_bytes = kv_bytes(config, shared.base.dtype.itemsize) * longest + SAMPLING_BYTES * shared.vocab_size
    memory = DECODING_SHARE * free_bytes(shared.device)
    return (max(1, int(memory // row_bytes)) if memory < max_rows * row_bytes else max_rows), memory


def free_bytes(device: Any) -> float:
    """Returns the bytes that this process can still allocate on a torch.device."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + unused)
    # All workers of a node share the node's memory.
    return free_of_node() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def free_of_node() -> float:
    """Returns the bytes of memory available here, within the container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = [int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable")]
    for folder, limit, used in (
        (CGROUP, "memory.max", "memory.current"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),  # cgroup version 1
    ):
        try:
            free = int((folder / limit).read_text()) - int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # if there is no limit, the file is missing or contains "max"
            continue
        # Cached files count as used memory, but the kernel evicts them if memory is short.
        available.append(free + float(stat.get("total_inactive_file", stat.get("inactive_file", 0))))
    return max(0.0, min(available))


def memory_share(
    total: float, free: float, weights: float, token_bytes: float, rows: int, length: int
) -> float:
    """Returns vLLM's gpu_memory_utilization: the fraction of a GPU's `total` bytes that vLLM needs, rounded to hundredths.

    vLLM does not start if it requests more than the free memory, so the result is at most MAX_VLLM_SHARE of the free memory. If
    the KV cache is too small for all rows, vLLM decodes some rows later.

    Args:
        free: bytes that are free after the trainer has loaded its base.
        weights: bytes of the base.
        token_bytes: bytes of one token's keys and values in all layers.
        rows: completions that one worker samples in an update.
        length: maximum tokens of a prompt with its completion.
    """
    needed = weights + token_bytes * min(rows, MAX_VLLM_ROWS) * length + VLLM_WORKSPACE
    return min(math.ceil(100 * needed / total), math.floor(100 * MAX_VLLM_SHARE * free / total)) / 100
