"""Batches of rows of similar length."""

from __future__ import annotations

from collections.abc import Sequence

# A forward of this many tokens keeps the hardware busy: beyond, padding costs more than another forward. On a CPU measured; on
# a GPU, a layer's launches take about 1 ms, in which one of 8B multiplies some 1,000 tokens, and smaller ones more.
BUSY_TOKENS = {"cpu": 256, "cuda": 2048}


def micro_batches(
    lengths: Sequence[int],
    rows: int | None,
    tokens: int | None,
    device: str = "cpu",
    completions: Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns batches of rows of similar length, as indices into `lengths`, shortest first.

    A batch that has the device's BUSY_TOKENS also ends if the next, longer row would turn over 1/8 of it into padding.

    Args:
        lengths: tokens of each row.
        rows: limit on completions per batch. None: none.
        tokens: limit on tokens per batch, padding included; a longer row is a batch by itself. None: none.
        device: type of the device that computes.
        completions: in each row, if rows are packs of them. None: one.
    """
    held = completions or [1] * len(lengths)
    busy = BUSY_TOKENS.get(device, BUSY_TOKENS["cpu"])
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        batch = batches[-1] if batches else []
        used = sum(lengths[j] for j in batch)
        padded = (len(batch) + 1) * lengths[i]  # with this row, the longest so far
        full = rows is not None and sum(held[j] for j in batch) + held[i] > rows
        full |= tokens is not None and padded > tokens
        sparse = used >= busy and padded - used - lengths[i] > padded / 8
        if not batch or full or sparse:
            batches.append([])
        batches[-1].append(i)
    return batches
