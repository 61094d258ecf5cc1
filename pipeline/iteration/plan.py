"""The plan of an iteration: from its job file to a job for each step of a round.

    plan = read("jobs/demo/iterate.yaml", ["iterate.rounds=2", "dpo.trainer.beta=0.2"])
    plan.jobs          # {"collect": Job, "dpo": Job, "evaluate": Job}, checked; each round runs them with its versions

The sections `collect`, one of `sft dpo kto ppo`, and `evaluate` are jobs, on top of the ones that their `extends` names.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeline.config import Job, MLflow, Run, job_of, rules, schema
from pipeline.config.job import OF_ROWS
from pipeline.config.stages import STAGE
from pipeline.config.yaml_tree import Tree, read_tree, section_tree
from pipeline.errors import InputError, show
from pipeline.registry.store import flatten
from pipeline.runtime import resume
from pipeline.system import storage

TRAINS = ("sft", "dpo", "kto", "ppo")  # stages that train a policy on the collected rows
OWN = ("stage", "policy", "iterate", "run", "mlflow")
SHARED = ("run.name", "run.fresh", "run.storage_path", "mlflow.tracking_uri", "mlflow.experiment")
# {key that a step cannot set: where an iteration takes it from}
GIVEN = {
    "policy": "policy and the rounds",
    "baseline": "iterate.baseline",
    "reference": "iterate.reference",
    "data.train": "the rows that it collects",
    **{key: key for key in SHARED},
}
# Matches keys of a job in a message, except in paths and after a step's name.
KEY = re.compile(r"(?<![\w./@:-])(?:[a-z_]+\.[a-z_]\w*|(?:reward|judge)(?==))(?![\w/])")
SEED_STEP = 1000  # added to data.seed per round; iterations with the seeds 1, 2, 3 then share no seed


@dataclass(frozen=True)
class Settings:
    """The section `iterate`."""

    # Rounds of collect, training and evaluate.
    rounds: Annotated[int, "[1, 1000]"] = 3
    # The policy that training starts from in each round, on completions of the newest policy: the newest one, as in online
    # DPO, or the first one.
    start: Literal["newest", "first"] = "newest"
    # The frozen policy that training stays close to: the one that the round starts from (`start`), or the first policy of
    # all. With the first one, rounds cannot drift further and further.
    reference: Literal["start", "first"] = "start"
    # What `evaluate` compares a round's policy with: the one that the round began with, or the first of all.
    baseline: Literal["newest", "first"] = "newest"
    # If a round's gate fails: `stop` ends the loop with the previous policy, `discard` continues from it with other samples.
    on_failed_gate: Literal["stop", "discard"] = "stop"


@dataclass(frozen=True)
class Plan:
    """An iteration whose jobs are checked."""

    run: Run  # of the iteration: name, fresh, report, storage_path
    policy: str  # policy of the first round
    settings: Settings
    train: str  # the stage that learns
    jobs: dict[str, Job]  # step -> job, in the order of a round

    @property
    def folder(self) -> str:
        """Returns the folder of the results and of the runs of all rounds."""
        return storage.join(self.run.storage_path, str(self.run.name))

    def essence(self) -> dict[str, Any]:
        """Returns what decides the numbers, as plain data: iterations that differ in it are different ones."""
        kept = ("keep", "metric_for_best_model")
        jobs = {
            step: resume.essence(job) | {"run": {key: getattr(job.run, key) for key in kept}}
            for step, job in self.jobs.items()
        }
        settings = asdict(self.settings)
        del settings["rounds"]  # more rounds are the same iteration, continued
        return json.loads(json.dumps({"policy": self.policy, "iterate": settings, "jobs": jobs}))


def changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the keys in which two essences differ."""
    was, is_ = (flatten({**tree, **tree["jobs"], "jobs": None}) for tree in (then, now))
    return sorted(key for key in was.keys() | is_.keys() if was.get(key) != is_.get(key))


def read(path: str, overrides: list[str]) -> Plan:
    """Returns the iteration of a command line. Raises InputError if its file or one of its jobs is wrong."""
    tree = read_tree(path, overrides)
    if (stage := tree.data.get("stage")) != "iterate":
        says = f"found {show(stage)}, expected `stage: iterate`, as in jobs/demo/iterate.yaml"
        raise tree.error("stage", says)
    given = [stage for stage in TRAINS if tree.data.get(stage) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        key = given[-1] if given else "stage"
        raise tree.error(key, f"found {found}; expected one section of {', '.join(TRAINS)}")
    train = given[0]
    steps = ("collect", train, "evaluate")
    for key, value in tree.data.items():
        if value is not None and key not in (*OWN, *steps):
            typed = next((name for name in tree.where if name.startswith(f"{key}.")), key)
            hint = f"expected one of {', '.join((*OWN, *steps))}; keys of a step are {train}.data.max_length, ..."
            raise InputError(f"unknown section, {hint}", key, tree.error(typed, "").where)
    settings = _settings(tree, train)
    policy = tree.data.get("policy")
    if not isinstance(policy, str) or not policy:
        says = "missing; the first round collects from it: policy: models:/rlhf-sft@champion"
        raise tree.error("policy", says)
    run = Run(**_section(tree, "run", "name", "fresh", "report", "storage_path"))
    if problem := rules.name_problem(run.name):
        raise tree.error("run.name", problem)
    mlflow = MLflow(**_section(tree, "mlflow", "tracking_uri", "experiment"))
    jobs = {step: _job(tree, step, Path(path), policy, run, mlflow) for step in steps}
    _check(tree, jobs, train)
    plan = Plan(run, policy, settings, train, jobs)
    digest = hashlib.sha256(json.dumps(plan.essence(), sort_keys=True).encode()).hexdigest()[:8]
    return replace(plan, run=replace(run, name=run.name or f"iterate-{train}-{digest}"))


@contextlib.contextmanager
def of_step(step: str) -> Iterator[None]:
    """Names the step in an InputError of the block: the job's key `data.train` becomes `collect.data.train`."""
    keys = {*schema.keys_of(step), *STAGE[step].inputs} - {*SHARED}

    def named(found: re.Match[str]) -> str:
        return f"{step}.{found[0]}" if found[0] in keys or found[0].startswith("gate.") else found[0]

    try:
        yield
    except InputError as error:
        key = error.key
        if key and key not in (*SHARED, "policy", "baseline") and not key.startswith(f"{step}."):
            key = f"{step}.{key}"
        raise InputError(KEY.sub(named, error.message), key, error.where) from error


def _settings(tree: Tree, train: str) -> Settings:
    tree.data["iterate"] = {key: value for key, value in tree.section("iterate").items() if value is not None}
    values = schema.checked(tree, "iterate", schema.keys(f"{__name__}.Settings"))
    if "start" in values and "policy" not in STAGE[train].inputs:
        raise tree.error("iterate.start", f"`{train}` starts from the base in every round; remove the key")
    if values.get("reference") == "first" and "reference" not in STAGE[train].inputs:
        says = f"found first, but `{train}` stays close to the policy that it starts from; set start"
        raise tree.error("iterate.reference", says)
    return Settings(**values)


def _section(tree: Tree, section: str, *own: str) -> dict[str, Any]:
    """Returns the keys of `run` or `mlflow` that apply to the iteration."""
    known = {key: schema.keys(schema.class_of(section, ""))[key] for key in own}
    hint = f"expected one of {', '.join(own)}; each job has the others"
    return schema.checked(tree, section, known, lambda _: hint)


def _job(tree: Tree, step: str, path: Path, policy: str, run: Run, mlflow: MLflow) -> Job:
    """Returns the job of a step, without the versions, the rows and the seed of a round."""
    section = section_tree(tree, step, path.parent)
    for key, source in GIVEN.items():
        # The job that a section extends may have the other keys; it runs alone, too.
        value = section.data if key in ("reference", "run.name") else tree.data[step]
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and (key != "data.train" or step in TRAINS):
            raise InputError(
                f"found {show(value)}, but an iteration takes it from {source}; remove the key",
                f"{step}.{key}",
                section.error(key, "").where,
            )
    section.data["stage"] = section.data.get("stage", step)
    given = {"policy": policy, "baseline": policy}
    if step == "evaluate":  # of the version that a round has trained, also if the first policy is the base
        given["policy"] = "models:/trained/1"
    if tree.data["iterate"].get("reference") == "first":
        given["reference"] = policy  # for the checks; a round sets it again
    section.data |= {key: name for key, name in given.items() if key in STAGE[step].inputs}
    with of_step(step):
        job = job_of(section, step, str(path))
    return replace(
        job,
        reference=None,
        policy=policy if "policy" in STAGE[step].inputs else None,
        run=replace(job.run, storage_path=run.storage_path, fresh=False),
        mlflow=replace(job.mlflow, tracking_uri=mlflow.tracking_uri, experiment=mlflow.experiment),
    )


def _check(tree: Tree, jobs: dict[str, Job], train: str) -> None:
    """Raises InputError for jobs that do not fit together."""
    collect, trained = jobs["collect"], jobs[train]
    if not trained.mlflow.registered_model:
        raise tree.error(
            f"{train}.mlflow.registered_model",
            "missing; a round continues the version that the round before registered",
        )
    select, wanted = collect.args.select, "best" if train == "sft" else "best_worst or pairs"
    if train != "ppo" and (select == "best") != (train == "sft"):
        says = f"found {select}; set {wanted}, which `{train}` learns from"
        raise tree.error("collect.trainer.select", says)
    says = "collected rows have the columns that training reads; set null, and give the key to a source of data.eval"
    for key in OF_ROWS:
        if getattr(trained.data, key) is not None:
            raise tree.error(f"{train}.data.{key}", says)


# ---------------------------------------------------------------------------------------------------- a round


def used(plan: Plan) -> set[str]:
    """Returns the steps that a run has finished, in any round."""
    ended = (
        name.removeprefix("round-").partition("-")[2]
        for name in storage.folders(plan.folder)
        if storage.exists(storage.join(plan.folder, name, "result.json"))
    )
    return plan.jobs.keys() & set(ended)


def job_of_round(plan: Plan, number: int, step: str, newest: str, version: str | None = None) -> Job:
    """Returns the job of a step of round `number`, counted from 1.

    Args:
        newest: the policy that the round begins with, pinned.
        version: the version that the round has trained, for `evaluate`.
    """
    job, settings = plan.jobs[step], plan.settings
    job = replace(job, run=replace(job.run, name=f"round-{number}-{step}", storage_path=plan.folder))
    if step == "evaluate":  # the same prompts and the same random numbers for all rounds
        return replace(job, policy=version, baseline=newest if settings.baseline == "newest" else plan.policy)
    seed = job.trainer.get("seed", schema.keys(STAGE[job.stage].trainer)["seed"]["default"])
    trainer = {**job.trainer, "seed": int(seed) + SEED_STEP * (number - 1)}
    if step == "collect":
        if prompts := job.args.num_prompts:
            trainer["skip_prompts"] = job.args.skip_prompts + (number - 1) * prompts
        return replace(job, policy=newest, trainer=trainer)
    rows = storage.join(plan.folder, f"round-{number}-collect", "rows.jsonl")
    job = replace(job, trainer=trainer, data=replace(job.data, train=rows))
    if "policy" in STAGE[step].inputs:
        job = replace(job, policy=newest if settings.start == "newest" else plan.policy)
    if settings.reference == "first":
        job = replace(job, reference=plan.policy)
    return job
