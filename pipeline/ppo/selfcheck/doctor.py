"""Self-checks of a PPO job on one rollout and one minibatch, before GPU hours are spent on it: `examine`.

Beyond the checks of every run's first rollout (rollout.py), these cost a few extra passes: adapters in
memory equal their files and give the outputs that they gave when they were trained, the sampler follows the policy,
gradients reach the learning roles and nothing else, and are the same with and without gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.findings import Finding, same_tensors
from pipeline.models import probes
from pipeline.models.adapter_files import HEAD, is_head
from pipeline.models.tokenizer import warn_of_endless
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Episodes, Totals, collate
from pipeline.ppo.selfcheck import rollout as checks
from pipeline.ppo.selfcheck.rollout import tolerance
from pipeline.ppo.trainer import PPOTrainer

ROUNDING = 1e-3  # relative to a gradient's norm: what another order of summation may change in fp32


def examine(trainer: PPOTrainer, folders: Mapping[str, str]) -> tuple[list[Finding], dict[str, float]]:
    """Returns all findings, and the cost of the phases (time/* in seconds, memory/* in GiB). No parameter changes.

    Args:
        trainer: at its first update; the checks use `batch_size` completions.
        folders: role -> the adapter folder that it must equal.
    """
    episodes = trainer.make_experience().episodes
    warn_of_endless(float(episodes.ended.float().mean()), "the completions")
    findings = checks.check(trainer, episodes)
    with trainer.phases("update"):
        findings += one_minibatch(trainer, episodes)
    findings += [same_as_file(trainer, role, folder) for role, folder in folders.items()]
    findings += [
        behaves_as_trained(trainer, role, folder) for role, folder in folders.items() if role != "critic"
    ]
    findings.append(sampler_follows(trainer, episodes))
    findings.append(checkpointing_agrees(trainer, episodes))
    return findings, trainer.phases.metrics()


def one_minibatch(trainer: PPOTrainer, episodes: Episodes) -> list[Finding]:
    """Runs forward and backward on all episodes as one minibatch. Checks the first ratio, and which parameters get gradients."""
    shared = trainer.shared
    shared.zero_grad()
    stats = trainer.accumulate(episodes, list(range(len(episodes))), Totals.of(episodes.learn))
    learning = {id(p) for role in trainer.roles for p in shared.parameters_of(role)}
    others = sum(p.grad is not None for p in shared.parameters() if id(p) not in learning)
    norms = {role: float(_flat(trainer, role).norm()) for role in trainer.roles}
    shared.zero_grad()
    found = ", ".join(f"{role} {norm:.3g}" for role, norm in norms.items()) + f"; {others} other tensors"
    holds = others == 0 and all(0 < norm < float("inf") for norm in norms.values())
    return [
        checks.first_ratio(shared, (2 * float(stats["policy/approxkl_avg"])) ** 0.5),
        Finding("gradients reach the learning roles and nothing else", f"norms: {found}", holds),
    ]


def same_as_file(trainer: PPOTrainer, role: str, folder: str) -> Finding:
    """Checks that the role's adapter in memory, with its head if it has one, is bit-identical to the file."""
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    stored = {HEAD if is_head(key) else key: tensor.float() for key, tensor in tensors.items()}
    return same_tensors(f"{role} is the adapter of its file", trainer.shared.tensors_of(role), stored, folder)


@torch.no_grad()
def behaves_as_trained(trainer: PPOTrainer, role: str, folder: str) -> Finding:
    """Checks that the role's outputs on its probes equal its outputs at the end of its training.

    Differences are in standard deviations of a reward's scores, or in nats per token of a policy's log-probs.
    """
    shared, rewards = trainer.shared, {reward.name: reward for reward in trainer.rewards}
    verb = "scores" if role in rewards else "writes"
    name = f"{role} {verb} as when it was trained"
    stored = probes.read(folder)
    if not stored:
        return Finding(name, f"{folder} holds no {probes.FILE}: it was not trained by this pipeline", None)
    largest = 0.0
    for ids, output in stored:
        if role in rewards:
            largest = max(largest, abs(shared.score(role, ids) - output) / rewards[role].std)
        else:
            largest = max(largest, abs(shared.mean_logprob(role, ids) - output))
    unit = "deviations" if role in rewards else "nats a token"
    found = f"{len(stored)} probes differ by up to {largest:.2g} {unit}"
    if not largest <= tolerance(shared):
        found += ". Another base, scaling (lora_alpha, r) or precision, or tensors that were lost on the way"
    return Finding(name, found, largest <= tolerance(shared))


@torch.no_grad()
def sampler_follows(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Checks that after the policy has changed, the decoder samples from the policy as it is now. The policy is put back."""
    name, shared = "the sampler follows the policy", trainer.shared
    parameters = shared.parameters_of("policy")
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    row = episodes.take([0])
    logprobs = trainer.sampler.logprobs
    old, _ = logprobs("policy", row)
    moved, limit = 0.0, 5 * tolerance(shared)
    for scale in (0.01, 0.03, 0.1, 0.3, 1.0):  # until the change is large enough to see
        for parameter, start in zip(parameters, before, strict=True):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.data = start + scale * noise * (start.std() if len(start) > 1 and start.any() else 0.05)
        moved = float((logprobs("policy", row)[0] - old).square().mean().sqrt())
        if moved > limit:
            break
    prompt = row.input_ids[0, : int(row.starts[0])].tolist()
    trainer.sampler.decoder.changed("policy")
    completions = trainer.sampler.decoder.generate("policy", [prompt] * 4, range(4), trainer.sampler.sampling)
    sampled = collate([prompt] * 4, completions, range(4), trainer.sampler.pad, shared.device)
    now, _ = logprobs("policy", sampled)
    apart = float((now - sampled.sampler_logprobs)[sampled.mask].square().mean().sqrt())
    for parameter, start in zip(parameters, before, strict=True):
        parameter.data = start
    trainer.sampler.decoder.changed("policy")
    found = f"the policy moved by {moved:.2g} nats, and then they differ by {apart:.2g}"
    return Finding(name, found, apart <= 3 * tolerance(shared) if moved > limit else None)


def checkpointing_agrees(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Gradients with and without checkpointing agree: a layer that is recomputed in backward uses the right adapter."""
    name, shared = "checkpointed gradients are the plain ones", trainer.shared
    if not shared.gradient_checkpointing:
        return Finding(name, "off (gradient_checkpointing: false)", None)
    shortest = [min(range(len(episodes)), key=lambda row: episodes.lengths()[row])]
    gradients: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        shared.gradient_checkpointing = checkpointing
        shared.zero_grad()
        trainer.accumulate(episodes, shortest, Totals.of(episodes.learn[shortest]))
        gradients.append({role: _flat(trainer, role) for role in trainer.roles})
    shared.zero_grad()
    plain, checkpointed = gradients
    apart = {
        role: float((checkpointed[role] - plain[role]).norm() / plain[role].norm().clamp(min=1e-30))
        for role in trainer.roles
    }
    found = "relative difference: " + ", ".join(f"{role} {value:.2g}" for role, value in apart.items())
    return Finding(name, found, all(value <= max(ROUNDING, tolerance(shared)) for value in apart.values()))


def render(findings: list[Finding], phases: Mapping[str, float], completions: int, args: PPOConfig) -> str:
    """Renders the findings as a table, with an estimate of the seconds that an update of the job would take.

    Args:
        phases: time/* in seconds and memory/* in GiB, as `examine` returns them.
        completions: number of completions examined.
        args: the job's own settings.
    """
    words = {True: "ok", False: "WRONG", None: "-"}
    width = max(len(finding.check) for finding in findings)
    lines = [f"   {words[f.holds]:<6} {f.check:<{width}}  {f.found}" for f in findings]
    seconds = {k.removeprefix("time/"): v for k, v in phases.items() if k.startswith("time/")}
    once = sum(seconds.values()) + (args.num_ppo_epochs - 1) * seconds["update"]
    took = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    return "\n".join(lines) + (
        f"\n\n   {completions} completions took {took}; peak memory {phases['memory/peak']:.2f} GiB\n"
        f"   on one such worker an update of {args.batch_size} completions, {args.num_ppo_epochs} epochs, would take "
        f"{once * args.batch_size / completions:.0f} s"
    )


def _flat(trainer: PPOTrainer, role: str) -> Tensor:
    """Returns all gradients of a role as one vector."""
    parameters = trainer.shared.parameters_of(role)
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
