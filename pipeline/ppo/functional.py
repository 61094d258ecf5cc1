"""The mathematics of PPO as pure functions of tensors.

Conventions of all functions:

* Tensors are (batch, time). Time runs over the *actions* of a completion, and action t is its token t. The log-prob and the
  value of action t are read one position earlier, in the state *before* the action. The caller must shift log-probs and values by
  one position.
* A mask is 1 (or True) on action tokens, including the end-of-sequence token, and 0 on padding. Masked positions may
  contain NaN and inf. `torch.where` replaces masked values before any arithmetic, because 0 * NaN is NaN, also in a gradient.
  Results of functions are 0 at masked positions.
* Logarithms are natural, so KL and entropy are in nats.

Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347), 2015 (GAE, 1506.02438); "The N implementation details of RLHF
with PPO" (Huang et al. 2024); Ziegler et al. 2019 (adaptive KL, 1909.08593); Schulman, "Approximating KL divergence"
(k1, k2, k3); Ye et al. 2020 (dual clip, 1912.09729); Shao et al. 2024 (GRPO, 2402.03300); Yu et al. 2025 (DAPO,
2503.14476); Liu et al. 2025 (Dr. GRPO, 2503.20783); Zheng et al. 2025 (GSPO, 2507.18071); Hilton et al. 2021 (decoupled
PPO, 2110.00641).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

# Bound of log-ratios before exp. exp(20), and its square in a gradient, are finite in fp32.
LOG_RATIO_LIMIT = 20.0

KLEstimator = Literal["k1", "k2", "k3", "abs"]
LossAggregation = Literal["token", "sequence", "constant"]


def whiten(
    x: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns `x` scaled to unit variance (unbiased, over the mask). The mean becomes 0, or is unchanged if `shift_mean=False`.

    Mean and variance are computed in fp64 and in two passes. The fp64 mean of equal fp32 values is exact, so their deviations
    are exactly 0. With fewer than two values, the variance is taken as 1.

    Args:
        all_reduce: sums a small tensor over the workers, so that all of them use the same mean; not needed with one worker.
    """
    mask = mask.bool()
    reduce = all_reduce or (lambda t: t)
    x64 = x.double().where(mask, 0.0)
    total, count = reduce(torch.stack([x64.sum(), mask.sum().double()]))
    mean = total / count.clamp(min=1)
    centered = (x64 - mean).where(mask, 0.0)
    squares = reduce((centered**2).sum())
    scale = torch.rsqrt(squares / (count - 1) + 1e-8) if count > 1 else torch.ones_like(mean)
    whitened = centered * scale if shift_mean else centered * scale + mean
    return whitened.where(mask, 0.0).to(x.dtype)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Returns the estimate of KL(policy || reference) per token, in nats, from tokens that the policy sampled.

    With d = log p_policy - log p_reference, the estimators are:

    * k1 = d. k1 is unbiased, and can be negative.
    * k2 = d^2 / 2. k2 is biased and has a low variance, and its gradient is the gradient of the KL.
    * k3 = exp(-d) - 1 + d. k3 is unbiased and never negative. k3 is constant if d < -LOG_RATIO_LIMIT.
    * abs = |d|.
    """
    difference = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        difference = difference.clamp(min=-LOG_RATIO_LIMIT)
        return torch.expm1(-difference) + difference
    return difference.abs()


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Returns the reward of every action: -kl_coef * kl, plus the row's score (batch,) on the last action."""
    mask = mask.bool()
    rewards = (-kl_coef * kl.float()).where(mask, 0.0).to(scores.dtype)
    remaining = mask.flip(-1).cumsum(-1).flip(-1)  # number of actions from each action to the end
    last_rewards = scores.unsqueeze(-1).expand_as(rewards).where(mask & (remaining == 1), 0.0)
    return rewards + last_rewards


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Returns the advantages by generalized advantage estimation, not whitened.

    The value after a row's last action is `bootstrap` (batch,) for truncated completions, and otherwise 0. The recursion skips
    masked positions, so gaps inside a row and padding after it have no effect.
    """
    mask = mask.bool()
    rewards, values = rewards.float().where(mask, 0.0), values.float().where(mask, 0.0)
    next_value = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.float()
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        is_action = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(is_action, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(is_action, values[:, t], next_value)
        advantages[:, t] = next_advantage.where(is_action, 0.0)
    return advantages


def loss_weights(
    mask: Tensor, aggregation: LossAggregation, actions: float, completions: float, length: int
) -> Tensor:
    """Returns the weight (batch, 1) of each row's actions. The total loss is the weighted sum of the actions' losses.

    * "token": 1 / actions, the mean over actions (DAPO).
    * "sequence": 1 / (actions of the row * completions), the mean over completions of each completion's mean (GRPO).
    * "constant": 1 / (completions * length), the same for actions of short and of long completions (Dr. GRPO).

    Args:
        actions, completions: numbers of actions, and of rows with an action, in the optimizer step over all workers.
        length: maximum length of a completion.
    """
    counts = mask.bool().sum(-1, keepdim=True).clamp(min=1)
    if aggregation == "sequence":
        return 1.0 / (counts * completions)
    divisor = actions if aggregation == "token" else completions * length
    return torch.full_like(counts, 1.0 / divisor, dtype=torch.float32)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    actions: float,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float | None = None,
    importance_sampling_level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, stats) of the negative clipped surrogate objective.

    Args:
        weights: (batch, 1) weights of the rows in the loss, from `loss_weights`.
        actions: number of actions in the optimizer step over all workers, so that stats of micro-batches *add up* to a mean.
        cliprange: the ratio is clipped to [1 - cliprange, 1 + cliprange_high].
        cliprange_high: None means `cliprange`. DAPO's clip-higher sets a value larger than `cliprange`.
        dual_clip: a number above 1. If the advantage A is negative, the loss is at most -dual_clip * A. None removes this limit.
        importance_sampling_level: "sequence" (GSPO) assigns the same ratio to every action of a row: the completion's probability
            ratio of new and old policy, to the power 1 / length. The sequence ratio is exp of the mean of the row's log-ratios.

    `stats` are means over actions, without gradient: ratio; approxkl, the k2 estimate between new and old policy in nats; and
    clipfrac, the fraction of actions with a clipped ratio.
    """
    mask = mask.bool()
    advantages = advantages.float().where(mask, 0.0)
    log_ratio = logprobs.float().where(mask, 0.0) - old_logprobs.float().where(mask, 0.0)
    log_weight = log_ratio
    if importance_sampling_level == "sequence":
        mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        log_weight = mean.expand_as(log_ratio)
    ratio = log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    upper = cliprange if cliprange_high is None else cliprange_high
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + upper)
    loss = torch.maximum(unclipped, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    with torch.no_grad():
        stats = {
            "ratio": ratio.where(mask, 0.0).sum() / actions,
            "approxkl": (log_ratio.square() / 2).sum() / actions,
            "clipfrac": ((clipped > unclipped) & mask).sum() / actions,
        }
    return (loss.where(mask, 0.0) * weights).sum(), stats


def off_policy_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence"] = "token",
    cap: float = 3.0,
) -> Tensor:
    """Returns the probability ratio trainer / sampler (batch, time) of each action, at most `cap`, and 0 at masked positions.

    The ratios correct for a sampler whose weights, kernels or precision differ from the trainer's (decoupled PPO, Hilton et al.
    2021; truncated importance sampling, Ionides 2008). The caller multiplies advantages by these ratios: for w >= 0, w times the
    clipped surrogate of A equals the clipped surrogate of w * A.

    Args:
        level: "token" means each action's ratio, "sequence" the product of the ratios of all actions of its completion.
        cap: a number above 1.
    """
    mask = mask.bool()
    log_ratio = logprobs.float().where(mask, 0.0) - sampler_logprobs.float().where(mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    return log_ratio.clamp(max=math.log(cap)).exp().where(mask, 0.0)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    actions: float,
    cliprange_value: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns (loss, stats). The loss of an action is half the larger of the clipped and the unclipped squared error.

    Args:
        actions: as in `policy_loss`.
        cliprange_value: how far the new value in the clipped error may be from the old value, or None for no clipping.

    `stats` has clipfrac, without gradient: the fraction of values whose clipped error is larger than the unclipped one.
    """
    mask = mask.bool()
    values, old_values, returns = (x.float().where(mask, 0.0) for x in (values, old_values, returns))
    unclipped = clipped = (values - returns).square()
    if cliprange_value is not None:
        # Clamps the new value, because old + (new - old).clamp() would also round values inside the range.
        bounded = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
        clipped = (bounded - returns).square()
    with torch.no_grad():
        stats = {"clipfrac": ((clipped > unclipped) & mask).sum() / actions}
    return 0.5 * torch.maximum(unclipped, clipped).sum() / actions, stats


def adapted_kl_coef(coef: float, kl: float, completions: int, target: float, horizon: float) -> float:
    """Returns the KL coefficient for the next update, from a proportional controller (Ziegler et al. 2019, section 2.2).

    The relative error is clipped to [-0.2, 0.2], so `horizon` completions change the coefficient by at most about 20 %.

    Args:
        kl: mean over the update's completions, in nats per *completion* (summed over its tokens), like `target`. A mean per
            token would be tens of times too small, and the coefficient would approach 0.
        completions: number of the update's completions over all workers.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * completions / horizon)
