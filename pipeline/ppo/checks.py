"""Invariants of the first update, checked by every run on its first rollout, and by `doctor` before a run.

Most faults of a PPO implementation (dropout left on, a temperature on one side only, a shifted mask, the wrong adapter)
violate one of these long before a reward curve shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import SelfCheckFailed
from pipeline.findings import Finding
from pipeline.models.adapters import SharedBase
from pipeline.ppo.batch import Episodes, all_reduce, gather

if TYPE_CHECKING:
    from pipeline.ppo.chunks import Chunk, Sampled
    from pipeline.ppo.schedule import Rollout
    from pipeline.ppo.trainer import PPOTrainer
    from pipeline.ppo.versions import Versions


LOOKED_AT = 4  # completions of an update that rollout workers sampled


def tolerance(shared: SharedBase) -> float:
    """Largest root mean square difference of log-probs, in nats, that rounding explains: batches differ in padding."""
    low = shared.autocast is not None or shared.base.dtype != torch.float32
    return 0.1 if low or getattr(shared.base, "is_quantized", False) else 1e-3


def check_first_ratio(shared: SharedBase, rms: float) -> None:
    """Before the first optimizer step the policy *is* the old policy: every ratio is 1, up to rounding.

    For the first update that trains the policy. In low precision rounding has no sharp limit, and no run of days should end
    over one outlier: later updates report the same figure as `policy/first_ratio_rms`.

    Args:
        rms: root mean square of the log-ratio, over all workers.

    Raises:
        SelfCheckFailed: when the ratios differ from 1 by more than rounding.
    """
    if not rms <= tolerance(shared):  # written so that NaN raises, too
        raise SelfCheckFailed(
            f"the first ratios are not 1 (log-ratio {rms:.2g} on average, rounding is up to {tolerance(shared):.2g}). "
            "Old and new log-probs differ before any step: dropout, another temperature or mask, or another adapter on one "
            "of the sides"
        )


def check_rollout(trainer: PPOTrainer, episodes: Episodes, rewards: Tensor) -> list[Finding]:
    """All checks that take milliseconds, on the first update's episodes and token rewards (B, R)."""
    checks: list[Callable[[PPOTrainer, Episodes, Tensor], Finding]] = [
        reference_is_policy,
        sampler_agrees,
        ends_inside,
        frozen,
    ]
    return [check(trainer, episodes, rewards) for check in checks]


def reference_is_policy(trainer: PPOTrainer, episodes: Episodes, rewards: Tensor) -> Finding:
    """Before the first update the policy is a copy of the reference: log-probs are equal, the KL is 0."""
    name = "KL to the reference is 0 before the first step"
    if not trainer.args.check_reference:
        return Finding(name, "not asked for (check_reference: false)", None)
    rms = _rms(episodes.old_logprobs - episodes.ref_logprobs, episodes.mask)
    found = f"log-probs differ by {rms:.2g} nats"
    if not rms <= tolerance(trainer.shared):
        found += (
            ". The policy must start as a copy of the reference (the sft adapter); set "
            "check_reference=false if it should not"
        )
        return Finding(name, found, False)
    return Finding(name, found, True)


def sampler_agrees(trainer: PPOTrainer, episodes: Episodes, rewards: Tensor) -> Finding:
    """Sampler and trainer give the tokens the same log-probs: same temperature, mask and adapter."""
    rms = _rms(episodes.sampler_logprobs - episodes.old_logprobs, episodes.mask)
    return Finding(
        "sampler and trainer agree on log-probs",
        f"they differ by {rms:.2g} nats",
        rms <= 3 * tolerance(trainer.shared),  # an engine may use other kernels
    )


def delivered_as_asked(versions: Versions, chunks: Sequence[Chunk], sampled: Sequence[Sampled]) -> Finding:
    """Each chunk came back whole, once, and from a sampler with the parameters of the version that was asked for."""
    name = "rollout workers deliver what they are asked for"
    for chunk, one in zip(chunks, sampled, strict=True):
        if one.key != chunk.key or len(one.completions) != len(chunk.episodes):
            found = (
                f"chunk {chunk.key} (update, rank, number) came back as chunk {one.key} with {len(one.completions)} completions; "
                f"{len(chunk.episodes)} were asked for: one was lost, or came twice"
            )
            return Finding(name, found, False)
        if (one.version, one.digest) != (chunk.version, versions.digests[chunk.version]):
            found = (
                f"chunk {chunk.key} is of version {one.version} with the parameters {one.digest}; asked for version "
                f"{chunk.version} with {versions.digests[chunk.version]}"
            )
            return Finding(name, found, False)
    return Finding(name, f"{len(chunks)} chunks", True)


def sampled_by_its_version(trainer: PPOTrainer, rollout: Rollout) -> Finding:
    """The log-probs of some of a chunk's completions are those of its version, by the trainer's forward.

    An engine may hold the right parameters, and sample from what it cached of others.
    """
    name, versions = "rollout workers sample from the version that they are asked to", trainer.versions
    assert versions
    drawn = np.random.default_rng([trainer.args.seed, trainer.update])
    number = int(drawn.integers(len(rollout.chunks)))
    chunk = rollout.chunks[number]
    episodes = trainer.sampler.episodes(chunk, rollout.sampled[number])
    part = episodes.take(drawn.permutation(len(episodes))[:LOOKED_AT].tolist())
    with versions.use(chunk.version), torch.no_grad():
        logprobs, _ = trainer.logprobs("policy", part)
    apart = float((logprobs - part.sampler_logprobs)[part.mask].square().mean().sqrt())
    found = f"log-probs of version {chunk.version} differ by {apart:.2g} nats"
    if not apart <= 3 * tolerance(trainer.shared):
        found += (
            f" on completions of chunk {chunk.key}: they were sampled from other parameters than their worker holds (a cache of "
            "another version), or from other prompts"
        )
        return Finding(name, found, False)
    return Finding(name, found, True)


def ends_inside(trainer: PPOTrainer, episodes: Episodes, rewards: Tensor) -> Finding:
    """The end-of-sequence token is the last action of a completion that ended, and no other action is one."""
    ends = torch.tensor(trainer.sampling.eos, device=episodes.mask.device)
    is_end = torch.isin(_actions(episodes), ends) & episodes.mask
    steps = torch.arange(episodes.mask.shape[1], device=episodes.mask.device)
    last = steps == (episodes.counts - 1).unsqueeze(-1)
    holds = (is_end == (last & episodes.ended.unsqueeze(-1))).all(-1)
    holds &= episodes.mask.sum(-1) == episodes.counts
    holds &= episodes.ended | (episodes.counts == trainer.sampling.max_new_tokens)
    found = f"in {int(holds.sum())} of {len(episodes)} completions"
    found += f"; {int(episodes.ended.sum())} end by themselves"
    return Finding("the end token is inside the mask, as the last action", found, bool(holds.all()))


def frozen(trainer: PPOTrainer, episodes: Episodes, rewards: Tensor) -> Finding:
    """Only the learning roles require gradients, in fp32, and the optimizer has them all; no dropout is on."""
    shared = trainer.shared
    learning = {id(p) for role in trainer.roles for p in shared.parameters_of(role)}
    trainable = [p for p in shared.parameters() if p.requires_grad]
    strays = sum(id(p) not in learning for p in trainable) + len(learning - {id(p) for p in trainable})
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    forgotten = len(learning ^ optimized)
    low = sum(p.dtype != torch.float32 for p in [*trainable, *shared.heads.parameters()])
    dropouts = sum(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in shared.modules())
    found = f"{sum(p.numel() for p in trainable):,} numbers learn ({', '.join(trainer.roles)})"
    if strays or forgotten or low or dropouts:
        found += f"; {strays} tensors learn or rest that should not, {low} are not fp32, {dropouts} dropouts are on, "
        found += f"{forgotten} are on one side only of optimizer and roles"
    return Finding("only adapters and heads learn", found, not (strays or forgotten or low or dropouts))


def weights_of(trainer: PPOTrainer) -> dict[str, tuple[float, float]]:
    """role -> sum and sum of squares of what it learns with, to see whether it has changed."""
    sums = {}
    for role in trainer.roles:
        parameters = [parameter.detach() for parameter in trainer.shared.parameters_of(role)]
        total = sum(float(p.sum(dtype=torch.float64)) for p in parameters)
        sums[role] = (total, sum(float(p.double().square().sum()) for p in parameters))
    return sums


def _same_sums(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Up to the order of additions, which differs between GPUs of different types."""
    return all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(one, other, strict=True))


def learned_alike(
    trainer: PPOTrainer, before: dict[str, tuple[float, float]], metrics: dict[str, float]
) -> Finding:
    """After the first update the learning roles have changed, and they are the same on all workers.

    Args:
        before: `weights_of` before the update.
        metrics: of `PPOTrainer.learn`.
    """
    after = weights_of(trainer)
    rates = dict(zip(trainer.roles, (group["lr"] for group in trainer.optimizer.param_groups), strict=True))
    still = [
        role
        for role in trainer.roles
        if rates[role] > 0 and metrics.get(f"grad_norm/{role}", 0.0) > 0 and after[role] == before[role]
    ]
    held: list[dict[str, tuple[float, float]]] = gather(after)
    apart = [
        role for role in trainer.roles if any(not _same_sums(other[role], after[role]) for other in held)
    ]
    skipped = trainer.skipped_steps > 0
    found = f"{', '.join(trainer.roles)}; workers: {trainer.workers}"
    if still and not skipped:
        found += (
            f"; {', '.join(still)} got a gradient and did not move: its parameters are not the optimizer's"
        )
    if apart:
        found += f"; {', '.join(apart)} differs between workers: gradients are not summed over all of them"
    return Finding(
        "what learns has moved, alike on all workers", found, not ((still and not skipped) or apart)
    )


def _actions(episodes: Episodes) -> Tensor:
    """(B, R) token ids of the actions; arbitrary off the mask."""
    steps = torch.arange(episodes.mask.shape[1], device=episodes.mask.device)
    positions = episodes.starts.unsqueeze(-1) + steps
    return episodes.input_ids.gather(1, positions.clamp(max=episodes.input_ids.shape[1] - 1))


def _rms(difference: Tensor, mask: Tensor) -> float:
    """Root mean square over the mask, over all workers."""
    squares = difference.square().where(mask, 0.0).sum()
    total, count = all_reduce(torch.stack([squares, mask.sum().float()])).tolist()
    return (total / max(count, 1)) ** 0.5
