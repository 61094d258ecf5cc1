"""Decides whether workers recompute activations in backward if the job sets no gradient_checkpointing: only if they do not fit.

Recomputing is about a quarter slower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.config import Job, schema
from pipeline.config.stages import STAGE
from pipeline.planning.plan import GIB, Loras, make
from pipeline.references import Ref
from pipeline.registry import lineage

# Share of the memory: plans are within 15 % of measured peaks on a CPU; no GPU has been measured.
MAX_FILL = 0.9


def is_needed(job: Job, memory: float, loras: Loras | None = None) -> tuple[bool, str]:
    """Returns (whether to recompute, why) for a worker with `memory` free bytes, before anything is loaded."""
    plain = replace(job, trainer={**job.trainer, "gradient_checkpointing": False})
    peak = make(plain, loras).peak
    needed = peak > MAX_FILL * memory
    fit = "do not fit" if needed else "fit"
    return needed, (
        f"activations are {'recomputed' if needed else 'kept'} (gradient_checkpointing: null): all layers' {fit}, with a peak of "
        f"{peak / GIB:.1f} GiB and {memory / GIB:.1f} GiB free"
    )


def settled(worker: Any) -> bool:
    """Returns whether the workers of a job recompute: as the job sets it, or for null by the plan.

    The same on all ranks; rank 0 prints why. Call it before the base is loaded.
    """
    import torch

    from pipeline.inference.memory import free_bytes

    default = schema.keys(STAGE[worker.job.stage].trainer)["gradient_checkpointing"].get("default")
    given = worker.job.trainer.get("gradient_checkpointing", default)
    if given is not None:
        return bool(given)
    models = [name for name, at in worker.work.inputs.items() if not Ref.parse(at).is_function]
    folders = {name.split(".")[0]: worker.input(name) for name in models}
    loras = {name: lineage.adapter_config(at) for name, at in folders.items() if lineage.is_adapter(at)}
    found = worker.gather(is_needed(worker.job, free_bytes(torch.device(worker.device)), loras))
    needed, why = max(found)  # of the worker with the least memory
    if worker.rank == 0:
        print(why, flush=True)
    return needed
