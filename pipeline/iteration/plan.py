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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeline.config import Job, MLflow, Run, job_of, rules, schema
from pipeline.config.stages import STAGE
from pipeline.config.yaml_tree import Tree, read_tree, section_tree
from pipeline.errors import InputError, show
from pipeline.registry.store import flatten
from pipeline.runtime import resume
from pipeline.system import storage

TRAINS = ("sft", "dpo", "kto", "ppo")  # stages that train a policy on the collected rows
OWN = ("stage", "policy", "iterate", "run", "mlflow")
SHARED = {"run": ("storage_path",), "mlflow": ("tracking_uri", "experiment")}  # keys set once, for all jobs
SEED_STEP = 1000  # added to data.seed per round; iterations with the seeds 1, 2, 3 then share no seed
# Keys that a step cannot set, and why.
OF_THE_ROUND = {
    "policy": "a round gives it; `policy` is the first round's",
    "baseline": "iterate.baseline says which one it is: newest or first",
    "run.name": "the runs of the rounds have their own",
    "run.fresh": "run.fresh starts the whole iteration over",
    "run.storage_path": "run.storage_path is that of all steps",
    "mlflow.tracking_uri": "mlflow.tracking_uri is that of all steps",
    "mlflow.experiment": "mlflow.experiment is that of all steps",
    "data.train": "a round trains on the rows that it has collected",
}
AS_THEY_ARE = ("columns", "transform", "label", "group_by")  # keys that collected rows do not need


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

    name: str
    storage_path: str
    fresh: bool
    report: bool
    policy: str  # policy of the first round
    settings: Settings
    train: str  # the stage that learns
    jobs: dict[str, Job]  # step -> job, in the order of a round

    @property
    def folder(self) -> str:
        """Returns the folder of the results and of the runs of all rounds."""
        return storage.join(self.storage_path, self.name)

    def essence(self) -> dict[str, Any]:
        """Returns what decides the numbers, as plain data: iterations that differ in it are different ones."""
        kept = ("keep", "metric_for_best_model")
        jobs = {
            step: resume.essence(job) | {"run": {key: getattr(job.run, key) for key in kept}}
            for step, job in self.jobs.items()
        }
        # More rounds are the same iteration, continued.
        settings = {
            key: getattr(self.settings, key) for key in ("start", "reference", "baseline", "on_failed_gate")
        }
        return json.loads(json.dumps({"policy": self.policy, "iterate": settings, "jobs": jobs}))


def changed(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the keys in which two essences differ."""
    was, is_ = (flatten({**tree, **tree["jobs"], "jobs": None}) for tree in (then, now))
    return sorted(key for key in was.keys() | is_.keys() if was.get(key) != is_.get(key))


def read(path: str, overrides: list[str]) -> Plan:
    """Returns the iteration of a command line. Raises InputError if its file or one of its jobs is wrong."""
    tree = read_tree(path, overrides)
    if tree.data.get("stage") != "iterate":
        raise tree.error(
            "stage",
            f"found {show(tree.data.get('stage'))}, expected `stage: iterate`, as in jobs/demo/iterate.yaml",
        )
    train = _train(tree)
    steps = ("collect", train, "evaluate")
    for key, value in tree.data.items():
        if value is not None and key not in (*OWN, *steps):
            raise _unknown(tree, key, steps)
    settings = _settings(tree, train)
    policy = tree.data.get("policy")
    if not isinstance(policy, str) or not policy:
        raise tree.error(
            "policy", "missing; the first round collects from it: policy: models:/rlhf-sft@champion"
        )
    run, mlflow = Run(**_section(tree, "run", Run)), MLflow(**_section(tree, "mlflow", MLflow))
    jobs = {step: _job(tree, step, Path(path), policy, run, mlflow) for step in steps}
    _check(tree, jobs, train)
    plan = Plan("", run.storage_path, run.fresh, run.report, policy, settings, train, jobs)
    digest = hashlib.sha256(json.dumps(plan.essence(), sort_keys=True).encode()).hexdigest()[:8]
    return replace(plan, name=run.name or f"iterate-{train}-{digest}")


def _unknown(tree: Tree, key: str, steps: tuple[str, ...]) -> InputError:
    """Returns the error for a section that an iteration does not have, but a step may have."""
    typed = next((name for name in tree.where if name.startswith(f"{key}.")), key)
    takers = [
        f"{step}.{typed}"
        for step in steps
        if typed in {*schema.keys_of(step), *STAGE[step].inputs} - STAGE[step].unused.keys()
    ]
    known = (
        f"did you mean {' or '.join(takers)}?" if takers else f"expected one of {', '.join((*OWN, *steps))}"
    )
    return InputError(f"unknown section; {known}", key, tree.error(typed, "").where)


@contextlib.contextmanager
def of_step(step: str) -> Iterator[None]:
    """Names the step in an InputError of the block: the job's key `data.train` becomes `collect.data.train`."""
    try:
        yield
    except InputError as error:
        key = _in_iteration(step, error.key) if error.key else ""
        raise InputError(
            _WORD.sub(lambda found: _in_iteration(step, found[0]), error.message), key, error.where
        ) from error


# Matches keys of a job, except in paths and after a step's name.
_WORD = re.compile(r"(?<![\w./@:-])(?:[a-z_]+\.[a-z_]\w*|(?:reward|judge)(?==))(?![\w/])")


def _in_iteration(step: str, key: str) -> str:
    """Returns `collect.data.train` for `data.train`; keys that all steps share, or that the step lacks, stay."""
    section, *names = key.split(".")
    shared = {"run": ("name", "fresh", "storage_path"), "mlflow": SHARED["mlflow"]}
    if section in ("reward", "judge"):
        known = section in STAGE[step].inputs
    else:
        known = section == "gate" or ".".join([section, *names[:1]]) in schema.keys_of(step)
    return f"{step}.{key}" if known and not set(names[:1]) & set(shared.get(section, ())) else key


def _train(tree: Tree) -> str:
    given = [stage for stage in TRAINS if tree.data.get(stage) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise tree.error(
            given[-1] if given else "stage", f"found {found}; expected one section of {', '.join(TRAINS)}"
        )
    return given[0]


def _settings(tree: Tree, train: str) -> Settings:
    tree.data["iterate"] = {key: value for key, value in tree.section("iterate").items() if value is not None}
    values = schema.checked(tree, "iterate", schema.keys(f"{__name__}.Settings"))
    if "start" in values and "policy" not in STAGE[train].inputs:
        raise tree.error("iterate.start", f"`{train}` starts from the base in every round; remove the key")
    if values.get("reference") == "first" and "reference" not in STAGE[train].inputs:
        raise tree.error(
            "iterate.reference",
            f"found first, but `{train}` stays close to the policy that it starts from; set start",
        )
    return Settings(**values)


def _section(tree: Tree, section: str, kind: type) -> dict[str, Any]:
    """Returns the keys of `run` or `mlflow` that apply to the iteration: its name, and what all its runs share."""
    own = {"run": ("name", "fresh", "report"), "mlflow": ()}[section] + SHARED[section]
    known = {key: schema.keys(f"pipeline.config.job.{kind.__name__}")[key] for key in own}
    rest = f"expected one of {', '.join(own)}; each job has the others"
    values = schema.checked(tree, section, known, lambda key: rest)
    if problem := rules.name_problem(values.get("name")):
        raise tree.error("run.name", problem)
    return values


def _job(tree: Tree, step: str, path: Path, policy: str, run: Run, mlflow: MLflow) -> Job:
    """Returns the job of a step, without the versions, the rows and the seed of a round."""
    section = section_tree(tree, step, path.parent)
    _refuse_replaced(tree, step)
    section.data["stage"] = section.data.get("stage", step)
    if named := section.data.get("reference"):
        raise tree.error(
            f"{step}.reference",
            f"found {show(named)}; iterate.reference says which one it is: start or first",
        )
    if "policy" in STAGE[step].inputs:
        section.data["policy"] = policy
    if "baseline" in STAGE[step].inputs:
        section.data["baseline"] = policy
    try:
        with of_step(step):
            job = job_of(section, step, str(path))
    except InputError as error:  # the step's section may have unknown keys, too
        key = error.key if error.key.startswith(f"{step}.") else f"{step}.{error.key}".rstrip(".")
        raise InputError(error.message, key, error.where) from error
    if job.run.name is not None:
        raise InputError(
            f"found {show(job.run.name)}, but {OF_THE_ROUND['run.name']}; remove the key",
            f"{step}.run.name",
            section.error("run.name", "").where,
        )
    return replace(
        job,
        run=replace(job.run, storage_path=run.storage_path, fresh=False),
        mlflow=replace(job.mlflow, tracking_uri=mlflow.tracking_uri, experiment=mlflow.experiment),
    )


def _refuse_replaced(tree: Tree, step: str) -> None:
    """Raises InputError for keys in a step's section (not in the job that it extends) that no run would use."""
    for key, why in OF_THE_ROUND.items():
        if key == "data.train" and step not in TRAINS:
            continue
        section, _, name = key.partition(".")
        given = tree.data[step].get(section)
        if name:
            given = given.get(name) if isinstance(given, dict) else None
        if given is not None:
            raise tree.error(f"{step}.{key}", f"found {show(given)}, but {why}; remove the key")


def _check(tree: Tree, jobs: dict[str, Job], train: str) -> None:
    """Raises InputError for jobs that do not fit together."""
    collect, trained, evaluate = jobs.values()
    if not trained.mlflow.registered_model:
        raise tree.error(
            f"{train}.mlflow.registered_model",
            "missing; a round continues the version that the round before registered",
        )
    select, wanted = collect.args.select, "best" if train == "sft" else "best_worst or pairs"
    if train != "ppo" and (select == "best") != (train == "sft"):
        raise tree.error(
            "collect.trainer.select", f"found {select}; set {wanted}, which `{train}` learns from"
        )
    for key in AS_THEY_ARE:
        if getattr(trained.data, key) is not None:
            raise tree.error(
                f"{train}.data.{key}",
                "collected rows have the columns that training reads; set null, and give the key to a source of data.eval",
            )
    bases = {(job.model.name_or_path, job.model.revision) for job in jobs.values()}
    if len(bases) > 1:
        named = ", ".join(sorted(str(name) for name, _ in bases))
        raise InputError(
            f"the jobs have several bases ({named}), but an adapter works only on the base that it was trained on",
            key="model.name_or_path",
        )
    if not evaluate.data.eval:
        raise tree.error("evaluate.data.eval", "missing; each round's policy answers these prompts")


# ---------------------------------------------------------------------------------------------------- a round


def used(plan: Plan) -> set[str]:
    """Returns the steps that a run has finished, in any round."""
    steps = set()
    for name in storage.folders(plan.folder):
        _, _, step = name.removeprefix("round-").partition("-")
        if step in plan.jobs and storage.exists(storage.join(plan.folder, name, "result.json")):
            steps.add(step)
    return steps


def run_name(number: int, step: str) -> str:
    return f"round-{number}-{step}"


def job_of_round(plan: Plan, number: int, step: str, newest: str, version: str | None = None) -> Job:
    """Returns the job of a step of round `number`, counted from 1.

    Args:
        newest: the policy that the round begins with, pinned.
        version: the version that the round has trained, for `evaluate`.
    """
    job, settings = plan.jobs[step], plan.settings
    job = replace(job, run=replace(job.run, name=run_name(number, step), storage_path=plan.folder))
    if step == "evaluate":  # the same prompts and the same random numbers for all rounds
        return replace(job, policy=version, baseline=newest if settings.baseline == "newest" else plan.policy)
    seed = job.trainer.get("seed", schema.keys(STAGE[job.stage].trainer)["seed"]["default"])
    trainer = {**job.trainer, "seed": int(seed) + SEED_STEP * (number - 1)}
    if step == "collect":
        if prompts := job.args.num_prompts:
            trainer["skip_prompts"] = job.args.skip_prompts + (number - 1) * prompts
        return replace(job, policy=newest, trainer=trainer)
    rows = storage.join(plan.folder, run_name(number, "collect"), "rows.jsonl")
    job = replace(job, trainer=trainer, data=replace(job.data, train=rows))
    if "policy" in STAGE[step].inputs:
        job = replace(job, policy=newest if settings.start == "newest" else plan.policy)
    if settings.reference == "first":
        job = replace(job, reference=plan.policy)
    return job
