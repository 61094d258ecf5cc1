"""What can be known of all steps before the first round begins: their settings, models, prompts and held-out rows.

A round takes hours, and what its last step would refuse is refused before its first one has started.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipeline import registry
from pipeline.config import Job
from pipeline.config.stages import STAGE
from pipeline.errors import InputError
from pipeline.iteration.plan import Plan, of_step
from pipeline.runtime.host import Work
from pipeline.runtime.inputs import check_columns, digests_of_functions, room_for_prompts
from pipeline.runtime.preparation import check_models, tokenise


def models(plan: Plan, inputs: dict[str, dict[str, str]]) -> dict[str, Work]:
    """{step: its base, tokenizer and inputs}, and a look at the first of its rows; without Ray.

    Args:
        inputs: of each step, pinned.

    Raises:
        InputError: naming STEP.section.key.
    """
    from pipeline.data.read import plan_reading

    works = {}
    for step, job in plan.jobs.items():
        with of_step(step):
            registry.check_trackers(job)
            works[step] = work = check_models(job, inputs[step])
            room = room_for_prompts(work.job, work.base["context_length"])
            plan_reading(step, _there(plan, work.job).data, work.tokenizer, room, _packs(job))
    return works


def rows(
    plan: Plan, works: dict[str, Work], choose: Callable[[int], Sequence[int]]
) -> dict[str, dict[str, str]]:
    """{step: digests of its rows, transforms and Python rewards} of the rows that are there already; with Ray.

    Args:
        choose: which prompts are used, of so many; it refuses too few.

    Raises:
        InputError: naming STEP.section.key.
    """
    digests = {}
    with of_step("collect"):
        work, _, report = tokenise(works["collect"])
        digests["collect"] = work.digests
        prompts = report.splits["train"]
        choose(prompts.kept)
    _check_room(plan, works[plan.train], prompts.prompt_tokens.get("max", 0))
    with of_step(plan.train):
        digests[plan.train] = _held_out(plan, works[plan.train])
    with of_step("evaluate"):
        digests["evaluate"] = tokenise(works["evaluate"])[0].digests
    return digests


def _there(plan: Plan, job: Job) -> Job:
    """The job without the rows that a round will collect."""
    return replace(job, data=replace(job.data, train=None)) if job.stage == plan.train else job


def _packs(job: Job) -> bool:
    return bool(job.trainer.get("packing"))


def _held_out(plan: Plan, work: Work) -> dict[str, str]:
    """Digests of the rows that training is evaluated on, and of its Python rewards."""
    from pipeline.data.read import prepare

    job = _there(plan, work.job)
    digests = digests_of_functions(job)
    if job.data.eval:
        room = room_for_prompts(job, work.base["context_length"])
        data = prepare(job.stage, job.data, work.tokenizer, room, str(job.data.cache_dir), _packs(job))
        if STAGE[job.stage].scores:
            check_columns(job, {"eval": data.eval})
        digests |= data.digests
    return digests


def _check_room(plan: Plan, work: Work, longest: int) -> None:
    """Refuses training that would refuse, as too long, what may be collected.

    Args:
        longest: tokens of a prompt.
    """
    job, args = work.job, plan.jobs["collect"].args
    written = 0 if STAGE[job.stage].writes else args.response_length
    limit: Any = job.data.max_length or work.base["context_length"]
    if job.data.too_long != "error" or not limit or longest + written <= limit:
        return
    rows = f"prompts of up to {longest} tokens"
    if written:
        rows += f" and completions of up to {written} (collect.trainer.response_length)"
    raise InputError(
        f"rows of more than {limit} tokens may be collected, of {rows}; type {plan.train}.data.max_length={longest + written}, "
        f"or {plan.train}.data.too_long=drop",
        key=f"{plan.train}.data.max_length",
    )
