"""What an update is reported as, in the names of TRL's PPOTrainer: means over the episodes of all workers."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.ppo.batch import Episodes, all_reduce
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.functional import kl_estimate


@torch.no_grad()
def episode_metrics(
    args: PPOConfig, episodes: Episodes, rewards: Tensor, raw: dict[str, list[float]], kl_coef: float
) -> dict[str, float]:
    """Metrics of rollout, scores and values; `rewards` (B, R) are the token rewards, `raw` each reward's own scores.

    KL (k1, whatever estimator is trained with: it is the unbiased one) and entropy are in nats a *completion*.
    """
    mask, device = episodes.mask, episodes.mask.device
    kl = kl_estimate(episodes.old_logprobs, episodes.ref_logprobs, "k1").where(mask, 0.0).sum(-1)
    earned = rewards.where(mask, 0.0).sum(-1)
    per_episode = {
        "objective/kl": kl,
        "objective/entropy": -episodes.old_logprobs.where(mask, 0.0).sum(-1),
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": earned,
        "objective/scores": episodes.scores,
        "val/num_eos_tokens": episodes.ended.float() * args.batch_size,
        "completions/mean_length": episodes.counts.float(),
        "completions/clipped_ratio": 1.0 - episodes.ended.float(),
        **{f"rewards/{name}/mean": torch.tensor(scores, device=device) for name, scores in raw.items()},
    }
    sums = [x.double().sum() for x in per_episode.values()]
    drift = (episodes.sampler_logprobs - episodes.old_logprobs).abs().where(mask, 0.0).double().sum()
    error = (episodes.returns - episodes.values).where(mask, 0.0).double()
    returns = episodes.returns.where(mask, 0.0).double()
    moments = [mask.sum().double(), drift, error.sum(), (error**2).sum(), returns.sum(), (returns**2).sum()]
    totals = all_reduce(torch.stack([*sums, *moments])).tolist()  # sums and counts of all workers, in one go
    found = {name: total / args.batch_size for name, total in zip(per_episode, totals, strict=False)}
    count, drift_sum, e, ee, r, rr = totals[-6:]
    found["val/sampler_drift"] = drift_sum / max(
        count, 1
    )  # |log-prob of the sampler - of the trainer|, a token
    if args.uses_critic:
        variance = rr - r * r / max(count, 1)
        found["val/explained_variance"] = 1 - (ee - e * e / max(count, 1)) / variance if variance > 0 else 0.0
    return found
