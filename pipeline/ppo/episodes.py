"""Defines the episodes of an update, and splits them over workers and minibatches.

Each worker samples completions for its share of the prompts. For learning, each minibatch is redistributed over the workers by
token count, so that no worker waits for another. Minibatches depend only on seed and update, and cover the *global* batch. The
number of workers therefore does not change what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.fsdp_sync import all_reduce, world
from pipeline.ppo.config import PPOConfig
from pipeline.scoring.forward import Sequences, collate_ids
from pipeline.writing.rows import Completion


@dataclass(frozen=True)
class Prompts:
    """The training prompts of a run.

    Args:
        rows: each has `input_ids` (token ids) and `row` (JSON text of the data row: `prompt` and other columns).
        draws: function from an epoch's number (from 0) to the indices of the epoch's prompts. All epochs have the same number of
            prompts. If None, every prompt occurs once per epoch.
    """

    rows: Sequence[dict[str, Any]]
    draws: Callable[[int], np.ndarray] | None = None

    @cached_property
    def per_epoch(self) -> int:
        """Returns the number of prompts in an epoch."""
        return len(self.draws(0)) if self.draws else len(self.rows)

    @cached_property
    def longest(self) -> int:
        """Returns the number of tokens of the longest prompt."""
        # If the rows are a datasets.Dataset, reads only the column `input_ids`.
        dataset: Any = self.rows if hasattr(self.rows, "column_names") else None
        return max(map(len, dataset["input_ids"] if dataset else (row["input_ids"] for row in self.rows)))


def prompt_order(
    position: int, count: int, n_prompts: int, seed: int, draws: Callable[[int], np.ndarray] | None = None
) -> list[int]:
    """Returns the indices of the `count` prompts after the run's first `position` prompts. Each epoch is shuffled differently.

    Args:
        n_prompts: number of prompts in an epoch.
        draws: function from an epoch's number (from 0) to its prompts' indices. If None, every prompt occurs once per epoch.
    """
    order: list[int] = []
    while len(order) < count:
        epoch, start = divmod(position + len(order), n_prompts)
        shuffled = np.random.default_rng([seed, epoch]).permutation(n_prompts)
        shuffled = draws(epoch)[shuffled] if draws else shuffled
        order += shuffled[start : start + count - len(order)].tolist()
    return order


def minibatches(args: PPOConfig, update: int) -> list[np.ndarray]:
    """Returns the minibatches of an update, in order, as indices into the global batch.

    Each epoch has its own permutation of the prompts. A prompt's completions stay together, so that they can share a forward.
    """
    batches: list[np.ndarray] = []
    completions = np.arange(args.batch_size).reshape(-1, args.num_generations)
    for epoch in range(args.num_ppo_epochs):
        order = np.random.default_rng([args.seed, update, epoch, 1]).permutation(len(completions))
        batches += np.array_split(completions[order].reshape(-1), args.num_mini_batches)
    return batches


def deal(lengths: Sequence[int], workers: int) -> list[list[int]]:
    """Assigns rows to workers, so that all workers have nearly equal numbers of tokens. Returns each worker's row indices.

    Starts with the longest row, and gives each row to the worker that has the fewest tokens so far (Graham 1969).

    Args:
        lengths: number of tokens of each row. A row may be a pack of completions.
    """
    shares: list[list[int]] = [[] for _ in range(workers)]
    tokens = [0] * workers
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        worker = tokens.index(min(tokens))
        shares[worker].append(row)
        tokens[worker] += lengths[row]
    return shares


class Totals(NamedTuple):
    """Numbers of actions and completions in an optimizer step over all workers.

    A loss is a sum divided by one of these numbers, so the losses of micro-batches add up.
    """

    actions: float
    completions: float  # completions with at least one action in the loss

    @classmethod
    def of(cls, learn: Tensor) -> Totals:
        """Returns the totals from a mask (B, R) of the actions that enter the loss."""
        return cls(float(learn.sum()), float(learn.any(-1).sum()))


@dataclass
class Episodes(Sequences):
    """Episodes of an update: B rows with up to R actions. Action t of a row is the row's token at position `starts` + t."""

    ended: Tensor  # (B,) bool; False if the completion is truncated at `response_length`
    sampler_logprobs: Tensor  # (B, R) log-probs reported by the engine
    # (B,) float64, clipped weighted sum of the rewards' scores, minus the penalty for truncation
    scores: Tensor
    greedy_scores: Tensor  # (B,) score of each prompt's greedy completion, if the estimator reads it
    old_logprobs: Tensor  # (B, R) log-probs of the policy before this update, computed by the trainer
    ref_logprobs: Tensor  # (B, R) log-probs of the reference
    teacher_logprobs: Tensor  # (B, R) log-probs of the teacher, if there is one
    values: Tensor  # (B, R) values of the critic before each action
    bootstrap: Tensor  # (B,) value after the last action of a truncated completion; 0 after EOS
    rewards: Tensor  # (B, R) reward of each action: the KL penalty, plus the score on the last action
    advantages: Tensor  # (B, R)
    returns: Tensor  # (B, R)
    learn: Tensor  # (B, R) bool, True at the actions that enter the loss

    def gathered(self, batch_size: int) -> Episodes:
        """Returns the `batch_size` episodes of all workers, in the order of their indices. All workers get the same episodes."""
        if world()[1] == 1:
            return self
        shape = torch.tensor([self.input_ids.shape[1], self.mask.shape[1]], device=self.indices.device)
        width, actions = all_reduce(shape, dist.ReduceOp.MAX).tolist()
        tensors = {}
        for field in fields(self):
            local = getattr(self, field.name)
            columns = [] if local.dim() == 1 else [width if field.name == "input_ids" else actions]
            # The sum over workers is exact, because one worker has the row, and all other workers add 0.
            dtype = torch.uint8 if local.dtype == torch.bool else local.dtype
            rows = torch.zeros(batch_size, *columns, dtype=dtype, device=local.device)
            rows[(self.indices, *(slice(n) for n in local.shape[1:]))] = local.to(dtype)
            tensors[field.name] = all_reduce(rows).to(local.dtype)
        return Episodes(**tensors)


def collate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    indices: Sequence[int],
    pad: int,
    device: torch.device,
) -> Episodes:
    """Returns prompts (token ids) and their completions as episodes. Tensors that are computed later are filled with 0.

    Args:
        indices: each row's index in the global batch of the update.
        pad: id of the padding token.
    """
    sequences = collate_ids(prompts, [c.tokens for c in completions], device, indices, pad)
    mask = sequences.mask
    action_fields = "old_logprobs ref_logprobs teacher_logprobs values rewards advantages returns".split()
    zeros = {name: torch.zeros(mask.shape, device=device) for name in action_fields}
    zeros |= {n: torch.zeros(len(mask), device=device) for n in ("scores", "greedy_scores", "bootstrap")}
    sampler_logprobs = [c.logprobs + [0.0] * (mask.shape[1] - len(c.tokens)) for c in completions]
    return Episodes(
        **vars(sequences),
        ended=torch.tensor([c.ended for c in completions], device=device),
        sampler_logprobs=torch.tensor(sampler_logprobs, device=device),
        learn=mask.clone(),
        **zeros,
    )
