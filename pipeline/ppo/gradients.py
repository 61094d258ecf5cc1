"""Do the losses pull the right way? Checked on their gradients with respect to log-probs, entropies and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.findings import Finding
from pipeline.ppo.batch import Episodes, Totals

if TYPE_CHECKING:
    from pipeline.ppo.trainer import PPOTrainer


ROWS = 32  # that are looked at


def losses_pull_the_right_way(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """What paid must become more likely, a policy above the reference less likely where the KL is in the loss, entropy
    larger where it has a bonus, and values must move towards the returns.
    """
    args, wrong = trainer.args, []
    part = episodes.take(range(min(len(episodes), ROWS)))
    old = part.old_logprobs
    if part.learn.any() and part.advantages[part.learn].any():
        same = replace(part, ref_logprobs=old)  # no gradient of the KL
        by_logprob, by_entropy = _policy_gradients(trainer, same)
        if not float((by_logprob * part.advantages)[part.learn].sum()) < 0:
            wrong.append("what paid becomes less likely: the sign of the policy loss or of the advantages")
        if by_entropy is not None and not float(by_entropy[part.learn].sum()) < 0:
            wrong.append("entropy falls where it has a bonus")
    if args.kl_in == "loss" and trainer.kl_coef > 0 and part.learn.any():
        above = replace(part, ref_logprobs=old - 0.5, advantages=torch.zeros_like(part.advantages))
        if not float(_policy_gradients(trainer, above)[0][part.learn].sum()) > 0:
            wrong.append("the policy leaves the reference instead of staying: the sign of the KL in the loss")
    if (
        args.uses_critic
        and part.learn.any()
        and not float(_value_gradients(trainer, part)[part.learn].sum()) > 0
    ):
        wrong.append("values move away from the returns")
    found = "; ".join(wrong) or "policy" + (", values" if args.uses_critic else "")
    return Finding("losses pull the right way", found, not wrong)


def _policy_gradients(trainer: PPOTrainer, part: Episodes) -> tuple[Tensor, Tensor | None]:
    """(B, R) gradients of the policy's loss by log-probs and, if it has an entropy bonus, by entropies."""
    logprobs = part.old_logprobs.clone().requires_grad_()
    entropy = torch.ones_like(logprobs).requires_grad_() if trainer.args.entropy_coef > 0 else None
    totals = Totals.of(part.learn)
    with _stubbed(trainer, "logprobs", (logprobs, entropy)):
        loss, _ = trainer.policy_objective(part, totals)
    loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad, None if entropy is None else entropy.grad


def _value_gradients(trainer: PPOTrainer, part: Episodes) -> Tensor:
    """(B, R) gradient of the critic's loss by its values, where they are above the returns, beyond the clip range."""
    moments = trainer.moments
    above = 1.0 + 2 * (part.values - part.returns).abs().max() / moments.std
    values = ((part.returns - moments.mean) / moments.std + above).requires_grad_()
    with _stubbed(trainer, "values", (values, values[:, 0])):
        loss, _ = trainer.value_objective(part, float(part.learn.sum()))
    loss.backward()
    assert values.grad is not None
    return values.grad


@contextmanager
def _stubbed(trainer: PPOTrainer, method: str, answer: Any) -> Iterator[None]:
    """The trainer's method returns `answer` within the block."""
    setattr(trainer, method, lambda *args, **keys: answer)
    try:
        yield
    finally:
        delattr(trainer, method)  # the instance's: the method shows again
