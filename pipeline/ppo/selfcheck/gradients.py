"""Checks the signs of the losses' gradients with respect to log-probs, entropies and values."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.findings import Finding
from pipeline.ppo import losses
from pipeline.ppo.episodes import Episodes, Totals
from pipeline.ppo.selfcheck.learner import Learner

CHECKED_ROWS = 32


def losses_pull_the_right_way(trainer: Learner, episodes: Episodes) -> Finding:
    """Checks the signs of all losses.

    Actions with a positive advantage become more likely; a policy above the reference less likely, if the KL is in the loss;
    entropy grows if it has a bonus; values move towards the returns.
    """
    args, wrong = trainer.args, []
    part = episodes.take(range(min(len(episodes), CHECKED_ROWS)))
    old, learn = part.old_logprobs, part.learn
    if learn.any() and part.advantages[learn].any():
        no_kl = replace(part, ref_logprobs=old)
        by_logprob, by_entropy = _policy_gradients(trainer, no_kl)
        if not float((by_logprob * part.advantages)[learn].sum()) < 0:
            wrong.append(
                "rewarded actions become less likely: the sign of the policy loss or of the advantages"
            )
        if by_entropy is not None and not float(by_entropy[learn].sum()) < 0:
            wrong.append("entropy falls although it has a bonus")
    if args.kl_in == "loss" and trainer.kl_coef > 0 and learn.any():
        above = replace(part, ref_logprobs=old - 0.5, advantages=torch.zeros_like(part.advantages))
        if not float(_policy_gradients(trainer, above)[0][learn].sum()) > 0:
            wrong.append("the policy leaves the reference instead of staying: the sign of the KL in the loss")
    if args.uses_critic and learn.any() and not float(_value_gradients(trainer, part)[learn].sum()) > 0:
        wrong.append("values move away from the returns")
    found = "; ".join(wrong) or "policy" + (", values" if args.uses_critic else "")
    return Finding("losses pull the right way", found, not wrong)


def _policy_gradients(trainer: Learner, part: Episodes) -> tuple[Tensor, Tensor | None]:
    """Returns gradients (B, R) of the policy's loss by log-probs and, if it has an entropy bonus, by entropies."""
    logprobs = part.old_logprobs.clone().requires_grad_()
    entropy = torch.ones_like(logprobs).requires_grad_() if trainer.args.entropy_coef > 0 else None
    totals = Totals.of(part.learn)
    loss, _ = losses.policy_objective(trainer.args, part, totals, logprobs, entropy, trainer.kl_coef)
    loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad, None if entropy is None else entropy.grad


def _value_gradients(trainer: Learner, part: Episodes) -> Tensor:
    """Returns the gradient (B, R) of the critic's loss, at values that are above the returns and outside the clip range."""
    moments = trainer.moments
    above = 1.0 + 2 * (part.values - part.returns).abs().max() / moments.std
    values = ((part.returns - moments.mean) / moments.std + above).requires_grad_()
    loss, _ = losses.value_objective(trainer.args, part, Totals.of(part.learn), values, moments)
    loss.backward()
    assert values.grad is not None
    return values.grad
