"""The episodes of one update, and how they are dealt: to workers, to minibatches, to micro-batches.

What is dealt where is a function of seed and position only, over the *global* batch: every worker draws the same
permutation and takes its own episodes of it. So the number of workers changes who computes, not what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.ppo.rollout import Completion

BUSY = 256  # tokens in one forward that keep the hardware busy: from there on, padding costs more than a further batch


def world() -> tuple[int, int]:
    """(rank, number of workers); (0, 1) where torch.distributed is not in use."""
    return (
        (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
    )


def all_reduce(x: Tensor) -> Tensor:
    """The sum of `x` over the workers, in place."""
    if world()[1] > 1:
        dist.all_reduce(x)
    return x


def prompt_order(position: int, count: int, n_prompts: int, seed: int) -> list[int]:
    """Numbers of the next `count` prompts after `position` have been used: each pass over the prompts is its own shuffle."""
    order: list[int] = []
    while len(order) < count:
        epoch, start = divmod(position + len(order), n_prompts)
        shuffled = np.random.default_rng([seed, epoch]).permutation(n_prompts)
        order += shuffled[start : start + count - len(order)].tolist()
    return order


def deal(batch_size: int, epochs: int, num_mini_batches: int, seed: int, update: int) -> list[np.ndarray]:
    """The minibatches of an update, one after the other: places in the global batch, dealt anew each epoch."""
    minibatches: list[np.ndarray] = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, update, epoch, 1]).permutation(batch_size)
        minibatches += np.array_split(order, num_mini_batches)
    return minibatches


def micro_batches(lengths: Sequence[int], rows: int, tokens: int | None) -> list[list[int]]:
    """Places of `lengths`, sorted and cut: at most `rows` together, or at most `tokens` with padding (a row always fits).

    A batch of BUSY tokens or more also ends where the next, longer row would make more than an eighth of it padding.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        batch = batches[-1] if batches else []
        used = sum(lengths[j] for j in batch)
        wide = (len(batch) + 1) * lengths[i]  # with this row, which is the longest so far
        full = len(batch) >= rows if tokens is None else wide > tokens
        sparse = used >= BUSY and wide - used - lengths[i] > wide / 8
        if not batch or full or sparse:
            batches.append([])
        batches[-1].append(i)
    return batches


@dataclass
class Episodes:
    """Episodes of this worker, padded on the right. B rows, T tokens, R actions; action t is token starts + t."""

    places: Tensor  # (B,) in the global batch of the update
    input_ids: Tensor  # (B, T) prompt and completion
    starts: Tensor  # (B,) length of the prompt
    counts: Tensor  # (B,) length of the completion, its end-of-sequence token included
    ended: Tensor  # (B,) bool; False: cut off by the length limit
    mask: Tensor  # (B, R) bool, on the actions: made from lengths, never from token ids
    sampler_logprobs: Tensor  # (B, R)
    scores: Tensor  # (B,) normalised, weighted, clipped; the penalty for a cut-off completion included
    old_logprobs: Tensor  # (B, R)
    ref_logprobs: Tensor  # (B, R)
    values: Tensor  # (B, R) the critic's, before each action
    bootstrap: Tensor  # (B,) its value after the last action, of rows that were cut off; else 0
    advantages: Tensor  # (B, R)
    returns: Tensor  # (B, R)
    learn: Tensor  # (B, R) bool: `mask`, less what teaches nothing (the overlong filter)

    def __len__(self) -> int:
        return len(self.places)

    def lengths(self) -> list[int]:
        return (self.starts + self.counts).tolist()

    def take(self, rows: Sequence[int]) -> Episodes:
        """Some rows, trimmed to the longest of them."""
        index = torch.as_tensor(rows, device=self.places.device)
        width = int((self.starts + self.counts)[index].max())
        actions = int(self.counts[index].max())
        parts = {}
        for field in fields(self):
            part = getattr(self, field.name)[index]
            if part.dim() == 2:
                part = part[:, : width if field.name == "input_ids" else actions]
            parts[field.name] = part
        return Episodes(**parts)


def collate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    places: Sequence[int],
    pad: int,
    device: torch.device,
) -> Episodes:
    """Episodes from prompts and completions; what is computed later is 0."""
    width = max(len(p) + len(r.tokens) for p, r in zip(prompts, completions, strict=True))
    actions = max(len(r.tokens) for r in completions)
    texts = [[*p, *r.tokens] for p, r in zip(prompts, completions, strict=True)]
    counts = torch.tensor([len(r.tokens) for r in completions], device=device)
    mask = torch.arange(actions, device=device) < counts.unsqueeze(-1)
    zeros, rows = torch.zeros(mask.shape, device=device), torch.zeros(len(completions), device=device)
    sampled = [r.logprobs + [0.0] * (actions - len(r.tokens)) for r in completions]
    return Episodes(
        places=torch.tensor(places, device=device),
        input_ids=torch.tensor([t + [pad] * (width - len(t)) for t in texts], device=device),
        starts=torch.tensor([len(p) for p in prompts], device=device),
        counts=counts,
        ended=torch.tensor([r.ended for r in completions], device=device),
        mask=mask,
        sampler_logprobs=torch.tensor(sampled, device=device),
        scores=rows.clone(),
        old_logprobs=zeros.clone(),
        ref_logprobs=zeros.clone(),
        values=zeros.clone(),
        bootstrap=rows.clone(),
        advantages=zeros.clone(),
        returns=zeros.clone(),
        learn=mask.clone(),
    )
