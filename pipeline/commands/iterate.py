"""Runs rounds of collect, training, evaluate and gate, for online DPO or rejection sampling.

    make iterate    or    python -m pipeline iterate jobs/demo/iterate.yaml [iterate.rounds=5] [STEP.section.key=value ...]

Each step is an ordinary run in the iteration's folder (round-1-collect, round-1-dpo, round-1-evaluate, ...), in MLflow under one
parent run. Round r collects completions of the version that round r - 1 registered. The same command continues an iteration
that was killed, in the step that was cut short, and ends with the same adapters.
"""

import importlib
from dataclasses import replace
from typing import Any

from pipeline import registry, report
from pipeline.commands import collect
from pipeline.config import Job, libraries
from pipeline.config.stages import STAGE
from pipeline.errors import Failure, InputError
from pipeline.iteration import plan as plans
from pipeline.iteration import table
from pipeline.iteration.plan import Plan
from pipeline.on_ray.placement import check_scaling
from pipeline.on_ray.session import session
from pipeline.references import Ref
from pipeline.runtime import resume
from pipeline.runtime.host import Work
from pipeline.runtime.inputs import (
    by_version,
    check_columns,
    check_paths,
    pin_inputs,
    room_for_prompts,
)
from pipeline.runtime.preparation import check_models, ray_for_rows, tokenize
from pipeline.system import console, storage


def run(path: str, overrides: list[str]) -> dict[str, Any]:
    """Runs an iteration. Returns the content of iterate.json. Nothing has started if one of its jobs is wrong."""
    plan = _in_one_home(plans.read(path, overrides))
    resume.check_folder(plan.folder, "an iteration", "iterate")
    seen = resume.state(plan.folder)
    left = recorded(plan)
    if left.get("ended") and (not left["goes_on"] or len(left["rounds"]) >= plan.settings.rounds):
        print(f"iteration {plan.name} has ended ({plan.folder}); run.fresh=true starts it over")
        if plan.report and not storage.exists(storage.join(plan.folder, report.PAGE)):
            draw(plan, left["rounds"])  # the drawing may have been interrupted
        print(closing(plan, left), flush=True)
        return left
    for step, job in plan.jobs.items():
        # The rows of a round do not exist yet.
        rows = plan.jobs["collect"].data.train if step == plan.train else job.data.train
        with plans.of_step(step):
            check_paths(replace(job, data=replace(job.data, train=rows)))
            check_scaling(job)
    print(f"\n== iterate  {plan.train}  {plan.name}  {path}", flush=True)
    with console.waiting("opening MLflow"):
        registry.check(plan.jobs[plan.train])
    essence = plan.essence()  # with the aliases that the job names
    plan, inputs = pinned(plan, left)
    first = plan.jobs[plan.train]
    with libraries.asked(*plan.jobs.values()) as check_libraries:
        with console.waiting("checking the models"):
            works = check_steps(plan, inputs)
        with session(first):
            print("reading the rows of all steps", flush=True)
            check_rows(plan, works)
            check_libraries()
            with resume.locked(plan.folder, seen, plan.fresh):
                summary = through(plan, left, {"plan": essence, "pinned": inputs})
    print(closing(plan, summary), flush=True)
    return summary


def _in_one_home(plan: Plan) -> Plan:
    """Returns the plan with jobs that use the registry and the cache of rows of the iteration's storage path."""
    home = storage.absolute(plan.storage_path)

    def at_home(job: Job) -> Job:
        uri, cache = registry.tracking_uri(job), job.data.cache_dir or storage.join(home, "data")
        return replace(
            job,
            run=replace(job.run, storage_path=home),
            data=replace(job.data, cache_dir=cache),
            mlflow=replace(job.mlflow, tracking_uri=uri),
        )

    return replace(plan, storage_path=home, jobs={step: at_home(job) for step, job in plan.jobs.items()})


def recorded(plan: Plan) -> dict[str, Any]:
    """Returns iterate.json of an earlier driver, or {}. Raises InputError if the folder's iteration is of other jobs."""
    path = storage.join(plan.folder, table.FILE)
    if plan.fresh or not storage.exists(path):
        return {}
    left = table.read(path)
    # Keys of a step that no round has completed may be edited.
    unused = plan.jobs.keys() - plans.used(plan)
    changed = [
        key for key in plans.changed(left["plan"], plan.essence()) if key.partition(".")[0] not in unused
    ]
    if changed:
        raise InputError(
            f"{plan.name!r} is an iteration of other jobs: {', '.join(changed[:5])}"
            f"{f' and {len(changed) - 5} more' if len(changed) > 5 else ''} changed since it began; restore them, choose "
            "another name, or set run.fresh=true",
            key="run.name",
        )
    return left


def pinned(plan: Plan, left: dict[str, Any]) -> tuple[Plan, dict[str, dict[str, str]]]:
    """Returns the plan with jobs that name versions by number, and {step: these versions}.

    Inputs that a step names the same way as in `left`, an earlier iterate.json, keep their versions.
    """
    jobs, inputs = {}, {}
    for step, job in plan.jobs.items():
        known = {}
        if before := left.get("pinned", {}).get(step):
            known = resume.pinned_inputs(left["plan"]["jobs"][step] | {"begun_with": {"inputs": before}}, job)
        with plans.of_step(step):
            job, inputs[step] = pin_inputs(job, known)
        jobs[step] = by_version(job, inputs[step])
    return replace(plan, policy=inputs["collect"].get("policy", "base"), jobs=jobs), inputs


# ------------------------------------------------------------------------------------- checks of all steps


def check_steps(plan: Plan, inputs: dict[str, dict[str, str]]) -> dict[str, Work]:
    """Checks the models and the first rows of all steps before the first round: a round takes hours.

    Returns:
        {step: base, tokenizer and pinned inputs}

    Raises:
        InputError: with STEP.section.key.
    """
    from pipeline.data.read import plan_reading

    works = {}
    for step, job in plan.jobs.items():
        with plans.of_step(step):
            registry.check_trackers(job)
            works[step] = work = check_models(job, inputs[step])
            room = room_for_prompts(work.job, work.base["context_length"])
            packing = bool(job.trainer.get("packing"))
            plan_reading(step, _there(plan, work.job).data, work.tokenizer, room, packing)
    return works


def check_rows(plan: Plan, works: dict[str, Work]) -> None:
    """Reads the rows of all steps that exist before the first round. Raises InputError with STEP.section.key."""
    from pipeline.data.read import prepare

    job = plan.jobs["collect"]
    with plans.of_step("collect"):
        prompts = tokenize(works["collect"])[2].splits["train"]
        collect.choose(job.args, job.data.seed, prompts.kept)  # InputError if there are too few
    _check_room(plan, works[plan.train], prompts.prompt_tokens.get("max", 0))
    with plans.of_step(plan.train):
        work = works[plan.train]
        job = _there(plan, work.job)
        if job.data.eval:
            room = room_for_prompts(job, work.base["context_length"])
            packing = bool(job.trainer.get("packing"))
            cache, start_ray = str(job.data.cache_dir), ray_for_rows(job)
            data = prepare(job.stage, job.data, work.tokenizer, room, cache, packing, start_ray)
            if STAGE[job.stage].scores:
                check_columns(job, {"eval": data.eval})
    with plans.of_step("evaluate"):
        tokenize(works["evaluate"])


def _there(plan: Plan, job: Job) -> Job:
    """Returns the job without the rows that a round will collect."""
    return replace(job, data=replace(job.data, train=None)) if job.stage == plan.train else job


def _check_room(plan: Plan, work: Work, longest: int) -> None:
    """Raises InputError if rows that may be collected are too long for training; the longest prompt has `longest` tokens."""
    job, args = work.job, plan.jobs["collect"].args
    written = 0 if STAGE[job.stage].writes else args.response_length
    limit: Any = job.data.max_length or work.base["context_length"]
    if job.data.too_long != "error" or not limit or longest + written <= limit:
        return
    rows = f"prompts of up to {longest} tokens"
    if written:
        rows += f" and completions of up to {written} (collect.trainer.response_length)"
    raise InputError(
        f"collected rows may have more than {limit} tokens: {rows}; set {plan.train}.data.max_length={longest + written}, "
        f"or {plan.train}.data.too_long=drop",
        key=f"{plan.train}.data.max_length",
    )


# --------------------------------------------------------------------------------------------- the rounds


def through(plan: Plan, left: dict[str, Any], begun_with: dict[str, Any]) -> dict[str, Any]:
    """Runs the rounds that are left. Returns the content of iterate.json, which is written after every round."""
    trained = plan.jobs[plan.train]
    itself = replace(trained, run=replace(trained.run, name=plan.name, storage_path=plan.storage_path))
    uri, path = registry.tracking_uri(itself), storage.join(plan.folder, table.FILE)
    rounds: list[dict[str, Any]] = list(left.get("rounds", []))
    with registry.mlflow_run(itself, {}, new_run=not left) as run_id, registry.nested_under(run_id):
        summary: dict[str, Any] = {
            "stage": "iterate",
            "name": plan.name,
            "folder": plan.folder,
            **begun_with,
            "rounds": rounds,
            "goes_on": not rounds or goes_on(plan, rounds[-1]),
            "ended": False,
            "version": newest(plan, rounds),
            "tracking_uri": uri,
            "mlflow_run_id": run_id,
        }
        storage.write_json(path, summary)
        while summary["goes_on"] and len(rounds) < plan.settings.rounds:
            rounds.append(one_round(plan, len(rounds) + 1, newest(plan, rounds)))
            registry.log_figures(uri, run_id, rounds[-1], step=len(rounds))
            summary |= {"goes_on": goes_on(plan, rounds[-1]), "version": newest(plan, rounds)}
            storage.write_json(path, summary)
        summary["ended"] = True
        storage.write_json(path, summary)
        if plan.report:
            draw(plan, rounds)
    return summary


def draw(plan: Plan, rounds: list[dict[str, Any]]) -> None:
    with console.waiting("drawing the report"):
        report.of_several(table.drawn(rounds), plan.folder, [list(table.HEADER), *table.cells(rounds)])


def newest(plan: Plan, rounds: list[dict[str, Any]]) -> str:
    """Returns the version of the last round that passed its gate, or the policy of the job if none has."""
    return next((one["version"] for one in reversed(rounds) if one["passed"]), plan.policy)


def goes_on(plan: Plan, last: dict[str, Any]) -> bool:
    """Returns True if a round may follow this one."""
    return bool(last["passed"]) or plan.settings.on_failed_gate == "discard"


def one_round(plan: Plan, number: int, policy: str) -> dict[str, Any]:
    """Collects with `policy`, trains on the rows and evaluates the result. Returns the row of the table.

    A step that an earlier driver has finished is not repeated.

    Raises:
        Failure: if nothing was collected.
    """
    with plans.of_step("collect"):
        collected = collect.run(plans.job_of_round(plan, number, "collect", policy))
    if not collected["counts"]["rows"]:
        raise Failure(
            f"round {number} has no rows to learn from; {collected['folder']} has what was collected"
        )
    with plans.of_step(plan.train):
        trained = _stage(plan.train).run(plans.job_of_round(plan, number, plan.train, policy))
    version = str(Ref(trained["registered_model"], version=trained["version"]))
    with plans.of_step("evaluate"):
        evaluated = _stage("evaluate").run(plans.job_of_round(plan, number, "evaluate", policy, version))
    return table.row(number, collected, trained, evaluated)


def _stage(name: str) -> Any:
    return importlib.import_module(f"pipeline.stages.{name}")


def closing(plan: Plan, summary: dict[str, Any]) -> str:
    """Returns the summary that an iteration prints at its end."""
    rounds = summary["rounds"]
    lines = ["", table.text(rounds)]
    if not summary["goes_on"]:
        lines.append(
            f"   ended after round {len(rounds)}, whose gate {rounds[-1]['gate']} (iterate.on_failed_gate=stop)"
        )
    lines.append(f"   the policy now: {summary['version']}")
    pages = " report.html," if storage.exists(storage.join(plan.folder, report.PAGE)) else ""
    lines.append(f"   {plan.folder}/{table.FILE},{pages} a folder for each run of a round")
    return "\n".join(lines)
