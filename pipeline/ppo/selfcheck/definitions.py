"""Computes token rewards and advantages from their definitions, and checks the signs of the losses' gradients.

The definitions are plain numpy loops over the rows of all workers. The definitions share no code with the trainer (losses.py,
functional.py), so a wrong sign, shift, mask or mean in the trainer makes the results differ. Definitions of the estimators are in
estimators.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.checks import CheckResult
from pipeline.job.rollout import RolloutConfig
from pipeline.models.adapters import SharedBase
from pipeline.models.fsdp_sync import all_reduce, gather
from pipeline.models.precision import precision_of
from pipeline.ppo import estimators, losses
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Episodes, Prompts, Totals
from pipeline.ppo.losses import RunningMoments
from pipeline.ppo.rollouts import Rollouts
from pipeline.ppo.sampler import Sampler

MAX_ACTIONS = 64  # number of checked actions per completion, beginning with the first
LOW_PRECISION = 0.1  # difference of log-probs, in nats, that rounding explains if the precision is below fp32
CHECKED_ROWS = 32  # number of rows for which the signs of the losses' gradients are checked
Numbers = np.ndarray  # one number per action of a row


class Learner(Protocol):
    """The attributes and methods of PPOTrainer that the self-checks use. PPOTrainer documents the attributes."""

    args: PPOConfig
    rollout_config: RolloutConfig
    shared: SharedBase
    sampler: Sampler
    prompts: Prompts
    rollouts: Rollouts
    folders: Mapping[str, str]
    roles: list[str]  # roles that learn
    optimizer: torch.optim.Optimizer
    moments: RunningMoments
    kl_coef: float
    update: int
    workers: int
    skipped_steps: int

    @property
    def learning(self) -> list[str]: ...

    def logprobs_and_values(self, episodes: Episodes) -> None: ...

    def accumulate(self, episodes: Episodes, rows: list[int], totals: Totals) -> dict[str, Tensor]: ...


def logprob_tolerance(shared: SharedBase) -> float:
    """Returns the largest root mean square difference of log-probs, in nats, that rounding explains."""
    return 1e-3 if precision_of_base(shared) == "fp32" else LOW_PRECISION


def precision_of_base(shared: SharedBase) -> str:
    """Returns the precision in which the base computes: fp32, half or quantized."""
    return precision_of(shared.base, shared.autocast is not None)


def root_mean_square(difference: Tensor, mask: Tensor) -> float:
    """Returns the root mean square of `difference` at unmasked positions of all workers."""
    squares = difference.square().where(mask, 0.0).sum()
    total, count = all_reduce(torch.stack([squares, mask.sum().float()])).tolist()
    return (total / max(count, 1)) ** 0.5


# -------------------------------------------------------------------------------------- rewards and advantages


def advantages_by_definition(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks that token rewards and advantages equal their definitions. Every rank calls this function."""
    # Policy and reference are still equal, which hides a wrong sign or coefficient of the KL. The check is therefore repeated
    # with shifted reference log-probs.
    steps = torch.arange(episodes.mask.shape[1], device=episodes.mask.device)
    shift = 0.3 * torch.sin(1.0 + steps + episodes.indices.unsqueeze(-1))
    shifted = replace(episodes, ref_logprobs=(episodes.ref_logprobs + shift).where(episodes.mask, 0.0))
    losses.fill_advantages(trainer.args, trainer.rollout_config, shifted, trainer.kl_coef)
    result, shifted_result = (_compared(trainer, variant) for variant in (episodes, shifted))
    return result if result.holds is False else shifted_result


def _compared(trainer: Learner, episodes: Episodes) -> CheckResult:
    args, config = trainer.args, trainer.rollout_config
    rows = sorted(chain(*gather(_rows(episodes))), key=lambda row: row.indices)
    rewards = [_token_rewards(args, trainer.kl_coef, row) for row in rows]
    if args.whiten_rewards:
        rewards = _whitened(rewards, [True] * len(rows), shift=False)
    wrong_rewards = sum(not _close(row.rewards, plain) for row, plain in zip(rows, rewards, strict=True))
    message, wrong = f"{len(rows)} completions, workers: {trainer.workers}, {args.advantage_estimator}", 0
    if args.estimator.definition is None:
        message += " (advantages are not checked, because the estimator has no definition)"
    else:
        expected = zip(rows, _advantages(args, config, rows, rewards), strict=True)
        wrong = sum(not _close(row.advantages, plain) for row, plain in expected if row.learn.any())
    if wrong_rewards:
        message += f"; token rewards of {wrong_rewards} differ: check the sign and coefficient of the KL penalty, and which token gets the score"
    elif wrong:
        message += f"; advantages of {wrong} differ: check gamma, lambda, the values, the value after the last action, "
        message += "and whether whitening covers all rows of all workers"
    return CheckResult("rewards and advantages are as defined", message, not (wrong_rewards or wrong))


def _rows(episodes: Episodes) -> list[SimpleNamespace]:
    """Returns each completion's numbers as attributes with the names of `Episodes`. Numbers per action are arrays."""
    counts = episodes.counts.tolist()
    rows = [SimpleNamespace() for _ in counts]
    for name, tensor in vars(episodes).items():
        for row, count, values in zip(rows, counts, tensor.cpu().numpy(), strict=True):
            setattr(row, name, values[:count].astype(np.float64) if values.ndim else values.item())
    return rows


KL: dict[str, Callable[[Numbers], Numbers]] = {  # functions of d = log p_policy - log p_reference
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.exp(np.minimum(-d, 20.0)) - 1 + d,
    "abs": np.abs,
}


def _token_rewards(args: PPOConfig, kl_coef: float, row: SimpleNamespace) -> Numbers:
    """Returns -kl_coef * kl on each action, plus the score on the last action."""
    coefficient = kl_coef if args.kl_in == "reward" else 0.0
    rewards = -coefficient * KL[args.kl_estimator](row.old_logprobs - row.ref_logprobs)
    if len(rewards) and (row.ended or not args.bootstrap_truncated):
        rewards[-1] += row.scores
    return rewards


def _advantages(
    args: PPOConfig, config: RolloutConfig, rows: list[SimpleNamespace], token_rewards: list[Numbers]
) -> list[Numbers]:
    """Returns the advantages of all rows by the estimator's definition, whitened and with the off-policy correction."""
    definition, n = args.estimator.definition, args.num_generations
    assert definition is not None
    advantages: list[Numbers] = []
    for start in range(0, len(rows), n):
        group = rows[start : start + n]
        inputs = {
            "rewards": [rewards.tolist() for rewards in token_rewards[start : start + n]],
            "values": [row.values.tolist() for row in group],
            "bootstrap": [row.bootstrap * (args.bootstrap_truncated and not row.ended) for row in group],
            "greedy_scores": [row.greedy_scores for row in group],
        }
        advantages += [np.array(row) for row in estimators.call_formula(definition, args, inputs)]
    if args.whitens_advantages:
        advantages = _whitened(advantages, [bool(row.learn.any()) for row in rows])
    if args.teacher_coef:
        for i, row in enumerate(rows):
            advantages[i] += args.teacher_coef * (row.teacher_logprobs - row.old_logprobs)
    if config.corrects:  # with the truncated ratios trainer / sampler
        for i, row in enumerate(rows):
            difference = row.old_logprobs - row.sampler_logprobs
            if config.corrects != "token":
                difference = np.full_like(difference, difference.sum())
            advantages[i] *= np.minimum(np.exp(np.minimum(difference, 50.0)), config.correction_cap)
    return advantages


def _whitened(rows: list[Numbers], counted: list[bool], shift: bool = True) -> list[Numbers]:
    """Returns the numbers of all rows, whitened with the mean and standard deviation of the rows that enter the loss."""
    values = np.concatenate([np.zeros(0), *(row for row, on in zip(rows, counted, strict=True) if on)])
    mean = values.mean() if len(values) else 0.0
    scale = 1 / math.sqrt(values.var(ddof=1) + 1e-8) if len(values) > 1 else 1.0
    return [(row - mean) * scale + (0.0 if shift else mean) for row in rows]


def _close(ours: Numbers, plain: Numbers) -> bool:
    return len(plain) == 0 or float(np.abs(ours - plain).max()) <= 1e-3 * max(1.0, float(np.abs(plain).max()))


# ---------------------------------------------------------------------------------------- signs of the losses


def losses_pull_the_right_way(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks the signs of the losses' gradients with respect to log-probs, entropies and values.

    Actions with a positive advantage must become more likely. If the loss has a KL term, actions that are more likely than under
    the reference must become less likely. Entropy must grow if the loss has an entropy bonus. Values must move towards the
    returns.
    """
    args, moments, problems = trainer.args, trainer.moments, []
    subset = episodes.take(range(min(len(episodes), CHECKED_ROWS)))
    old, learn, totals = subset.old_logprobs, subset.learn, Totals.of(subset.learn)

    def policy_gradients(subset: Episodes) -> tuple[Tensor, ...]:
        """Returns gradients (B, R) with respect to log-probs and entropies."""
        logprobs, entropy = old.clone().requires_grad_(), torch.ones_like(old).requires_grad_()
        loss, _ = losses.policy_objective(args, subset, totals, logprobs, entropy, trainer.kl_coef)
        return torch.autograd.grad(loss, (logprobs, entropy))

    if learn.any() and subset.advantages[learn].any():
        by_logprob, by_entropy = policy_gradients(replace(subset, ref_logprobs=old))
        if not float((by_logprob * subset.advantages)[learn].sum()) < 0:
            problems.append(
                "rewarded actions become less likely: check the sign of the policy loss and of the advantages"
            )
        if args.entropy_coef > 0 and not float(by_entropy[learn].sum()) < 0:
            problems.append("entropy falls although the loss has an entropy bonus")
    if args.kl_in == "loss" and trainer.kl_coef > 0 and learn.any():
        likelier = replace(subset, ref_logprobs=old - 0.5, advantages=torch.zeros_like(subset.advantages))
        if not float(policy_gradients(likelier)[0][learn].sum()) > 0:
            problems.append("the policy moves away from the reference: check the sign of the KL in the loss")
    if args.uses_critic and learn.any():  # uses values above the returns and outside the clip range
        offset = 1.0 + 2 * (subset.values - subset.returns).abs().max() / moments.std
        values = (moments.normal(subset.returns) + offset).requires_grad_()
        loss, _ = losses.value_objective(args, subset, totals, values, moments)
        if not float(torch.autograd.grad(loss, values)[0][learn].sum()) > 0:
            problems.append("values move away from the returns")
    message = "; ".join(problems) or "policy" + (", values" if args.uses_critic else "")
    return CheckResult("gradients of the losses have the right sign", message, not problems)
