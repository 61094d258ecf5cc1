"""What must hold at the start, asserted in every run: the first ratio is 1, and so is policy / reference at step 0.

Most faults of a PPO implementation (dropout left on, a temperature on one side only, a shifted mask, the wrong adapter)
break one of these two before they break anything that is seen in a reward curve.
"""

from __future__ import annotations

import torch

from pipeline.models.adapters import SharedBase
from pipeline.ppo.batch import Episodes, all_reduce


def tolerance(shared: SharedBase) -> float:
    """Largest root mean square difference of log-probs (nats) that is rounding: batches differ in their padding."""
    low = shared.autocast is not None or shared.base.dtype != torch.float32
    return 0.1 if low or getattr(shared.base, "is_quantized", False) else 1e-3


def check_first_ratio(shared: SharedBase, update: int, approxkl: float) -> None:
    """Before the first optimizer step of an update the policy *is* the old policy: every ratio is 1, up to rounding.

    `approxkl` is the mean of half the squared log-ratio, over all workers. Raises RuntimeError.
    """
    rms = (2 * approxkl) ** 0.5
    if not rms <= tolerance(shared):  # NaN raises, too
        raise RuntimeError(
            f"update {update + 1}: the first ratios are not 1 (log-ratio {rms:.2g} on average, rounding is up to "
            f"{tolerance(shared):.2g}). Old and new log-probs differ before any step: dropout, another temperature or mask, "
            "or another adapter on one of the sides"
        )


def check_reference(shared: SharedBase, episodes: Episodes) -> None:
    """Before the first update the policy is a copy of the reference: equal log-probs, a KL of 0. Raises RuntimeError."""
    squares = (episodes.old_logprobs - episodes.ref_logprobs).square().where(episodes.mask, 0.0).sum()
    total, count = all_reduce(torch.stack([squares, episodes.mask.sum().float()])).tolist()
    rms = (total / max(count, 1)) ** 0.5
    if not rms <= tolerance(shared):
        raise RuntimeError(
            f"the KL at step 0 is not 0: log-probs of policy and reference differ by {rms:.2g} nats on average. The policy "
            "must start as a copy of the reference (the sft adapter); set trainer.check_reference=false if it should not"
        )
