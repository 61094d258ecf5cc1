"""Reads `section.key=a,b` on the command line of a sweep, and makes a job for each combination of values.

    sweep = read_sweep("jobs/demo/rm.yaml", ["trainer.learning_rate=1e-4,3e-4", "lora.r=8,16", "trainer.seed=2"])
    sweep.trials       # four trials; each has its values and its checked job

A key with several values, separated by commas, is varied: every combination is a trial. A key with one value is the same in
every trial.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated

import yaml
from annotated_types import Ge, Le

from pipeline.errors import InputError
from pipeline.job import Job, load_job, schema
from pipeline.job.gates import LOSS
from pipeline.job.identity import identity_of
from pipeline.job.stages import TRAINED
from pipeline.job.yaml_tree import Tree
from pipeline.metrics import IMPLICIT, find_metric, greater_is_better
from pipeline.run.resume import deciding_settings
from pipeline.system import storage

EXAMPLE = "for example trainer.learning_rate=1e-4,3e-4"
# Keys and sections that cannot be varied, because they change where trials run, or how trials are compared. In the section
# `data`, only batch_size can be varied.
FIXED = """stage extends run mlflow gate scaling data judge trainer.eval_strategy trainer.eval_steps trainer.eval_on_start
    trainer.per_device_eval_batch_size""".split()
# {stage: eval metric that does not depend on the loss settings}
COMPARABLE = {
    "sft": "eval_mean_token_accuracy",
    "rm": "eval_accuracy",
    "dpo": "eval_rewards/accuracies",
    "kto": "eval_rewards/margins, which depends on no key of the loss except beta",
}


@dataclass(frozen=True)
class SweepSettings:
    """The keys `sweep.*` on the command line. These keys have the same names as Ray Tune's arguments."""

    max_trials: Annotated[int, Ge(1), Le(10_000)] = 64
    """Maximum number of trials in a sweep."""
    max_concurrent_trials: Annotated[int, Ge(1), Le(10_000)] | None = None
    """Number of trials that run at the same time. null: as many as the resources of the machine or the cluster allow."""
    grace_percent: Annotated[int, Ge(1), Le(100)] = 25
    """Percent of a trial's steps after which ASHA compares trials for the first time, and may stop a trial."""
    reduction_factor: Annotated[int, Ge(1), Le(100)] = 2
    """At each comparison, the best 1 / reduction_factor of the trials continue. With 1, no trial stops early."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep, with one combination of values."""

    name: str  # name of the trial and of the trial's folder
    values: dict[str, str]  # {varied key: value as typed}
    job: Job


@dataclass(frozen=True)
class Sweep:
    """A sweep and its trials. The trials' jobs have been checked."""

    job: Job  # the job that all trials share, without the varied values
    settings: SweepSettings
    trials: list[Trial]
    metric: str  # the eval metric that the trials are compared by
    greater: bool  # whether a larger value of the metric is better
    arguments: list[str]  # overrides that apply to all trials

    @property
    def keys(self) -> list[str]:
        return list(self.trials[0].values)

    @property
    def folder(self) -> str:
        """Returns the folder of the results and of the trials' folders."""
        return self.job.folder


def read_sweep(path: str, arguments: list[str]) -> Sweep:
    """Returns the sweep that a command line describes. Raises InputError about the first combination whose job is invalid."""
    varied: dict[str, list[str]] = {}
    shared, settings = [], {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        values = split_values(text)
        if key.startswith("sweep."):
            settings[key.removeprefix("sweep.")] = text
        elif len(values) > 1:
            varied[key] = values
        else:
            shared.append(argument)
    if not varied:
        raise InputError(f"no key varies; a sweep needs a key with several values, {EXAMPLE}")
    parsed = {key: int(text) if re.fullmatch(r"\d{1,9}", text) else text for key, text in settings.items()}
    tree = Tree("command line", {"sweep": parsed})
    sweep_settings = SweepSettings(
        **schema.check_section(tree, "sweep", schema.keys("pipeline.sweep.space.SweepSettings"))
    )
    base = load_job(path, shared)
    if not base.spec.learns:
        raise InputError(f"{path}: `{base.stage}` does not train; a sweep needs one of {', '.join(TRAINED)}")
    for key in varied:
        if {key, key.partition(".")[0]} & {*FIXED} and key != "data.batch_size":
            why = "trials must differ only in training settings"
            raise InputError(f"a sweep cannot vary this key, because {why}; set one value", key=key)
    combinations = _combinations(varied, sweep_settings)
    jobs = [
        (load_job(path, [*shared, *(f"{k}={v}" for k, v in values.items())]), values)
        for values in combinations
    ]
    if not base.held_out:
        raise InputError(
            "the trials are compared on held-out rows, but there are none; set data.eval or data.eval_fraction",
            key="data.eval",
        )
    metric = base.run.metric_for_best_model
    if problem := base.measurable.why_not_compared(metric, base.run.greater_is_better):
        raise InputError(problem, "run.metric_for_best_model", base.source)
    metric = metric or base.measurable.default
    check_comparable(metric, base.stage, varied)
    # The default name is a digest of the sweep, so that the same command resumes the sweep.
    identities = [deciding_settings(identity_of(job)) for job, _ in jobs]
    content = [identities, base.run.metric_for_best_model, sweep_settings.reduction_factor]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    name = base.run.name or f"sweep-{base.stage}-{digest}"
    folder = storage.absolute(base.run.storage_path)
    base = replace(base, run=replace(base.run, name=name, storage_path=folder))
    trials = []
    for job, varied_values in jobs:
        scaling = {**job.scaling, "num_workers": job.scaling.get("num_workers", 1) or 1}
        cache = job.data.cache_dir or storage.join(folder, "data")
        trial_job = replace(
            job,
            run=replace(
                job.run, name=name_of_trial(varied_values), storage_path=base.folder, overwrite=False
            ),
            scaling=scaling,  # trials run in parallel, so no trial may run in the sweep's own process
            mlflow=replace(job.mlflow, registered_model=None),
            data=replace(job.data, cache_dir=cache),
            gate={},
        )
        trials.append(Trial(name_of_trial(varied_values), varied_values, trial_job))
    greater = greater_is_better(metric, base.run.greater_is_better)
    return Sweep(base, sweep_settings, trials, metric, greater, shared)


def split_values(text: str) -> list[str]:
    """Splits a list at its commas, except for commas inside brackets and quotes: "[a,b],[c]" -> ["[a,b]", "[c]"]."""
    try:
        node = yaml.compose(f"[{text}]")
    except yaml.YAMLError:
        node = None
    items = node.value if node and "," in text else []
    return [text[item.start_mark.index - 1 : item.end_mark.index - 1].strip() for item in items] or [text]


def _combinations(varied: dict[str, list[str]], settings: SweepSettings) -> list[dict[str, str]]:
    count = math.prod(map(len, varied.values()))
    if count > settings.max_trials:
        raise InputError(
            f"{count} trials, but at most {settings.max_trials} are allowed; list fewer values, or set sweep.max_trials={count}",
            key="sweep.max_trials",
        )
    combinations = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    return [x for i, x in enumerate(combinations) if x not in combinations[:i]]  # removes duplicates


def check_comparable(metric: str, stage: str, varied: Collection[str]) -> None:
    """Raises InputError if a varied key changes the meaning of the metric, because the metric then cannot compare trials."""
    implicit = (definition := find_metric(metric)) and definition.unit == IMPLICIT
    scale = LOSS if metric == "eval_loss" else ["beta"] if implicit else []
    if keys := [key for key in varied if key.removeprefix("trainer.") in scale]:
        raise InputError(
            f"the trials cannot be compared by {metric}, because {', '.join(keys)} changes its scale; set "
            f"run.metric_for_best_model={COMPARABLE[stage]}",
            key="run.metric_for_best_model",
        )
    if metric == "eval_reward" and "reward" in varied:
        raise InputError("trials would be compared by different rewards; set judge", key="reward")


def name_of_trial(values: dict[str, str]) -> str:
    """Returns a unique name for a combination of values. The name is valid as the name of a folder."""
    text = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    if name == text and len(name) <= 80:
        return name
    return f"{name[:70].strip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
