"""Groups rows into batches of similar length, and packs completions of the same prompt into one row.

A packed row is [prompt, completion, completion, ...], so the prompt is computed once. In each completion, positions continue
from the prompt, and a token attends only to the prompt and to its own completion. Therefore, a completion's hidden states are
the same as in the row [prompt, completion], up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# A forward with this many tokens keeps the hardware busy, so more padding costs more than a second forward (measured on a CPU).
# On a GPU, launching the kernels of a layer takes about 1 ms, in which a layer of an 8B model processes about 1,000 tokens.
BUSY_TOKENS = {"cpu": 256, "cuda": 2048}


@dataclass(frozen=True)
class Batch:
    """Input of one forward, for B completions of up to R actions in P rows of up to T tokens, padded on the right."""

    input_ids: Tensor  # (P, T)
    # (B, R + 1) indices into the P * T hidden states: the position before each action, and then the last action's position.
    # If a completion has fewer than R actions, its last index is repeated.
    indices: Tensor
    position_ids: Tensor | None = None  # (P, T), or None if the positions of each row count from 0
    # (P, T, T) bool, True for the tokens that each token attends to, or None for all earlier tokens.
    allowed: Tensor | None = None

    def ends(self) -> Batch:
        """Returns the same batch, but with only the last index of each completion in `indices`."""
        return replace(self, indices=self.indices[:, -1:])


def pack_alone(input_ids: Tensor, starts: Tensor, counts: Tensor, actions: int) -> Batch:
    """Makes a batch in which each completion is a separate row.

    Args:
        input_ids: (B, T) prompts with their completions. Row b has a prompt of `starts[b]` and a completion of `counts[b]`
            tokens.
        actions: R, at least the length of the longest completion.
    """
    steps = torch.arange(actions + 1, device=input_ids.device).minimum(counts.unsqueeze(-1))
    rows = torch.arange(len(input_ids), device=input_ids.device) * input_ids.shape[1]
    return Batch(input_ids, (rows + starts - 1).unsqueeze(-1) + steps)


def pack_together(
    input_ids: Tensor, starts: Tensor, counts: Tensor, actions: int, packs: Sequence[Sequence[int]]
) -> Batch:
    """Makes a batch in which the completions of each pack share one row. Takes the arguments of `pack_alone`, and `packs`.

    Args:
        packs: for each row, the indices of its completions. All completions of a row have the same prompt.
    """
    device = input_ids.device
    ids, prompt_sizes, sizes = input_ids.tolist(), starts.tolist(), counts.tolist()
    rows, positions, parts = [], [], []  # `parts`: 0 for tokens of the prompt, i for the i-th completion
    indices = torch.zeros(len(ids), actions + 1, dtype=torch.long)
    width = max(prompt_sizes[pack[0]] + sum(sizes[i] for i in pack) for pack in packs)
    for number, pack in enumerate(packs):
        start = prompt_sizes[pack[0]]
        row, position, part = ids[pack[0]][:start], list(range(start)), [0] * start
        for order, i in enumerate(pack, 1):
            first, count = number * width + len(row), sizes[i]
            steps = torch.arange(actions + 1).clamp(max=count)
            indices[i] = (first - 1 + steps).where(steps > 0, torch.tensor(number * width + start - 1))
            row = row + ids[i][start : start + count]
            position += range(start, start + count)
            part += [order] * count
        fill = [0] * (width - len(row))
        rows.append(row + fill)
        positions.append(position + fill)
        parts.append(part + [-1] * len(fill))
    owner = torch.tensor(parts, device=device)
    causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    allowed = causal & ((owner.unsqueeze(-1) == owner.unsqueeze(-2)) | (owner == 0).unsqueeze(-2))
    return Batch(
        torch.tensor(rows, device=device), indices.to(device), torch.tensor(positions, device=device), allowed
    )


def packs_that_pay(
    prompts: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    width: int,
    completions: int | None = None,
    tokens: int | None = None,
) -> list[list[int]]:
    """Packs completions of one prompt into one row if packing saves computation. Returns the indices of each row's completions.

    A row of T tokens costs about T * (12 W**2 + 2 T W) multiplications per layer. The products with weights cost 12 W**2 per
    token, and attention costs 2 T W. A packed row also computes the attention between its completions, although this attention is
    masked.

    Args:
        prompts: for each completion, the index of its prompt.
        starts, counts: for each completion, the tokens of its prompt and of the completion.
        width: W, the size of the hidden states.
        completions, tokens: maximum completions and tokens of a pack, or None for no limit. A single completion may be larger.
    """

    def cost(tokens: int) -> int:
        return tokens * (6 * width + tokens)

    packs: dict[int, list[list[int]]] = {}
    pack_tokens: dict[int, int] = {}  # prompt -> tokens of its newest pack
    for i, prompt in enumerate(prompts):
        single, joint = starts[i] + counts[i], pack_tokens.get(prompt, 0) + counts[i]
        if (
            prompt in packs
            and cost(joint) < cost(pack_tokens[prompt]) + cost(single)
            and (completions is None or len(packs[prompt][-1]) < completions)
            and (tokens is None or joint <= tokens)
        ):
            packs[prompt][-1].append(i)
            pack_tokens[prompt] = joint
        else:
            packs.setdefault(prompt, []).append([i])
            pack_tokens[prompt] = single
    return [pack for prompt_packs in packs.values() for pack in prompt_packs]


def micro_batches(
    lengths: Sequence[int],
    rows: int | None,
    tokens: int | None,
    device: str = "cpu",
    completions: Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns batches of rows of similar length, as indices into `lengths`, shortest rows first.

    If a batch already has BUSY_TOKENS tokens, a row that would raise the batch's share of padding above 1/8 starts a new batch.

    Args:
        lengths: tokens of each row.
        rows: maximum completions of a batch, or None for no limit.
        tokens: maximum tokens of a batch, including padding, or None for no limit. A longer row is a separate batch.
        device: type of the device on which the batches run.
        completions: completions in each row, or None if each row has one completion.
    """
    counts = completions or [1] * len(lengths)
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        batch = batches[-1] if batches else []
        total = sum(lengths[j] for j in batch)
        padded = (len(batch) + 1) * lengths[i]  # the next row would be the longest of the batch
        is_full = rows is not None and sum(counts[j] for j in batch) + counts[i] > rows
        is_full |= tokens is not None and padded > tokens
        is_sparse = total >= BUSY_TOKENS[device] and padded - total - lengths[i] > padded / 8
        if not batch or is_full or is_sparse:
            batches.append([])
        batches[-1].append(i)
    return batches
