"""Token rewards and advantages from their definitions, over the rows of all workers, compared with the trainer's.

Written with numpy and loops over plain numbers. It shares no code with the trainer (losses.py, functional.py), so a sign, a
shift, a mask or a mean over the wrong rows shows as a difference. An estimator brings its own definition (estimators.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.findings import Finding
from pipeline.ppo import estimators
from pipeline.ppo.config import PPOConfig, RolloutConfig
from pipeline.ppo.episodes import Episodes, gather
from pipeline.ppo.selfcheck.learner import Learner

Numbers = np.ndarray  # one for each action of a row


@dataclass
class Row:
    """One completion in plain numbers, taken from the trainer."""

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


def advantages_by_definition(trainer: Learner, episodes: Episodes) -> Finding:
    """Checks that token rewards and advantages equal what the definitions compute. Every rank calls it."""
    # Policy and reference are still equal, so a wrong sign or coefficient of the KL would not show. The check is repeated
    # with shifted reference log-probs.
    steps = torch.arange(episodes.mask.shape[1], device=episodes.mask.device)
    shift = 0.3 * torch.sin(1.0 + steps + episodes.indices.unsqueeze(-1))
    shifted = replace(episodes, ref_logprobs=(episodes.ref_logprobs + shift).where(episodes.mask, 0.0))
    trainer.rewards_and_advantages(shifted)
    finding, other = (_compared(trainer, one) for one in (episodes, shifted))
    return finding if finding.holds is False else other


def _compared(trainer: Learner, episodes: Episodes) -> Finding:
    args = trainer.args
    rows: list[Row] = sorted(chain(*gather(_rows(episodes))), key=lambda row: row.index)
    paid = [_token_rewards(args, trainer.kl_coef, row) for row in rows]
    if args.whiten_rewards:
        paid = _whitened(paid, [True] * len(rows), shift=False)
    wrong_rewards = sum(not _close(row.rewards, plain) for row, plain in zip(rows, paid, strict=True))
    found = f"{len(rows)} completions, workers: {trainer.workers}, {args.advantage_estimator}"
    wrong = 0
    if args.estimator.definition is None:
        found += " (it has no definition to compare its advantages with)"
    else:
        expected = _advantages(args, trainer.rollout_config, rows, paid)
        pairs = zip(rows, expected, strict=True)
        wrong = sum(not _close(row.advantages, plain) for row, plain in pairs if row.learns)
    if wrong_rewards:
        found += f"; token rewards of {wrong_rewards} differ: the KL's sign or coefficient, or where the score is paid"
    elif wrong:
        found += (
            f"; advantages of {wrong} differ: gamma, lambda, the values, what follows the last action, or whitening over "
            "other rows than those of all workers together"
        )
    return Finding("rewards and advantages are as defined", found, not (wrong_rewards or wrong))


def _rows(episodes: Episodes) -> list[Row]:
    counts = episodes.counts.tolist()

    def numbers(tensor: Tensor) -> list[Numbers]:
        rows = tensor.float().cpu().numpy().astype(np.float64)
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    columns: list[list[Any]] = [
        episodes.indices.tolist(),
        episodes.scores.tolist(),
        episodes.ended.tolist(),
        episodes.bootstrap.tolist(),
        episodes.learn.any(-1).tolist(),
        episodes.greedy_scores.tolist(),
        *map(numbers, (episodes.old_logprobs, episodes.sampler_logprobs, episodes.values)),
        *map(numbers, (episodes.ref_logprobs, episodes.rewards, episodes.advantages)),
    ]
    return [Row(*values) for values in zip(*columns, strict=True)]


KL: dict[str, Callable[[Numbers], Numbers]] = {  # of d = log p_policy - log p_reference
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.exp(np.minimum(-d, 20.0)) - 1 + d,
    "abs": np.abs,
}


def _token_rewards(args: PPOConfig, kl_coef: float, row: Row) -> Numbers:
    """Returns -kl_coef * kl on each action, plus the score on the last."""
    coefficient = kl_coef if args.kl_in == "reward" else 0.0
    rewards = -coefficient * KL[args.kl_estimator](row.old - row.reference)
    if len(rewards) and (row.ended or not args.bootstrap_truncated):
        rewards[-1] += row.score
    return rewards


def _advantages(
    args: PPOConfig, config: RolloutConfig, rows: list[Row], paid: list[Numbers]
) -> list[Numbers]:
    """Returns the advantages of all rows by the estimator's definition, prompt by prompt, whitened and corrected."""
    definition, n = args.estimator.definition, args.num_generations
    assert definition is not None
    advantages: list[Numbers] = []
    for start in range(0, len(rows), n):
        group = rows[start : start + n]
        known = {
            "rewards": [rewards.tolist() for rewards in paid[start : start + n]],
            "values": [row.values.tolist() for row in group],
            "bootstrap": [row.bootstrap * (args.bootstrap_truncated and not row.ended) for row in group],
            "greedy_scores": [row.greedy for row in group],
        }
        advantages += [np.array(row) for row in estimators.call(definition, args, known)]
    if args.whitens_advantages:
        advantages = _whitened(advantages, [row.learns for row in rows])
    if config.corrects:
        ratios = [_ratios(config, row) for row in rows]
        advantages = [values * ratio for values, ratio in zip(advantages, ratios, strict=True)]
    return advantages


def _ratios(config: RolloutConfig, row: Row) -> Numbers:
    """Returns the ratios trainer / sampler, truncated by the job's correction."""
    difference = row.old - row.sampler
    if config.corrects != "token" and len(difference):
        difference = np.full_like(difference, difference.sum())
    return np.minimum(np.exp(np.minimum(difference, 50.0)), config.correction_cap)


def _whitened(rows: list[Numbers], counted: list[bool], shift: bool = True) -> list[Numbers]:
    """Returns all rows, scaled by mean and standard deviation of the counted ones."""
    values = np.concatenate(
        [np.zeros(0), *(row for row, counts in zip(rows, counted, strict=True) if counts)]
    )
    mean = values.mean() if len(values) else 0.0
    scale = 1 / math.sqrt(values.var(ddof=1) + 1e-8) if len(values) > 1 else 1.0
    return [(row - mean) * scale + (0.0 if shift else mean) for row in rows]


def _close(ours: Numbers, plain: Numbers) -> bool:
    return len(plain) == 0 or float(np.abs(ours - plain).max()) <= 1e-3 * max(1.0, float(np.abs(plain).max()))
