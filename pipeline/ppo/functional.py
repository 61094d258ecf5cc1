"""The mathematics of PPO as pure functions of tensors.

Conventions, the same everywhere:

* A tensor is (batch, time); time runs over the *actions* of a completion. Action t is a token of the completion; its log-prob
  comes from the logits one place earlier, and its value is read at that same earlier place (the state *before* the
  action). Whoever makes the tensors does that shift once, for all of them together.
* A mask is 1 (or True) on action tokens, the end-of-sequence token included, and 0 on padding. Masked places may hold
  anything, NaN and inf included: they are replaced before any arithmetic (`torch.where`, not a product: 0 * NaN is NaN,
  in the gradient too). What these functions return is 0 there.
* Natural logarithms, so KL and entropy are in nats.

Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347), 2015 (GAE, 1506.02438); "The N implementation details of RLHF
with PPO" (Huang et al. 2024); Ziegler et al. 2019 (adaptive KL, 1909.08593); Schulman, "Approximating KL divergence"
(k1, k2, k3); Ye et al. 2020 (dual clip, 1912.09729).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""A log-ratio outside +-20 nats is clamped: exp(20) is finite in fp32, its square in a gradient still is."""

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` where `mask` is on, over everything or along `dim`; 0 where nothing is on."""
    mask = mask.bool()
    total = x.where(mask, 0.0)
    if dim is None:
        return total.sum() / mask.sum().clamp(min=1)
    return total.sum(dim) / mask.sum(dim).clamp(min=1)


def whiten(
    x: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    eps: float = 1e-8,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`x` scaled to variance 1 (unbiased, over the mask); mean 0, or its own mean with `shift_mean=False`.

    `all_reduce` sums a small tensor over the workers: statistics must be those of the whole batch, because a worker
    that whitens its own share pulls its advantages towards a different zero than its neighbour's. The sums are in
    fp64 and in two passes (first the mean, then the squared distances), so the share a worker has does not show.
    With fewer than two values there is no variance: the distance from the mean is returned as it is.
    """
    mask = mask.bool()
    reduce = all_reduce or (lambda t: t)
    wide = x.double().where(mask, 0.0)
    total, count = reduce(torch.stack([wide.sum(), mask.sum().double()]))
    mean = total / count.clamp(min=1)
    centred = (wide - mean).where(mask, 0.0)
    squares = reduce((centred**2).sum())
    scale = torch.rsqrt(squares / (count - 1) + eps) if count > 1 else torch.ones_like(mean)
    out = centred * scale if shift_mean else centred * scale + mean
    return out.where(mask, 0.0).to(x.dtype)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens the policy sampled.

    With d = log p - log q: k1 = d (unbiased, negative at times), k2 = d^2 / 2 (biased, low variance, and its gradient
    is the KL's own), k3 = exp(-d) - 1 + d (unbiased, never negative), abs = |d|. No mask: padding is the caller's.
    """
    difference = (logprobs.float() - ref_logprobs.float()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"kl_estimator {estimator!r} is unknown; expected one of 'k1', 'k2', 'k3', 'abs'")


def last_action(mask: Tensor) -> Tensor:
    """(batch, time) bool: on at the last action of each row and nowhere else; a row without actions has none."""
    mask = mask.bool()
    remaining = mask.flip(-1).cumsum(-1).flip(-1)  # actions from here on, this place included
    return mask & (remaining == 1)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of every action: -kl_coef * kl on each, and the row's score (batch,) once, on the last one."""
    mask = mask.bool()
    rewards = (-kl_coef * kl.float()).where(mask, 0.0)
    paid = scores.float().unsqueeze(-1).expand_as(rewards).where(last_action(mask), 0.0)
    return rewards + paid


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. Returns (advantages, returns = advantages + values), both not whitened.

    The value after the last action of a row is 0 (the completion is over), or `bootstrap` (batch,) for rows cut off by the
    length limit. Masked places do not exist: the recursion carries the next *action's* value and advantage over them,
    so gaps inside a row and padding behind it change nothing.
    """
    mask = mask.bool()
    rewards, values = rewards.float().where(mask, 0.0), values.float().where(mask, 0.0)
    next_value = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.float()
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        on = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(on, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(on, values[:, t], next_value)
        advantages[:, t] = next_advantage.where(on, 0.0)
    return advantages, advantages + values


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each action on: GAE with lam = 1 and no critic."""
    return gae(rewards, torch.zeros_like(rewards, dtype=torch.float32), mask, gamma, 1.0)[0]


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float,
    dual_clip: float | None = None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate objective, as a loss. Returns (loss, stats).

    Sums over actions are divided by `denominator`: None is the number of actions here, so that the loss is a mean; the
    trainer passes the number of actions in the whole optimizer step over all workers, so that the losses of
    micro-batches and workers *add up* to that mean. `dual_clip` (> 1) bounds the loss at -dual_clip * A where A < 0,
    which the ordinary clip leaves unbounded. stats: ratio, approxkl (k2 of new against old), clipfrac; sums over the
    same denominator, without gradient.
    """
    mask = mask.bool()
    denominator = mask.sum().clamp(min=1) if denominator is None else denominator
    advantages = advantages.float().where(mask, 0.0)
    log_ratio = (logprobs.float().where(mask, 0.0) - old_logprobs.float().where(mask, 0.0)).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    ratio = log_ratio.exp()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    loss = torch.maximum(free, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    with torch.no_grad():
        stats = {
            "ratio": ratio.where(mask, 0.0).sum() / denominator,
            "approxkl": (log_ratio.square() / 2).sum() / denominator,
            "clipfrac": ((clipped > free) & mask).sum() / denominator,
        }
    return loss.where(mask, 0.0).sum() / denominator, stats


def importance_weights(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, limit: float) -> Tensor:
    """(batch, time) probability of each action by the trainer over that by its sampler, at most `limit`; 0 off the mask.

    They correct for a sampler of other kernels or precision: truncated importance sampling (Ionides 2008), one action at a
    time. A weight w >= 0 on the clipped surrogate is the surrogate of w * A.
    """
    mask = mask.bool()
    log_ratio = logprobs.float().where(mask, 0.0) - sampler_logprobs.float().where(mask, 0.0)
    return log_ratio.clamp(max=math.log(limit)).exp().where(mask, 0.0)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    cliprange_value: float | None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 * max(clipped, unclipped) squared error; the clip keeps the new value within +-cliprange_value of the old.

    `denominator` as in `policy_loss`; `cliprange_value=None` does not clip. stats: clipfrac, error (mean squared,
    unclipped).
    """
    mask = mask.bool()
    denominator = mask.sum().clamp(min=1) if denominator is None else denominator
    values, old_values, returns = (x.float().where(mask, 0.0) for x in (values, old_values, returns))
    squared = (values - returns).square()
    if cliprange_value is None:
        worst = clipped = squared
    else:
        # Not old + (new - old): its rounding would count values that are not clipped at all as clipped.
        bounded = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
        clipped = (bounded - returns).square()
        worst = torch.maximum(squared, clipped)
    with torch.no_grad():
        stats = {
            "clipfrac": ((clipped > squared) & mask).sum() / denominator,
            "error": squared.sum() / denominator,
        }
    return 0.5 * worst.sum() / denominator, stats


class AdaptiveKLController:
    """Proportional controller of the KL coefficient (Ziegler et al. 2019, section 2.2).

    `target` is in nats per *completion* (a sum over its tokens: OpenAI's 6), and so must be the `current` that is given to
    `update`; a per-token mean here would be tens of times too small and drive the coefficient to 0. Above the target
    the coefficient grows. `horizon` is in completions: with the error at its clip of 0.2, `horizon` completions change the
    coefficient by about 20 %.
    """

    def __init__(self, init: float, target: float, horizon: float) -> None:
        self.coef, self.target, self.horizon = float(init), float(target), float(horizon)

    def update(self, current: float, n_steps: int) -> float:
        """Move towards the target after `n_steps` completions (over all workers) with mean KL `current`."""
        error = min(max(float(current) / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * n_steps / self.horizon
        return self.coef
