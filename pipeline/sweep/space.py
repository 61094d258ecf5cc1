"""The space of a sweep: `section.key=a,b` on the command line, and the jobs that follow from it.

    sweep = read("jobs/demo/rm.yaml", ["trainer.learning_rate=1e-4,3e-4", "lora.r=8,16", "trainer.seed=2"])
    sweep.trials       # four, each with its values and its job; all of them have been checked

A key with several values, separated by commas, is varied: every combination is a trial. A key with one value holds for every
trial.
"""

import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Le

from pipeline.errors import InputError, show
from pipeline.job import Job, load_job, schema
from pipeline.job.gates import LOSS
from pipeline.job.identity import identity_of
from pipeline.job.stages import TRAINED
from pipeline.job.yaml_tree import Tree
from pipeline.metrics import IMPLICIT, find, greater_is_better
from pipeline.run.resume import essence
from pipeline.system import storage

EXAMPLE = "for example trainer.learning_rate=1e-4,3e-4"
# Keys and sections that cannot be varied, except for data.batch_size: they change what trials are compared on or where they run.
FIXED = """stage extends run mlflow gate scaling data judge trainer.eval_strategy trainer.eval_steps trainer.eval_on_start
    trainer.per_device_eval_batch_size""".split()
COMPARABLE = {
    "sft": "eval_mean_token_accuracy",
    "rm": "eval_accuracy",
    "dpo": "eval_rewards/accuracies",
    "kto": "eval_rewards/margins, which tells all of them but beta apart",
}


@dataclass(frozen=True)
class SweepSettings:
    """`sweep.*` on the command line; the names are Ray Tune's."""

    max_trials: Annotated[int, Ge(1), Le(10_000)] = 64
    """A sweep with more trials is rejected."""
    max_concurrent_trials: Annotated[int, Ge(1), Le(10_000)] | None = None
    """null: as many as the machine or the cluster holds."""
    grace_percent: Annotated[int, Ge(1), Le(100)] = 25
    """Percent of the steps after which a trial may first be stopped; ASHA compares there and at each
    multiple below."""
    reduction_factor: Annotated[int, Ge(1), Le(100)] = 2
    """At each comparison the best 1 / reduction_factor continue; 1 stops no trial."""


@dataclass(frozen=True)
class Trial:
    """One combination of values: name (also of its folder), the values that differ between trials, and job."""

    name: str
    values: dict[str, str]
    job: Job


@dataclass(frozen=True)
class Sweep:
    """A sweep whose jobs are checked."""

    job: Job  # what all trials share, with the sweep's name and the best trial's registered model
    settings: SweepSettings
    trials: list[Trial]
    metric: str  # the held-out metric
    greater: bool  # whether a larger one is better
    arguments: list[str]  # overrides that hold for all trials

    @property
    def keys(self) -> list[str]:
        return list(self.trials[0].values)

    @property
    def folder(self) -> str:
        """Returns the folder of the results and of the trials' folders."""
        return self.job.folder


def read(path: str, arguments: list[str]) -> Sweep:
    """Returns the sweep of a command line. Raises one InputError for all of its jobs that are wrong."""
    varied: dict[str, list[str]] = {}
    shared, settings = [], {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        values = split(text)
        if key.startswith("sweep."):
            settings[key.removeprefix("sweep.")] = text
        elif len(values) > 1:
            varied[key] = _checked(key, values)
        else:
            shared.append(argument)
    if not varied:
        raise InputError(f"nothing varies: a sweep needs a key with several values, {EXAMPLE}")
    numbers = {key: int(text) if re.fullmatch(r"\d{1,9}", text) else text for key, text in settings.items()}
    tree = Tree("command line", {"sweep": numbers})
    known = SweepSettings(**schema.checked(tree, "sweep", schema.keys("pipeline.sweep.space.SweepSettings")))
    base = load_job(path, shared)
    if base.stage not in TRAINED:
        raise InputError(f"{path}: `{base.stage}` trains nothing; a sweep is of one of {', '.join(TRAINED)}")
    for key in varied:
        if {key, key.partition(".")[0]} & {*FIXED} and key != "data.batch_size":
            why = "trials differ only in what is learned"
            raise InputError(f"a sweep cannot vary it, because {why}; set one value", key=key)
    jobs = _load_all(path, shared, _combinations(varied, known))
    metric, greater = _metric(base, varied)
    # The default name follows from what is swept, so that the same command resumes.
    essences = [essence(identity_of(job), "gate") for job, _ in jobs]
    content = [essences, base.run.metric_for_best_model, known.reduction_factor]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    name = base.run.name or f"sweep-{base.stage}-{digest}"
    home = storage.absolute(base.run.storage_path)
    base = replace(base, run=replace(base.run, name=name, storage_path=home))
    trials = [_trial(base, job, values) for job, values in jobs]
    return Sweep(base, known, trials, metric, greater, shared)


def split(text: str) -> list[str]:
    """Splits a list at its commas, except for commas inside brackets and quotes: "[a,b],[c]" -> ["[a,b]", "[c]"]."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _checked(key: str, values: list[str]) -> list[str]:
    if not all(values):
        raise InputError(f"found {show(','.join(values))}: a value is missing at a comma, {EXAMPLE}", key=key)
    return values


def _combinations(varied: dict[str, list[str]], settings: SweepSettings) -> list[dict[str, str]]:
    count = math.prod(map(len, varied.values()))
    if count > settings.max_trials:
        raise InputError(
            f"{count} trials, but at most {settings.max_trials} are allowed; list fewer values, or set sweep.max_trials={count}",
            key="sweep.max_trials",
        )
    combinations = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    return [one for i, one in enumerate(combinations) if one not in combinations[:i]]  # values may repeat


def _load_all(
    path: str, shared: list[str], combinations: list[dict[str, str]]
) -> list[tuple[Job, dict[str, str]]]:
    """Returns the job of every combination. Raises one InputError for all combinations that are wrong."""
    jobs = []
    wrong: dict[str, list[str]] = {}
    for values in combinations:
        typed = [f"{key}={value}" for key, value in values.items()]
        try:
            jobs.append((load_job(path, [*shared, *typed]), values))
        except InputError as error:
            wrong.setdefault(str(error), []).append(" ".join(typed))
    if wrong:
        said = (
            f"{sum(map(len, wrong.values()))} of {len(combinations)} trials cannot run; nothing was started"
        )
        lines = [f"  {message}\n    in {'; '.join(those)}" for message, those in wrong.items()]
        raise InputError("\n".join([said, *lines]))
    return jobs


def _metric(job: Job, varied: dict[str, list[str]]) -> tuple[str, bool]:
    """Returns the eval metric that the trials are compared by, and whether a larger value is better."""
    if not job.data.eval and not job.data.eval_fraction:
        raise InputError(
            "the trials are compared on held-out rows, and there are none: set data.eval or data.eval_fraction",
            key="data.eval",
        )
    key = "run.metric_for_best_model"
    if problem := job.metrics.why_not_compared(job.run.metric_for_best_model, job.run.greater_is_better):
        raise InputError(problem, key, job.source)
    metric = job.run.metric_for_best_model or job.metrics.default
    of_beta = (one := find(metric)) and one.unit == IMPLICIT
    scale = LOSS if metric == "eval_loss" else ["beta"] if of_beta else []
    if apart := [key for key in varied if key.removeprefix("trainer.") in scale]:
        raise InputError(
            f"the trials would be compared by {metric}, of which {', '.join(apart)} changes the scale; set "
            f"run.metric_for_best_model={COMPARABLE[job.stage]}",
            key=key,
        )
    if metric == "eval_reward" and "reward" in varied:
        raise InputError("the trials would be compared by different rewards; set judge", key="reward")
    return metric, greater_is_better(metric, job.run.greater_is_better)


def _trial(base: Job, job: Job, values: dict[str, str]) -> Trial:
    typed = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", typed)
    if name != typed or len(name) > 80:  # it must be the name of a folder, and unique
        name = f"{name[:70].strip('-')}-{hashlib.sha256(typed.encode()).hexdigest()[:6]}"
    cache = job.data.cache_dir or storage.join(base.run.storage_path, "data")
    job = replace(
        job,
        run=replace(job.run, name=name, storage_path=base.folder, overwrite=False),
        # A trial never runs in the sweep's process
        scaling={**job.scaling, "num_workers": job.scaling.get("num_workers", 1) or 1},
        mlflow=replace(job.mlflow, registered_model=None),
        data=replace(job.data, cache_dir=cache),
        gate={},
    )
    return Trial(name, values, job)
