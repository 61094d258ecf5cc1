"""Computes the metrics of an update as means over the episodes of all workers. The metrics have the names of TRL's PPOTrainer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.job.rollout import RolloutConfig
from pipeline.models.fsdp_sync import all_reduce
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Episodes
from pipeline.ppo.functional import kl_estimate, off_policy_weights


@torch.no_grad()
def episode_metrics(
    args: PPOConfig, episodes: Episodes, raw: dict[str, list[float]], kl_coef: float
) -> dict[str, float]:
    """Returns metrics of rollout, scores and values.

    `objective/kl` (to the reference), `objective/teacher_kl` and `objective/entropy` are sums over a completion's tokens, in
    nats per *completion*. `policy/entropy_avg`, from the optimizer steps, is in nats per *token*. The KL is always k1, for any
    `kl_estimator`. `val/sampler_drift` is the mean absolute difference between the log-probs of sampler and trainer, in nats per
    token.

    Args:
        raw: {name of a reward: its raw scores}.
    """
    mask, device = episodes.mask, episodes.mask.device
    kl = kl_estimate(episodes.old_logprobs, episodes.ref_logprobs, "k1").where(mask, 0.0).sum(-1)
    teacher_kl = (episodes.old_logprobs - episodes.teacher_logprobs).where(mask, 0.0).sum(-1)
    per_episode = {
        "objective/kl": kl,
        "objective/entropy": -episodes.old_logprobs.where(mask, 0.0).sum(-1),
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": episodes.rewards.where(mask, 0.0).sum(-1),
        "objective/scores": episodes.scores.float(),
        "val/num_eos_tokens": episodes.ended.float() * args.batch_size,
        "completions/mean_length": episodes.counts.float(),
        "completions/clipped_ratio": 1.0 - episodes.ended.float(),
        **({"objective/teacher_kl": teacher_kl} if args.teacher_coef else {}),
        **{f"rewards/{name}/mean": torch.tensor(scores, device=device) for name, scores in raw.items()},
    }
    sums = [x.double().sum() for x in per_episode.values()]
    drift = (episodes.sampler_logprobs - episodes.old_logprobs).abs().where(mask, 0.0).double().sum()
    error = (episodes.returns - episodes.values).where(mask, 0.0).double()
    returns = episodes.returns.where(mask, 0.0).double()
    moments = [mask.sum().double(), drift, error.sum(), (error**2).sum(), returns.sum(), (returns**2).sum()]
    totals = all_reduce(torch.stack([*sums, *moments])).tolist()  # sums over all workers in one all-reduce
    metrics = {name: total / args.batch_size for name, total in zip(per_episode, totals, strict=False)}
    actions, drift_sum, error_sum, error_squares, return_sum, return_squares = totals[-6:]
    actions = max(actions, 1)
    metrics["val/sampler_drift"] = drift_sum / actions
    if args.uses_critic:
        variance = return_squares - return_sum * return_sum / actions
        unexplained = error_squares - error_sum * error_sum / actions
        metrics["val/explained_variance"] = 1 - unexplained / variance if variance > 0 else 0.0
    return metrics


@torch.no_grad()
def off_policy_metrics(episodes: Episodes, config: RolloutConfig, mask: Tensor) -> dict[str, float]:
    """Returns metrics of the distance between the sampler's and the trainer's policy, and of the off-policy correction.

    `rollout/ratio_mean`, `rollout/ratio_max` and `rollout/ess` describe the probability ratios r before truncation: one ratio per
    action, or per completion if the correction is per completion. `rollout/ess`, the effective sample size of n ratios, is the
    fraction (sum r)^2 / (n sum r^2) (Kong 1992). `rollout/is_clipped_fraction` is the fraction of truncated ratios.
    `rollout/sampler_kl` is the mean of the sampler's log-prob minus the trainer's, in nats per action.

    Args:
        mask: (B, R), True at the actions that enter the loss.
    """
    level = config.corrects or "token"
    logprobs = (episodes.old_logprobs, episodes.sampler_logprobs, episodes.mask)
    ratios = off_policy_weights(*logprobs, level, 1e6)
    weights = off_policy_weights(*logprobs, level, config.correction_cap)
    used = mask if level == "token" else mask & (mask.cumsum(-1) == 1)  # all actions of a row share a ratio
    r = ratios.where(used, 0.0).double()
    truncated = ((ratios != weights) & used).sum().double()
    drift = (episodes.sampler_logprobs - episodes.old_logprobs).where(mask, 0.0).double()
    sums = [used.sum().double(), r.sum(), (r**2).sum(), truncated, drift.sum(), mask.sum().double()]
    count, total, squares, clipped, drift_sum, actions = all_reduce(torch.stack(sums)).tolist()
    largest = all_reduce(r.max(), dist.ReduceOp.MAX)
    count, actions = max(count, 1), max(actions, 1)
    return {
        "rollout/ratio_mean": total / count,
        "rollout/ratio_max": float(largest),
        "rollout/is_clipped_fraction": clipped / count,
        "rollout/ess": total**2 / (count * squares) if squares else 0.0,
        "rollout/sampler_kl": drift_sum / actions,
    }


def count_passes(args: PPOConfig, adapter_rewards: int, sampled_here: bool) -> float:
    """Returns the number of forwards and backwards of each token in an update on a trainer.

    Args:
        sampled_here: True if this worker samples and scores, False if a rollout worker does.
    """
    roles = 1 + args.has_critic_adapter
    passes = (2 + adapter_rewards) * sampled_here  # forwards of sampling, reference and rewards
    passes += roles * (not args.learns_in_one_forward)  # forwards for old log-probs and values
    return passes + (args.teacher_coef > 0) + args.num_ppo_epochs * roles * 2  # forward and backward
