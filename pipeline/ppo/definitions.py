"""Token rewards and advantages from their definitions, over the rows of all workers, to compare the trainer's with.

Written with numpy and loops over plain numbers, by none of the code that the trainer uses, which is pipeline/ppo's
functional.py and advantages.py: a sign, a shift, a mask or a mean over the wrong set shows as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.findings import Finding
from pipeline.ppo.batch import Episodes, gather

if TYPE_CHECKING:
    from pipeline.ppo.rollout_config import RolloutConfig
    from pipeline.ppo.trainer import PPOTrainer

Numbers = np.ndarray  # one for each action of a row


@dataclass
class Row:
    """One completion, as the trainer has it."""

    index: int
    score: float
    ended: bool
    bootstrap: float
    learns: bool
    greedy: float
    old: Numbers
    sampler: Numbers
    values: Numbers
    reference: Numbers
    rewards: Numbers
    advantages: Numbers


def advantages_by_definition(
    trainer: PPOTrainer, episodes: Episodes, rewards: Tensor, greedy_scores: Tensor | None
) -> Finding:
    """Token rewards and advantages equal those that the definitions give. Every rank calls it.

    Args:
        rewards: (B, R) per token, as the trainer computed them.
        greedy_scores: (B,) of remax, as `PPOTrainer.greedy_scores` returns them.
    """
    # Policy and reference are still equal, and a wrong sign or coefficient of the KL would not show: repeat with shifted
    # reference log-probs.
    steps = torch.arange(episodes.mask.shape[1], device=episodes.mask.device)
    shift = 0.3 * torch.sin(1.0 + steps + episodes.indices.unsqueeze(-1))
    shifted = replace(episodes, ref_logprobs=(episodes.ref_logprobs + shift).where(episodes.mask, 0.0))
    paid = trainer.rewards_and_advantages(shifted, greedy_scores)
    finding = _compared(trainer, episodes, rewards, greedy_scores)
    other = _compared(trainer, shifted, paid, greedy_scores)
    return finding if finding.holds is False else other


def _compared(
    trainer: PPOTrainer, episodes: Episodes, rewards: Tensor, greedy_scores: Tensor | None
) -> Finding:
    args = trainer.args
    mine = _rows(episodes, rewards, greedy_scores)
    rows: list[Row] = sorted(chain(*gather(mine)), key=lambda row: row.index)
    paid = [_token_rewards(args, trainer.kl_coef, row) for row in rows]
    if args.whiten_rewards:
        paid = _whitened(paid, [True] * len(rows), shift=False)
    expected = _advantages(args, rows, paid)
    if args.whitens_advantages:
        expected = _whitened(expected, [row.learns for row in rows])
    if trainer.rollout_config.corrects:
        ratios = [_ratios(trainer.rollout_config, row) for row in rows]
        expected = [values * ratio for values, ratio in zip(expected, ratios, strict=True)]
    wrong_rewards = sum(not _close(row.rewards, plain) for row, plain in zip(rows, paid, strict=True))
    learning = [(row, plain) for row, plain in zip(rows, expected, strict=True) if row.learns]
    wrong = sum(not _close(row.advantages, plain) for row, plain in learning)
    found = f"{len(rows)} completions, workers: {trainer.workers}, {args.advantage_estimator}"
    if wrong_rewards:
        found += f"; token rewards of {wrong_rewards} differ: the KL's sign or coefficient, or where the score is paid"
    elif wrong:
        found += (
            f"; advantages of {wrong} differ: gamma, lambda, the values, what follows the last action, or whitening over "
            "other rows than those of all workers together"
        )
    return Finding("rewards and advantages are as defined", found, not (wrong_rewards or wrong))


def _rows(episodes: Episodes, rewards: Tensor, greedy_scores: Tensor | None) -> list[Row]:
    counts = episodes.counts.tolist()

    def numbers(tensor: Tensor) -> list[Numbers]:
        return [row[:count] for row, count in zip(tensor.float().cpu().numpy(), counts, strict=True)]

    greedy = torch.zeros(len(counts)) if greedy_scores is None else greedy_scores
    columns: list[list[Any]] = [
        episodes.indices.tolist(),
        episodes.scores.tolist(),
        episodes.ended.tolist(),
        episodes.bootstrap.tolist(),
        episodes.learn.any(-1).tolist(),
        greedy.tolist(),
        *map(numbers, (episodes.old_logprobs, episodes.sampler_logprobs, episodes.values)),
        *map(numbers, (episodes.ref_logprobs, rewards, episodes.advantages)),
    ]
    return [Row(*values) for values in zip(*columns, strict=True)]


KL: dict[str, Callable[[Numbers], Numbers]] = {  # of d = log p_policy - log p_reference
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.exp(np.minimum(-d, 20.0)) - 1 + d,
    "abs": np.abs,
}


def _token_rewards(args: Any, kl_coef: float, row: Row) -> Numbers:
    """-kl_coef * kl on each action, and the score on the last."""
    coefficient = kl_coef if args.kl_in == "reward" else 0.0
    rewards = -coefficient * KL[args.kl_estimator](row.old.astype(np.float64) - row.reference)
    if len(rewards) and (row.ended or not args.bootstrap_truncated):
        rewards[-1] += row.score
    return rewards


def _ratios(config: RolloutConfig, row: Row) -> Numbers:
    """trainer / sampler, as far as the job's correction lets it count."""
    difference, cap = (row.old - row.sampler).astype(np.float64), config.correction_cap
    if config.corrects != "token" and len(difference):
        difference = np.full_like(difference, difference.sum())
    return np.minimum(np.exp(np.minimum(difference, 50.0)), cap)


def _advantages(args: Any, rows: list[Row], rewards: list[Numbers]) -> list[Numbers]:
    """Advantages before whitening."""
    if args.advantage_estimator == "gae":
        return [_gae(args, row, paid) for row, paid in zip(rows, rewards, strict=True)]
    if args.advantage_estimator in ("remax", "reinforce_plus_plus"):
        baseline = args.advantage_estimator == "remax"
        return [
            _to_go(paid, args.gamma) - row.greedy * baseline for row, paid in zip(rows, rewards, strict=True)
        ]
    n, advantages = args.num_generations, []
    totals = [float(paid.sum()) for paid in rewards]
    for i, paid in enumerate(rewards):
        group = totals[i // n * n : i // n * n + n]
        if args.advantage_estimator == "rloo":
            value = totals[i] - (sum(group) - totals[i]) / (n - 1)
        else:
            mean = sum(group) / n
            value = totals[i] - mean
            if args.scale_rewards:
                value /= math.sqrt(sum((total - mean) ** 2 for total in group) / (n - 1)) + 1e-4
        advantages.append(np.full(len(paid), value))
    return advantages


def _gae(args: Any, row: Row, rewards: Numbers) -> Numbers:
    """delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1}."""
    later = row.bootstrap if args.bootstrap_truncated and not row.ended else 0.0
    advantage, advantages = 0.0, []
    for reward, value in zip(rewards[::-1].tolist(), row.values[::-1].tolist(), strict=True):
        advantage = reward + args.gamma * later - value + args.gamma * args.lam * advantage
        later = value
        advantages.append(advantage)
    return np.array(advantages[::-1])


def _to_go(rewards: Numbers, gamma: float) -> Numbers:
    """Discounted sum of the rewards from each action on."""
    total, totals = 0.0, []
    for reward in rewards[::-1].tolist():
        total = reward + gamma * total
        totals.append(total)
    return np.array(totals[::-1])


def _whitened(rows: list[Numbers], counted: list[bool], shift: bool = True) -> list[Numbers]:
    """All rows, scaled by mean and standard deviation of those that count."""
    values = np.concatenate(
        [np.zeros(0), *(row for row, counts in zip(rows, counted, strict=True) if counts)]
    )
    mean = values.mean() if len(values) else 0.0
    scale = 1 / math.sqrt(values.var(ddof=1) + 1e-8) if len(values) > 1 else 1.0
    return [(row - mean) * scale + (0.0 if shift else mean) for row in rows]


def _close(ours: Numbers, plain: Numbers) -> bool:
    return len(plain) == 0 or float(np.abs(ours - plain).max()) <= 1e-3 * max(1.0, float(np.abs(plain).max()))
