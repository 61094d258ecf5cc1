"""The precision of a run's matrix products on a CPU: of fp32, chosen once, alike in all its workers, kept when it goes on.

`float32_matmul.json` in the run's folder holds the choice, for all later attempts: one on another processor might choose
otherwise, and a run that is resumed would end with other bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pipeline.config import Job
from pipeline.errors import InputError
from pipeline.runtime import earlier
from pipeline.system import storage

FILE = "float32_matmul.json"


def settle(
    job: Job,
    rank: int = 0,
    gather: Callable[[Any], list[Any]] = lambda mine: [mine],
    error: Callable[[], float] | None = None,
    bf16_speedup: Callable[[], float] | None = None,
) -> None:
    """Sets the precision of fp32 products in this worker as the run began, or as is exact for all its workers; rank 0 says it.

    Actors of Ray Data have no ranks: each is rank 0 of its own, and the first one's choice is what the others find. A job
    for GPUs is left as it is, which is said: "medium" is TF32 or less there.

    Args:
        gather: what each rank has, on every rank.
        error: models.matmul.medium_error, which is the default.
        bf16_speedup: models.matmul.bf16_speedup, which is the default.

    Raises:
        InputError: for a job in bfloat16 on a processor that is slower in it than in fp32. One that has begun goes on.
    """
    import torch

    if job.scaling.get("use_gpu"):
        if rank == 0:
            precision = torch.get_float32_matmul_precision()
            tf32 = "without TF32" if precision == "highest" else "with TF32 or less"
            print(f'fp32 products at precision "{precision}", on a GPU {tf32}', flush=True)
        return

    from pipeline.models import matmul

    path = storage.join(job.folder, FILE)
    begun_with = None
    if rank == 0 and storage.exists(path):
        begun_with = earlier.read_object(path, {"precision": str})["precision"]
    in_bf16 = (bf16_speedup or matmul.bf16_speedup)() if job.bf16 else math.inf
    found = gather((begun_with, (error or matmul.medium_error)(), in_bf16))
    begun_with = found[0][0]
    errors = [one for _, one, _ in found]
    if (slowest := min(speedup for *_, speedup in found)) < 1.0:
        slow = f"this processor has no products in bfloat16, and imitates them in {1 / slowest:.1f}x the time of float32"
        if begun_with is None:
            raise InputError(f"{slow}; type trainer.bf16=false", key="trainer.bf16")
        if rank == 0:
            print(f"warning: {slow}; a run with trainer.bf16=false would be faster", flush=True)
    precision, why = matmul.decide(errors, begun_with)
    torch.set_float32_matmul_precision(precision)
    if rank == 0:
        print(why, flush=True)
        if precision != begun_with:
            storage.write_json(path, {"precision": precision, "errors_of_medium": errors})
