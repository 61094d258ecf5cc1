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
from pipeline.config import libraries
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
from pipeline.runtime.inputs import by_version, check_paths, pin_inputs, room_for_prompts
from pipeline.runtime.preparation import check_models, tokenize
from pipeline.system import console, storage


def run(path: str, overrides: list[str]) -> dict[str, Any]:
    """Runs an iteration. Returns the content of iterate.json. Nothing has started if one of its jobs is wrong."""
    plan = _in_one_home(plans.read(path, overrides))
    seen = resume.check_folder(plan.folder, "an iteration", "iterate")
    left = recorded(plan)
    if left.get("ended") and (not left["goes_on"] or len(left["rounds"]) >= plan.settings.rounds):
        print(f"iteration {plan.run.name} has ended ({plan.folder}); run.fresh=true starts it over")
        if plan.run.report and not storage.exists(storage.join(plan.folder, report.PAGE)):
            draw(plan, left["rounds"])  # the drawing may have been interrupted
        print(closing(plan, left), flush=True)
        return left
    for step, job in plan.jobs.items():
        # The rows of a round do not exist yet.
        rows = plan.jobs["collect"].data.train if step == plan.train else job.data.train
        with plans.of_step(step):
            check_paths(replace(job, data=replace(job.data, train=rows)))
            check_scaling(job)
    print(f"\n== iterate  {plan.train}  {plan.run.name}  {path}", flush=True)
    with console.waiting("opening MLflow"):
        registry.check(plan.jobs[plan.train])
    essence = plan.essence()  # with the aliases that the job names
    plan, inputs = pinned(plan, left)
    with libraries.asked(*plan.jobs.values()) as check_libraries:
        with console.waiting("checking the models"):
            works = check_steps(plan, inputs)
        with session(plan.jobs[plan.train]):
            print("reading the rows of all steps", flush=True)
            check_rows(plan, works)
            check_libraries()
            with resume.locked(plan.folder, seen, plan.run.fresh):
                summary = through(plan, left, {"plan": essence, "pinned": inputs})
    print(closing(plan, summary), flush=True)
    return summary


def _in_one_home(plan: Plan) -> Plan:
    """Returns the plan with jobs that use the registry and the cache of rows of the iteration's storage path."""
    home, jobs = storage.absolute(plan.run.storage_path), {}
    for step, job in plan.jobs.items():
        cache = job.data.cache_dir or storage.join(home, "data")
        jobs[step] = replace(
            job,
            run=replace(job.run, storage_path=home),
            data=replace(job.data, cache_dir=cache),
            mlflow=replace(job.mlflow, tracking_uri=registry.tracking_uri(job)),
        )
    return replace(plan, run=replace(plan.run, storage_path=home), jobs=jobs)


def recorded(plan: Plan) -> dict[str, Any]:
    """Returns iterate.json of an earlier driver, or {}. Raises InputError if the folder's iteration is of other jobs."""
    left = resume.left_in(plan.folder, table.FILE, plan.run.fresh, *table.KEYS)
    if not left:
        return {}
    # Keys of a step that no round has completed may be edited.
    unused = plan.jobs.keys() - plans.used(plan)
    changed = plans.changed(left["plan"], plan.essence())
    if changed := [key for key in changed if key.partition(".")[0] not in unused]:
        raise InputError(
            f"{plan.run.name!r} is an iteration of other jobs: {', '.join(changed[:5])}{', ...' * (len(changed) > 5)} changed since "
            "it began; restore them, choose another name, or set run.fresh=true",
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

    Returns {step: base, tokenizer and pinned inputs}; the job that trains is without the rows that a round will collect.
    """
    from pipeline.data.read import plan_reading

    works = {}
    for step, job in plan.jobs.items():
        with plans.of_step(step):
            registry.check_trackers(job)
            work = check_models(job, inputs[step])
            if step == plan.train:
                work = replace(work, job=replace(work.job, data=replace(work.job.data, train=None)))
            room = room_for_prompts(work.job, work.base["context_length"])
            plan_reading(step, work.job.data, work.tokenizer, room, bool(job.trainer.get("packing")))
            works[step] = work
    return works


def check_rows(plan: Plan, works: dict[str, Work]) -> None:
    """Reads the rows of all steps that exist before the first round. Raises InputError with STEP.section.key."""
    job, trained = plan.jobs["collect"], works[plan.train]
    with plans.of_step("collect"):
        prompts = tokenize(works["collect"])[2].splits["train"]
        collect.choose(job.args, job.data.seed, prompts.kept)  # InputError if there are too few
    _check_room(plan, trained, prompts.prompt_tokens.get("max", 0))
    with plans.of_step(plan.train):
        if trained.job.data.eval:
            tokenize(trained)
    with plans.of_step("evaluate"):
        tokenize(works["evaluate"])


def _check_room(plan: Plan, work: Work, longest: int) -> None:
    """Raises InputError if rows that may be collected are too long for training; the longest prompt has `longest` tokens."""
    job, args = work.job, plan.jobs["collect"].args
    tokens = longest + (0 if STAGE[job.stage].writes else args.response_length)
    limit: Any = job.data.max_length or work.base["context_length"]
    if job.data.too_long == "error" and limit and tokens > limit:
        raise InputError(
            f"collected rows may have {tokens} tokens, more than {limit}: the longest prompt has {longest}, and a completion up "
            f"to collect.trainer.response_length={args.response_length}; set {plan.train}.data.max_length={tokens}, or "
            f"{plan.train}.data.too_long=drop",
            key=f"{plan.train}.data.max_length",
        )


# --------------------------------------------------------------------------------------------- the rounds


def through(plan: Plan, left: dict[str, Any], begun_with: dict[str, Any]) -> dict[str, Any]:
    """Runs the rounds that are left. Returns the content of iterate.json, which is written after every round."""
    trained = plan.jobs[plan.train]
    itself = replace(trained, run=plan.run)
    uri, path = registry.tracking_uri(itself), storage.join(plan.folder, table.FILE)
    rounds: list[dict[str, Any]] = list(left.get("rounds", []))

    def keep(ended: bool = False) -> dict[str, Any]:
        summary = {
            "stage": "iterate",
            "name": plan.run.name,
            "folder": plan.folder,
            **begun_with,
            "rounds": rounds,
            "goes_on": not rounds or goes_on(plan, rounds[-1]),
            "ended": ended,
            "version": newest(plan, rounds),
            "tracking_uri": uri,
            "mlflow_run_id": run_id,
        }
        storage.write_json(path, summary)
        return summary

    with registry.mlflow_run(itself, {}, new_run=not left) as run_id, registry.nested_under(run_id):
        while keep()["goes_on"] and len(rounds) < plan.settings.rounds:
            rounds.append(one_round(plan, len(rounds) + 1, newest(plan, rounds)))
            registry.log_figures(uri, run_id, rounds[-1], step=len(rounds))
        summary = keep(ended=True)
        if plan.run.report:
            draw(plan, rounds)
    return summary


def draw(plan: Plan, rounds: list[dict[str, Any]]) -> None:
    with console.waiting("drawing the report"):
        report.of_several(table.drawn(rounds), plan.folder, table.cells(rounds))


def newest(plan: Plan, rounds: list[dict[str, Any]]) -> str:
    """Returns the version of the last round that passed its gate, or the policy of the job if none has."""
    return next((one["version"] for one in reversed(rounds) if one["passed"]), plan.policy)


def goes_on(plan: Plan, last: dict[str, Any]) -> bool:
    """Returns True if a round may follow this one."""
    return bool(last["passed"]) or plan.settings.on_failed_gate == "discard"


def one_round(plan: Plan, number: int, policy: str) -> dict[str, Any]:
    """Collects with `policy`, trains on the rows and evaluates the result. Returns the row of the table.

    A step that an earlier driver has finished is not repeated. Raises Failure if nothing was collected.
    """

    def run_step(step: str, version: str | None = None) -> dict[str, Any]:
        folder = "commands" if step == "collect" else "stages"
        with plans.of_step(step):
            job = plans.job_of_round(plan, number, step, policy, version)
            return importlib.import_module(f"pipeline.{folder}.{step}").run(job)  # type: ignore[no-any-return]

    collected = run_step("collect")
    if not collected["counts"]["rows"]:
        raise Failure(
            f"round {number} has no rows to learn from; {collected['folder']} has what was collected"
        )
    trained = run_step(plan.train)
    evaluated = run_step("evaluate", str(Ref(trained["registered_model"], version=trained["version"])))
    return table.row(number, collected, trained, evaluated)


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
