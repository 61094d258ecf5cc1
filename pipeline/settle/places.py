"""Decides whether a job runs in this process or in Ray workers, and which resources each worker requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.job import Job
from pipeline.job.rules import batch_problems
from pipeline.settle.placement import ACCELERATOR_TYPE, Bundle, Group, Places, on_cluster

CLUSTER_ONLY = ("accelerator_type", "label_selector", "placement_strategy")  # keys that select nodes


def places_of(job: Job, note: bool = False, elsewhere: bool = False) -> Places:
    """Returns the Places object of a job. Ignores keys that select nodes if the job runs on one machine.

    Args:
        note: whether to print which keys are ignored.
        elsewhere: whether the job will run on a cluster that this process is not part of.
    """
    ignored = () if elsewhere or on_cluster() else CLUSTER_ONLY
    sections = {"scaling": job.scaling, "rollout": job.rollout}
    dropped = [f"{name}.{key}" for name, keys in sections.items() for key in ignored if keys.get(key)]
    scaling, rollout = (
        {key: value for key, value in keys.items() if key not in ignored} for keys in sections.values()
    )
    if dropped and note:
        print(f"note: ignoring {', '.join(dropped)}: this is one machine, not a cluster", flush=True)
    (fewest, most), selector = job.workers, scaling.get("label_selector") or {}
    amounts = _amounts_of(scaling, 1)
    if kind := scaling.get("accelerator_type"):
        amounts.setdefault(f"{ACCELERATOR_TYPE}{kind}", 0.001)

    def divides_batch(count: int) -> bool:
        return not any(batch_problems(job.data.batch_size, job.trainer, job.spec, (count, count)))

    config, on_gpu = job.rollout_config, bool(scaling.get("use_gpu"))
    rollout_on_gpu = on_gpu if config.use_gpu is None else config.use_gpu
    section = {"resources_per_worker": config.resources_per_worker, "use_gpu": rollout_on_gpu}
    each = Bundle(_amounts_of(section, config.tensor_parallel_size), rollout.get("label_selector") or {})
    rollout_workers = Group("rollout", "rollout worker", config.num_workers, config.num_workers, each)
    return Places(
        in_process=job.in_process,
        workers=Group("scaling", "worker", fewest, most, Bundle(amounts, selector)),
        rollout=rollout_workers if config.num_workers else None,
        on_gpu=on_gpu,
        rollout_on_gpu=rollout_on_gpu,
        scaling=scaling,
        smaller=[count for count in range(fewest - 1, 0, -1) if divides_batch(count)],
        timeout_s=job.run.placement_timeout_s,
    )


def _amounts_of(section: Mapping[str, Any], gpus: int) -> dict[str, float]:
    """Returns {resource: amount} for one worker. If the section sets use_gpu but no number of GPUs, a worker gets `gpus` GPUs."""
    gpu = {"GPU": float(gpus)} if section.get("use_gpu") else {}
    needs = section.get("resources_per_worker") or gpu or {"CPU": 1}
    return {**{name: amount for name, amount in needs.items() if amount}, **({} if needs.get("GPU") else gpu)}
