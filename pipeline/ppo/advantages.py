"""From token rewards to advantages: one function, the five estimators side by side."""

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
    """(advantages, returns), both (B, R), from token rewards (B, R).

    The `num_generations` completions to a prompt are neighbours in the batch. `greedy_scores` (B,) are those of the greedy
    completion to each row's prompt, for `remax`. Advantages are whitened last, over the actions that are learned from, the
    whole batch and all workers; returns never are.
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
        total = rewards.where(mask, 0.0).sum(-1)
        group = total.view(-1, args.num_generations)
        if args.advantage_estimator == "rloo":
            # A = R - mean of the others = n / (n - 1) * (R - mean of all)
            n = args.num_generations
            relative = (group - group.mean(-1, keepdim=True)) * n / (n - 1)
        else:
            relative = group - group.mean(-1, keepdim=True)
            if args.scale_rewards:
                relative = relative / (group.std(-1, keepdim=True) + 1e-4)
        advantages = relative.reshape(-1, 1).expand_as(rewards)
        returns = total.unsqueeze(-1).expand_as(rewards)
    advantages, returns = advantages.where(mask, 0.0), returns.where(mask, 0.0)
    if args.whitens_advantages:
        advantages = whiten(advantages, mask if learn is None else learn, all_reduce=all_reduce)
    return advantages, returns


class RunningMoments:
    """Mean and deviation of all returns so far (for `normalize_values`), the same on all workers."""

    def __init__(self) -> None:
        self.mean, self.std, self.count = 0.0, 1.0, 0.0

    def update(self, x: Tensor, mask: Tensor) -> None:
        """Add the values where `mask` is on, of all workers (Chan et al.'s parallel sum of squares)."""
        chosen = x[mask.bool()].double()
        total, count = all_reduce(torch.stack([chosen.sum(), mask.sum().double()])).tolist()
        if count == 0:
            return
        mean = total / count
        squares = float(all_reduce(((chosen - mean) ** 2).sum()))
        both = self.count + count
        before = self.std**2 * self.count
        squares += before + (mean - self.mean) ** 2 * self.count * count / both
        self.mean += (mean - self.mean) * count / both
        self.count = both
        self.std = max((squares / both) ** 0.5, 1e-4)
