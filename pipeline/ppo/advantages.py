"""Token rewards to advantages: the five estimators side by side, and the running moments of the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.ppo.batch import all_reduce
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.functional import gae, rewards_to_go, whiten


def estimate_advantages(
    args: PPOConfig,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: Tensor,
    greedy_scores: Tensor | None = None,
    learn: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (B, R), by the estimator of `args`.

    Whitening, if any, comes last and covers the whole batch on all workers; returns are never whitened.

    Args:
        rewards: (B, R) per token, in float64 for rloo and grpo, whose scores may differ by little; the `num_generations`
            completions of one prompt are adjacent rows.
        values: (B, R) of the critic, for gae.
        mask: (B, R), on at actions.
        bootstrap: (B,) value after the last action, 0 for completions that ended; for gae.
        greedy_scores: (B,) score of the greedy completion of each row's prompt, for remax.
        learn: (B, R), on at actions that enter the loss and so the whitening; None: `mask`.
    """
    mask = mask.bool()
    if args.advantage_estimator == "gae":
        advantages, returns = gae(rewards, values, mask, args.gamma, args.lam, bootstrap)
    elif args.advantage_estimator == "reinforce_plus_plus":
        advantages = returns = rewards_to_go(rewards, mask, args.gamma)
    elif args.advantage_estimator == "remax":
        assert greedy_scores is not None
        returns = rewards_to_go(rewards, mask, args.gamma)
        advantages = returns - greedy_scores.unsqueeze(-1)
    else:  # rloo and grpo: the completion as a whole is one action
        total = rewards.double().where(mask, 0.0).sum(-1)
        group, n = total.view(-1, args.num_generations), args.num_generations
        tied = group.amax(-1, keepdim=True) == group.amin(-1, keepdim=True)
        relative = (group - group.mean(-1, keepdim=True)).where(~tied, 0.0)
        if args.advantage_estimator == "rloo":
            relative = relative * n / (n - 1)  # R - mean of the others = n / (n - 1) * (R - mean of all)
        elif args.scale_rewards:
            relative = relative / (group.std(-1, keepdim=True) + 1e-4)
        advantages = relative.reshape(-1, 1).expand_as(rewards)
        returns = total.unsqueeze(-1).expand_as(rewards)
    advantages, returns = advantages.float().where(mask, 0.0), returns.float().where(mask, 0.0)
    if args.whitens_advantages:
        advantages = whiten(advantages, mask if learn is None else learn, all_reduce=all_reduce)
    return advantages, returns


class RunningMoments:
    """Running mean and standard deviation of all returns so far (`normalize_values`), the same on all workers."""

    def __init__(self) -> None:
        self.mean, self.std, self.count = 0.0, 1.0, 0.0

    def update(self, x: Tensor, mask: Tensor) -> None:
        """Add the values of `x` where `mask` is on, from all workers (parallel variance, Chan et al. 1979)."""
        added = x[mask.bool()].double()
        total, count = all_reduce(torch.stack([added.sum(), mask.sum().double()])).tolist()
        if count == 0:
            return
        mean = total / count
        squares = float(all_reduce(((added - mean) ** 2).sum()))
        new_count = self.count + count
        old_squares = self.std**2 * self.count
        squares += old_squares + (mean - self.mean) ** 2 * self.count * count / new_count
        self.mean += (mean - self.mean) * count / new_count
        self.count = new_count
        self.std = max((squares / new_count) ** 0.5, 1e-4)
