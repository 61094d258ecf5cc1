"""Whether a worker recomputes activations in backward, where the job leaves that open: only if they do not fit.

`trainer.gradient_checkpointing: null`. To recompute is about a quarter slower; memory is free or it is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.config import Job, schema
from pipeline.config.stages import STAGE
from pipeline.planning.plan import GIB, Loras, make
from pipeline.references import Ref
from pipeline.registry import lineage

# Of the memory: a plan is within 15 % of measured peaks on a CPU, and no GPU has been measured yet.
SHARE = 0.9


def is_needed(job: Job, memory: float, loras: Loras | None = None) -> tuple[bool, str]:
    """(whether to recompute, why) for a worker of a job with so many free bytes, before anything is loaded."""
    plain = replace(job, trainer={**job.trainer, "gradient_checkpointing": False})
    peak = make(plain, loras).peak
    needed = peak > SHARE * memory
    fit = "do not fit" if needed else "fit"
    return needed, (
        f"activations are {'recomputed' if needed else 'kept'} (gradient_checkpointing: null): all layers' {fit}, with a peak of "
        f"{peak / GIB:.1f} GiB and {memory / GIB:.1f} GiB free"
    )


def settled(worker: Any) -> bool:
    """Whether the workers of a job recompute: as it says, or as the plan says where it says null.

    The same on all ranks; rank 0 says why. To be called before the base is loaded.
    """
    import torch

    from pipeline.inference.memory import free_bytes

    said = schema.keys(STAGE[worker.job.stage].trainer)["gradient_checkpointing"].get("default")
    said = worker.job.trainer.get("gradient_checkpointing", said)
    if said is not None:
        return bool(said)
    models = [name for name, at in worker.work.inputs.items() if not Ref.parse(at).is_function]
    folders = {name.split(".")[0]: worker.input(name) for name in models}
    loras = {name: lineage.adapter_config(at) for name, at in folders.items() if lineage.is_adapter(at)}
    found = worker.gather(is_needed(worker.job, free_bytes(torch.device(worker.device)), loras))
    needed, why = max(found)  # of the worker with the least room
    if worker.rank == 0:
        print(why, flush=True)
    return needed
