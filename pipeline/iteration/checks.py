"""Checks all steps before the first round begins: their settings, models, prompts and eval rows.

A round takes hours: mistakes in its last step are found before its first one starts.
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
from pipeline.runtime.preparation import check_models, tokenize


def models(plan: Plan, inputs: dict[str, dict[str, str]]) -> dict[str, Work]:
    """Returns {step: base, tokenizer and inputs} after checking the first rows of each step, without Ray.

    Args:
        inputs: of each step, pinned.

    Raises:
        InputError: with STEP.section.key.
    """
    from pipeline.data.read import plan_reading

    works = {}
    for step, job in plan.jobs.items():
        with of_step(step):
            registry.check_trackers(job)
            works[step] = work = check_models(job, inputs[step])
            room = room_for_prompts(work.job, work.base["context_length"])
            packing = bool(job.trainer.get("packing"))
            plan_reading(step, _there(plan, work.job).data, work.tokenizer, room, packing)
    return works


def rows(
    plan: Plan, works: dict[str, Work], choose: Callable[[int], Sequence[int]]
) -> dict[str, dict[str, str]]:
    """Returns {step: digests of existing rows, transforms and Python rewards}.

    Args:
        choose: from the number of prompts to the prompts that are used; raises InputError if there are too few.

    Raises:
        InputError: with STEP.section.key.
    """
    digests = {}
    with of_step("collect"):
        work, _, report = tokenize(works["collect"])
        digests["collect"] = work.digests
        prompts = report.splits["train"]
        choose(prompts.kept)
    _check_room(plan, works[plan.train], prompts.prompt_tokens.get("max", 0))
    with of_step(plan.train):
        digests[plan.train] = _held_out(plan, works[plan.train])
    with of_step("evaluate"):
        digests["evaluate"] = tokenize(works["evaluate"])[0].digests
    return digests


def _there(plan: Plan, job: Job) -> Job:
    """Returns the job without the rows that a round will collect."""
    return replace(job, data=replace(job.data, train=None)) if job.stage == plan.train else job


def _held_out(plan: Plan, work: Work) -> dict[str, str]:
    """Returns digests of the training step's eval rows and Python rewards."""
    from pipeline.data.read import prepare

    job = _there(plan, work.job)
    digests = digests_of_functions(job)
    if job.data.eval:
        room = room_for_prompts(job, work.base["context_length"])
        packing = bool(job.trainer.get("packing"))
        data = prepare(job.stage, job.data, work.tokenizer, room, str(job.data.cache_dir), packing)
        if STAGE[job.stage].scores:
            check_columns(job, {"eval": data.eval})
        digests |= data.digests
    return digests


def _check_room(plan: Plan, work: Work, longest: int) -> None:
    """Raises InputError if rows that may be collected are too long for training; `longest` are tokens of a prompt."""
    job, args = work.job, plan.jobs["collect"].args
    written = 0 if STAGE[job.stage].writes else args.response_length
    limit: Any = job.data.max_length or work.base["context_length"]
    if job.data.too_long != "error" or not limit or longest + written <= limit:
        return
    rows = f"prompts of up to {longest} tokens"
    if written:
        rows += f" and completions of up to {written} (collect.trainer.response_length)"
    raise InputError(
        f"rows of more than {limit} tokens may be collected, of {rows}; set {plan.train}.data.max_length={longest + written}, "
        f"or {plan.train}.data.too_long=drop",
        key=f"{plan.train}.data.max_length",
    )
