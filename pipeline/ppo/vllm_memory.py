"""The memory that vLLM needs beside the trainer, from shapes alone (no torch import)."""

from __future__ import annotations

import math

GIB = 2**30
# Activations of its largest forward, CUDA graphs, CUDA's context in a process of its own: an assumption.
WORKSPACE = 3 * GIB
LARGEST = 0.95  # share of a GPU that vLLM can be given
MOST_ROWS = 256  # that vLLM decodes at once
BATCHED_TOKENS = 8192  # in one of its forwards; longer prompts are read in pieces


def memory_needed(weights: float, kv_bytes: float, rows: int, length: int) -> float:
    """Bytes for a base of `weights` bytes and a cache of `rows` completions with their prompts.

    Args:
        kv_bytes: keys and values of one token in all layers.
        rows: completions of one worker in an update.
        length: tokens of the longest prompt and completion together.
    """
    return weights + kv_bytes * min(rows, MOST_ROWS) * length + WORKSPACE


def memory_share(total: float, weights: float, kv_bytes: float, rows: int, length: int) -> float:
    """The same as a share of a GPU of `total` bytes, rounded up to hundredths: vllm.LLM's gpu_memory_utilization.

    A cache for fewer rows works too, in turns: no share is larger than LARGEST.
    """
    needed = memory_needed(weights, kv_bytes, rows, length)
    return min(LARGEST, math.ceil(100 * needed / total) / 100)
