"""Computes token rewards, advantages, off-policy ratios and losses of an update as pure functions of its episodes.

The trainer and the self-checks call the same functions. No function in this file runs a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.errors import Failure
from pipeline.job.rollout import RolloutConfig
from pipeline.models.fsdp_sync import all_reduce
from pipeline.ppo import estimators
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Episodes, Totals
from pipeline.ppo.functional import (
    kl_estimate,
    loss_weights,
    off_policy_weights,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)

# Statistics of an optimizer step, as means over actions, in the order in which the objectives return them
POLICY_STATS = (
    "loss/policy_avg",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "val/ratio",
    "policy/entropy_avg",
)
VALUE_STATS = ("loss/value_avg", "val/clipfrac_avg")


@torch.no_grad()
def fill_advantages(args: PPOConfig, config: RolloutConfig, episodes: Episodes, kl_coef: float) -> None:
    """Fills `rewards`, `advantages` and `returns` of the episodes."""
    estimator, mask = args.estimator, episodes.mask
    # Scores of a group are compared in float64, because the fp32 mean of equal scores may differ from the scores.
    scores = episodes.scores if estimator.compares_groups else episodes.scores.float()
    bootstrap = torch.zeros_like(episodes.bootstrap)
    if args.bootstrap_truncated:
        # The critic's value replaces the score of a truncated completion, because score and value together would reward the
        # completion twice.
        scores, bootstrap = scores.where(episodes.ended, 0.0), episodes.bootstrap
    kl = kl_estimate(episodes.old_logprobs, episodes.ref_logprobs, args.kl_estimator)
    rewards = token_rewards(scores, kl, mask, kl_coef if args.kl_in == "reward" else 0.0)
    if args.whiten_rewards:
        # The mean of the rewards is not subtracted, because a constant in each token's reward would reward or punish length.
        rewards = whiten(rewards, mask, shift_mean=False, all_reduce=all_reduce)
    episodes.rewards = rewards
    advantages = estimate_advantages(args, episodes, bootstrap)
    episodes.returns = (advantages + episodes.values).where(mask, 0.0)
    if args.whitens_advantages:
        advantages = whiten(advantages, episodes.learn, all_reduce=all_reduce)
    if args.teacher_coef:
        advantages = advantages + args.teacher_coef * (episodes.teacher_logprobs - episodes.old_logprobs)
    if config.corrects is not None:
        logprobs = (episodes.old_logprobs, episodes.sampler_logprobs, mask)
        advantages = advantages * off_policy_weights(*logprobs, config.corrects, config.correction_cap)
    episodes.advantages = advantages


def estimate_advantages(args: PPOConfig, episodes: Episodes, bootstrap: Tensor) -> Tensor:
    """Returns the estimator's advantages (B, R), not whitened, and 0 at masked positions."""
    mask, inputs = episodes.mask, {**vars(episodes), "bootstrap": bootstrap}
    advantages = estimators.call_formula(args.estimator.formula, args, inputs)
    if getattr(advantages, "shape", None) != mask.shape:
        shape = getattr(advantages, "shape", type(advantages).__name__)
        raise Failure(
            f"{args.advantage_estimator} returned {shape}, expected a tensor of shape {tuple(mask.shape)}"
        )
    advantages = advantages.float().where(mask, 0.0)
    if not advantages.isfinite().all():
        raise Failure(f"{args.advantage_estimator} returned NaN or a number that is too large for fp32")
    return advantages


def policy_objective(
    args: PPOConfig,
    episodes: Episodes,
    totals: Totals,
    logprobs: Tensor,
    entropy: Tensor | None,
    kl_coef: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the policy's loss and its POLICY_STATS. The loss is the clipped surrogate, plus KL and entropy bonus if configured.

    `loss_aggregation` weighs the actions in all three terms. The statistics are means over actions.

    Args:
        totals: numbers of actions and completions in the complete optimizer step, over all workers.
        logprobs: (B, R) log-probs of the policy, in nats.
        entropy: (B, R), with gradient. If `entropy` is None, the loss has no entropy bonus, and the entropy statistic is
            estimated from the sampled tokens.
    """
    weights = loss_weights(episodes.learn, args.aggregation, *totals, args.response_length)
    loss, stats = policy_loss(
        logprobs,
        episodes.old_logprobs,
        episodes.advantages,
        episodes.learn,
        weights,
        totals.actions,
        args.cliprange,
        args.cliprange_high,
        args.dual_clip,
        args.importance_sampling_level,
    )
    if args.kl_in == "loss":
        kl = kl_estimate(logprobs, episodes.ref_logprobs, args.kl_estimator)
        loss = loss + kl_coef * (kl.where(episodes.learn, 0.0) * weights).sum()
    if entropy is None:
        entropy = -episodes.old_logprobs
    else:
        loss = loss - args.entropy_coef * (entropy.where(episodes.learn, 0.0) * weights).sum()
    mean_entropy = entropy.where(episodes.learn, 0.0).sum() / totals.actions
    policy_stats = (loss, stats["approxkl"], stats["clipfrac"], stats["ratio"], mean_entropy)
    return loss, tuple(value.detach() for value in policy_stats)


def value_objective(
    args: PPOConfig, episodes: Episodes, totals: Totals, values: Tensor, moments: RunningMoments
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the clipped value loss and its VALUE_STATS.

    Args:
        values: (B, R) outputs of the critic, in units of returns normalized by `moments`.
    """
    old_values, returns = (moments.normal(x) for x in (episodes.values, episodes.returns))
    loss, stats = value_loss(
        values, old_values, returns, episodes.learn, totals.actions, args.cliprange_value
    )
    return loss, (loss.detach(), stats["clipfrac"])


class RunningMoments:
    """Tracks mean and standard deviation of all returns so far (`normalize_values`). All workers have the same statistics."""

    def __init__(self) -> None:
        self.mean, self.std, self.count = 0.0, 1.0, 0.0
        self.center: float | None = None  # value for which the critic's head outputs 0; if None, the mean

    def raw(self, output: Tensor) -> Tensor:
        """Converts the output of a critic's head to values. `normal` is the inverse function."""
        return output * self.std + (self.mean if self.center is None else self.center)

    def normal(self, value: Tensor) -> Tensor:
        return (value - (self.mean if self.center is None else self.center)) / self.std

    def update(self, x: Tensor, mask: Tensor) -> None:
        """Adds the values of `x` where `mask` is True, from all workers (parallel variance, Chan et al. 1979)."""
        values = x[mask.bool()].double()
        total, count = all_reduce(torch.stack([values.sum(), mask.sum().double()])).tolist()
        if count == 0:
            return
        mean = total / count
        squares = float(all_reduce(((values - mean) ** 2).sum()))
        new_count = self.count + count
        old_squares = self.std**2 * self.count
        squares += old_squares + (mean - self.mean) ** 2 * self.count * count / new_count
        self.mean += (mean - self.mean) * count / new_count
        self.count = new_count
        self.std = max((squares / new_count) ** 0.5, 1e-4)
