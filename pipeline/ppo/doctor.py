"""One rollout and one minibatch of a job, looked at from all sides before any money is spent on it: `examine`.

To what every run checks on its first rollout (checks.py) it adds what costs a forward or two: that adapters in memory
are those of the files, that the reward still scores as it did when it was trained, that gradients reach the learning
roles and nothing else, and are the same with and without gradient checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.models import probes
from pipeline.models.adapters import HEAD, is_head
from pipeline.ppo.batch import Episodes
from pipeline.ppo.checks import Finding, of_rollout, tolerance
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.trainer import PPOTrainer

ROUNDING = 1e-3  # of a gradient's norm: what another order of the same sums may change in fp32


def examine(trainer: PPOTrainer, folders: Mapping[str, str]) -> tuple[list[Finding], dict[str, float]]:
    """All findings, and what the phases took (time/* in seconds, memory/* in GiB). No parameter is changed.

    Args:
        trainer: at its first update; its `batch_size` is the size of the examination.
        folders: role -> the adapter folder that it must still be equal to.
    """
    with trainer.phases("rollout"):
        episodes, samples, greedy = trainer.rollout()
    with trainer.phases("score"):
        trainer.score(episodes, samples)
        greedy_scores = trainer.greedy_scores(greedy)
    with trainer.phases("values"):
        trainer.logprobs_and_values(episodes)
    rewards = trainer.rewards_and_advantages(episodes, greedy_scores)
    findings = of_rollout(trainer, episodes, rewards)
    with trainer.phases("update"):
        findings += one_minibatch(trainer, episodes)
    findings += [same_as_file(trainer, role, folder) for role, folder in folders.items()]
    findings += [
        scores_as_trained(trainer, role, folder) for role, folder in folders.items() if role == "reward"
    ]
    findings.append(checkpointing_agrees(trainer, episodes))
    return findings, trainer.phases.metrics()


def one_minibatch(trainer: PPOTrainer, episodes: Episodes) -> list[Finding]:
    """Forward and backward of all episodes as one minibatch: the first ratio, and where gradients arrive."""
    shared = trainer.shared
    _clear(trainer)
    stats = trainer.accumulate(episodes, list(range(len(episodes))), float(episodes.learn.sum()), policy=True)
    ratio = (2 * float(stats["policy/approxkl_avg"])) ** 0.5
    learning = {id(p): p for role in trainer.roles for p in shared.parameters_of(role)}
    others = sum(p.grad is not None for p in shared.parameters() if id(p) not in learning)
    norms = {role: float(_flat(trainer, role).norm()) for role in trainer.roles}
    right = others == 0 and all(0 < norm < float("inf") for norm in norms.values())
    found = ", ".join(f"{role} {norm:.3g}" for role, norm in norms.items()) + f"; {others} other tensors"
    _clear(trainer)
    return [
        Finding(
            "the first ratio is 1",
            f"log-ratios are {ratio:.2g} on average",
            ratio <= tolerance(trainer.shared),
        ),
        Finding("gradients reach the learning roles and nothing else", f"norms: {found}", right),
    ]


def same_as_file(trainer: PPOTrainer, role: str, folder: str) -> Finding:
    """The role in memory is the adapter of the file, to the last bit, with its head where it has one."""
    in_file = load_file(f"{folder}/adapter_model.safetensors")
    stored = {HEAD if is_head(key) else key: tensor.float() for key, tensor in in_file.items()}
    mine = trainer.shared.tensors_of(role)
    different = sorted(mine.keys() ^ stored.keys()) or [
        k for k in mine if not torch.equal(mine[k], stored[k])
    ]
    found = (
        f"{len(mine)} tensors"
        if not different
        else f"{len(different)} tensors differ, {different[0]} for one"
    )
    return Finding(f"{role} is the adapter of its file", f"{found} ({folder})", not different)


@torch.no_grad()
def scores_as_trained(trainer: PPOTrainer, role: str, folder: str) -> Finding:
    """The reward scores its probes as it did at the end of its training, in units of its scores' deviation."""
    name, shared = f"{role} scores as when it was trained", trainer.shared
    stored = probes.read(folder)
    if not stored:
        return Finding(name, f"{folder} holds no {probes.FILE}: it was not trained by this pipeline", None)
    reward = next(r for r in trainer.rewards if r.name == role)
    apart = 0.0
    for ids, score in stored:
        batch = torch.tensor([ids], device=shared.device)
        found = shared.scores(role, batch, lengths=torch.tensor([len(ids)], device=shared.device))
        apart = max(apart, abs(float(found) - score) / reward.std)
    return Finding(
        name, f"{len(stored)} scores differ by up to {apart:.2g} deviations", apart <= tolerance(shared)
    )


def checkpointing_agrees(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Gradients with checkpointing are those without: a layer that runs again in backward finds its own adapter."""
    name, shared = "checkpointed gradients are the plain ones", trainer.shared
    if not shared.gradient_checkpointing:
        return Finding(name, "off (gradient_checkpointing: false)", None)
    shortest = [min(range(len(episodes)), key=lambda row: episodes.lengths()[row])]
    found: list[dict[str, Tensor]] = []
    for on in (True, False):
        shared.gradient_checkpointing = on
        _clear(trainer)
        trainer.accumulate(episodes, shortest, float(episodes.learn[shortest].sum()), policy=True)
        found.append({role: _flat(trainer, role).clone() for role in trainer.roles})
    shared.gradient_checkpointing = True
    _clear(trainer)
    apart = {
        role: float((found[0][role] - found[1][role]).norm() / found[1][role].norm().clamp(min=1e-30))
        for role in trainer.roles
    }
    limit = max(ROUNDING, tolerance(shared))
    return Finding(
        name,
        "relative difference: " + ", ".join(f"{role} {value:.2g}" for role, value in apart.items()),
        all(value <= limit for value in apart.values()),
    )


def render(findings: list[Finding], phases: Mapping[str, float], completions: int, asked: PPOConfig) -> str:
    """The findings as a table, and what an update of the job as `asked` for would take at the speed of these `completions`."""
    words = {True: "ok", False: "WRONG", None: "-"}
    width = max(len(finding.check) for finding in findings)
    lines = [f"   {words[f.holds]:<6} {f.check:<{width}}  {f.found}" for f in findings]
    seconds = {k.removeprefix("time/"): v for k, v in phases.items() if k.startswith("time/")}
    once = sum(v for k, v in seconds.items() if k != "update")
    update = (once + asked.num_ppo_epochs * seconds["update"]) * asked.batch_size / completions
    took = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    lines += [
        "",
        f"   {completions} completions took {took}; peak memory {phases['memory/peak']:.2f} GiB",
        f"   on one such worker an update of {asked.batch_size} completions, {asked.num_ppo_epochs} epochs, would take {update:.0f} s",
    ]
    return "\n".join(lines)


def _flat(trainer: PPOTrainer, role: str) -> Tensor:
    """All gradients of a role as one vector."""
    parameters = trainer.shared.parameters_of(role)
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def _clear(trainer: PPOTrainer) -> None:
    for role in trainer.roles:
        for parameter in trainer.shared.parameters_of(role):
            parameter.grad = None
