"""The `scaling` section: how many workers, and what each of them asks Ray for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.config.jobfile import Tree
from pipeline.config.stages import STAGE
from pipeline.errors import short, show
from pipeline.intervals import outside

if TYPE_CHECKING:
    from pipeline.config import Job

# Ray counts in steps of 0.0001, GPUs above 1 in whole ones, and memory in bytes.
AMOUNTS = {"GPU": "0 or [0.0001, 1] or whole [1, 1000]", "memory": "0 or [1048576, 1000000000000000]"}
ANY = "0 or [0.0001, 1000000]"


def check(tree: Tree, job: Job) -> None:
    """Refuses what Ray could not count: it fails in its own process, or waits for ever."""
    _check_amounts(tree, "scaling", job.scaling)
    _check_amounts(tree, "rollout", {"use_gpu": job.scaling.get("use_gpu"), **job.rollout})
    selectors = job.scaling.get("label_selector")
    if isinstance(selectors, list) and STAGE[job.stage].runs_in == "data":
        raise tree.error("scaling.label_selector", "found a list, expected one mapping, for all actors")
    for selector in selectors if isinstance(selectors, list) else [selectors or {}]:
        _check_labels(tree, "scaling", selector)
    _check_labels(tree, "rollout", job.rollout.get("label_selector") or {})
    if isinstance(selectors, list) and len(selectors) != job.workers[1]:
        raise tree.error(
            "scaling.label_selector",
            f"found {len(selectors)}, expected one for all workers, or one for each of {job.workers[1]}",
        )


def _check_amounts(tree: Tree, section: str, given: dict[str, Any]) -> None:
    """What one worker of a section, `scaling` or `rollout`, asks for."""
    each, use_gpu = given.get("resources_per_worker"), given.get("use_gpu")
    for name, amount in (each or {}).items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if problem := outside(amount, AMOUNTS.get(name, ANY)) if number else "a number":
            raise tree.error(
                f"{section}.resources_per_worker.{short(name)}", f"found {show(amount)}, expected {problem}"
            )
    if each is not None and not any(each.values()) and not (use_gpu and "GPU" not in each):
        raise tree.error(
            f"{section}.resources_per_worker", f"found {show(each)}, expected at least one of them above 0"
        )
    if each and each.get("GPU") and not use_gpu:
        raise tree.error(
            f"{section}.resources_per_worker.GPU",
            f"found {show(each['GPU'])} without {section}.use_gpu=true; set it, or remove this key",
        )
    if use_gpu and each and each.get("GPU", 1) == 0:
        raise tree.error(
            f"{section}.resources_per_worker.GPU", f"found 0 with {section}.use_gpu=true; take it out"
        )


def _check_labels(tree: Tree, section: str, selector: dict[str, Any]) -> None:
    for key, value in selector.items():
        if " " in str(value):  # Ray (2.60) takes it as part of the name, and then waits for ever
            raise tree.error(
                f"{section}.label_selector.{short(key)}",
                f"found {show(value)}, expected {str(value).replace(' ', '')}",
            )


def worker_range(tree: Tree, job: Job) -> tuple[int, int]:
    """(fewest, most) workers of a job whose numbers make sense."""
    low, high = job.workers
    if not 1 <= low <= high <= 10_000:
        raise tree.error(
            "scaling.num_workers",
            f"found {show(job.scaling['num_workers'])}, expected 0 (in this process), at least 1, or [min, max] with 1 <= min <= max <= 10000",
        )
    return low, high
