"""Checks the roles of a run before its first optimizer step, with a few extra passes over single rows.

Adapters in memory must equal their files, and must produce the outputs that were recorded after their training. The sampler must
use the current weights of the policy. Gradients must reach only the learning roles, and must be the same with and without
gradient checkpointing.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.checks import CheckResult, same_tensors
from pipeline.models import probes
from pipeline.models.adapter_files import HEAD, is_head
from pipeline.models.adapters import SharedBase
from pipeline.ppo.episodes import Episodes, Totals, collate
from pipeline.ppo.selfcheck.definitions import (
    LOW_PRECISION,
    MAX_ACTIONS,
    Learner,
    logprob_tolerance,
    precision_of_base,
    root_mean_square,
)
from pipeline.system.hub import TENSORS

ROUNDING = 1e-3  # relative difference of fp32 gradients that rounding explains


def check_roles(trainer: Learner, episodes: Episodes) -> list[CheckResult]:
    """Checks policy, reference, rewards and critic. Returns the results. Changes no parameter. Every rank calls this function."""
    folders = trainer.folders
    return [
        *(same_as_file(trainer, role, folder) for role, folder in folders.items()),
        *(behaves_as_trained(trainer, role, folder) for role, folder in folders.items() if role != "critic"),
        sampler_follows(trainer, episodes),
        *check_gradients(trainer, episodes),
    ]


def same_as_file(trainer: Learner, role: str, folder: str) -> CheckResult:
    """Checks that the role's adapter in memory, with its head if it has one, is bit-identical to the file."""
    tensors = load_file(os.path.join(folder, TENSORS))
    stored = {HEAD if is_head(key) else key: tensor.float() for key, tensor in tensors.items()}
    loaded = trainer.shared.tensors_of(role)
    if role == "critic":  # the trainer has rescaled the critic's head to an episode's score
        stored, loaded = ({k: t for k, t in group.items() if k != HEAD} for group in (stored, loaded))
    return same_tensors(f"{role} equals its adapter file", loaded, stored, folder)


@torch.no_grad()
def behaves_as_trained(trainer: Learner, role: str, folder: str) -> CheckResult:
    """Checks that the role's outputs on its probes equal the outputs at the end of the role's training.

    Differences of a reward's scores are in standard deviations. Differences of a policy's log-probs are in nats per token.
    """
    shared, rewards = trainer.shared, {reward.name: reward for reward in trainer.sampler.rewards}
    verb = "scores" if role in rewards else "writes"
    name = f"{role} {verb} as when it was trained"
    records = probes.read_probes(folder)
    if not records:
        return CheckResult(
            name, f"{folder} has no {probes.FILE}: this pipeline did not train the adapter", None
        )
    recorded, current = records[0][2], precision_of_base(shared)
    if recorded is None or ("quantized" in {recorded, current} and recorded != current):
        message = f"not checked: the adapter was trained at precision {recorded or 'unknown'}, but this run's base is {current}"
        return CheckResult(name, message, None)
    limit = LOW_PRECISION if recorded == "half" else logprob_tolerance(shared)
    error = 0.0
    for ids, output, _ in records:
        if role in rewards:
            error = max(error, abs(shared.score(role, ids) - output) / rewards[role].std)
        else:
            error = max(error, abs(shared.mean_logprob(role, ids) - output))
    unit = "deviations" if role in rewards else "nats a token"
    message = f"{len(records)} probes differ by up to {error:.2g} {unit}"
    if not error <= limit:
        message += ". Check for another base, scaling (lora_alpha, r) or precision, and for missing tensors"
    return CheckResult(name, message, error <= limit)


@torch.no_grad()
def sampler_follows(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Changes the policy, checks that the decoder samples from the changed policy, and restores the policy."""
    name, shared, sampler = "the sampler uses the policy's weights", trainer.shared, trainer.sampler
    if trainer.rollouts.workers:
        return CheckResult(name, "rollout workers sample; their log-probs are checked in each update", None)
    parameters = shared.parameters_of("policy")
    starts = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    row = episodes.take([0])
    old_logprobs, _ = sampler.logprobs("policy", row)
    change, limit = 0.0, 5 * logprob_tolerance(shared)
    for scale in (0.01, 0.03, 0.1, 0.3, 1.0):  # the noise grows until outputs change measurably
        for parameter, start in zip(parameters, starts, strict=True):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            # Writes in place, because CUDA graphs read the parameters at fixed addresses.
            parameter.copy_(start + scale * noise * (start.std() if len(start) > 1 and start.any() else 0.05))
        change = root_mean_square(sampler.logprobs("policy", row)[0] - old_logprobs, row.mask)
        if change > limit:
            break
    sampler.decoder.changed("policy")
    prompts = [row.input_ids[0, : int(row.starts[0])].tolist()] * 4
    sampling = replace(sampler.sampling, max_new_tokens=min(sampler.sampling.max_new_tokens, MAX_ACTIONS))
    completions = sampler.decoder.generate("policy", prompts, range(4), sampling)
    sampled = collate(prompts, completions, range(4), sampler.pad, shared.device)
    logprobs, _ = sampler.logprobs("policy", sampled)
    error = root_mean_square(logprobs - sampled.sampler_logprobs, sampled.mask)
    for parameter, start in zip(parameters, starts, strict=True):
        parameter.copy_(start)
    sampler.decoder.changed("policy")
    message = (
        f"after a change of the policy by {change:.2g} nats, sampler and trainer differ by {error:.2g} nats"
    )
    return CheckResult(name, message, error <= 3 * logprob_tolerance(shared) if change > limit else None)


def check_gradients(trainer: Learner, episodes: Episodes) -> list[CheckResult]:
    """Checks which parameters get gradients from one completion. Checks gradient checkpointing if it is enabled.

    A layer that checkpointing recomputes in the backward must use the adapter of the forward.
    """
    names = "gradients reach the learning roles and nothing else", "checkpointing does not change gradients"
    shared, lengths = trainer.shared, episodes.lengths()
    learns = (episodes.learn & (episodes.advantages != 0)).any(-1)
    if trainer.args.uses_critic:
        learns &= (episodes.learn & (episodes.returns != episodes.values)).any(-1)
    rows = sorted(learns.nonzero().flatten().tolist(), key=lambda row: lengths[row])[:1]
    if not rows:
        return [CheckResult(name, "the advantage of every completion is 0", None) for name in names]
    role_ids = {id(p) for role in trainer.roles for p in shared.parameters_of(role)}
    checkpointing, gradients = shared.gradient_checkpointing, list[dict[str, Tensor]]()
    for enabled in dict.fromkeys((False, checkpointing)):
        shared.gradient_checkpointing = enabled
        shared.zero_grad()
        trainer.accumulate(episodes, rows, Totals.of(episodes.learn[rows]))
        gradients.append({role: gradient_of(shared, role) for role in trainer.learning})
    strays = sum(p.grad is not None for p in shared.parameters() if id(p) not in role_ids)
    shared.zero_grad()
    plain, rerun = gradients[0], gradients[-1]
    norms = {role: float(gradient.norm()) for role, gradient in rerun.items()}
    norm_list = ", ".join(f"{role} {norm:.3g}" for role, norm in norms.items())
    if not all(map(math.isfinite, norms.values())):  # the trainer skips a step with NaN or inf gradients
        return [CheckResult(name, f"norms: {norm_list}", None) for name in names]
    holds = strays == 0 and all(norms.values())
    reach = CheckResult(names[0], f"norms: {norm_list}; {strays} other tensors", holds)
    if not checkpointing:
        return [reach, CheckResult(names[1], "off (gradient_checkpointing: false)", None)]
    errors = {r: float((rerun[r] - plain[r]).norm() / plain[r].norm().clamp(min=1e-30)) for r in plain}
    error_list = ", ".join(f"{role} {value:.2g}" for role, value in errors.items())
    limit = max(ROUNDING, logprob_tolerance(shared))
    holds = all(value <= limit for value in errors.values())
    return [reach, CheckResult(names[1], f"relative difference: {error_list}", holds)]


def gradient_of(shared: SharedBase, role: str) -> Tensor:
    """Returns all gradients of a role as one vector."""
    parameters = shared.parameters_of(role)
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
