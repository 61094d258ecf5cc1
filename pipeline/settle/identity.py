"""Determines the name of a run, the MLflow store that records it, and the gate of the version that it registers."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from pipeline.input_uri import InputURI
from pipeline.job import Job, gates, judge
from pipeline.job.identity import identity_of
from pipeline.job.job import SPLITS, sources_of
from pipeline.metrics import greater_is_better
from pipeline.registry.champion import Gate
from pipeline.registry.store import Tracking, uri_of
from pipeline.system import storage
from pipeline.system.functions import digest_functions


def with_run_name(job: Job) -> Job:
    """Returns the job with a run name and an absolute storage path. If run.name is not set, it becomes the stage and the time."""
    name = job.run.name or f"{job.stage}-{new_name()}"
    return replace(job, run=replace(job.run, name=name, storage_path=storage.absolute(job.run.storage_path)))


def new_name() -> str:
    """Returns a name from the current time and the id of this process."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid() % 10000:04d}"


def tracking_of(job: Job) -> Tracking:
    """Returns the Tracking object of a job: its MLflow store, experiment, other trackers and data sources."""
    sources = {name: sources_of(getattr(job.data, name) or job.data.train) for name in SPLITS}
    locations = {name: ", ".join(source.location for source in group) for name, group in sources.items()}
    return Tracking(
        uri_of(job.mlflow.tracking_uri, job.run.storage_path),
        job.mlflow.experiment,
        [*job.mlflow.report_to],
        identity_of(job),
        locations,
    )


def gate_of(job: Job) -> Gate:
    """Returns the Gate object for the version that a job registers or promotes."""
    metric = job.run.metric_for_best_model or job.measurable.default
    greater = greater_is_better(metric, job.run.greater_is_better)
    keys = (*gates.LOSS, *gates.SAMPLING)
    settings = {f"trainer.{key}": job.trainer[key] for key in keys if job.trainer.get(key) is not None}
    if name := job.inputs.get("judge"):
        ref = InputURI.parse(name)
        code = digest_functions([name])[:12] if ref.is_function else ""
        settings["judge"] = judge.pin_judge(name) if ref.is_judge else f"{name} {code}".strip()
    return Gate(job.mlflow.registered_model, job.mlflow.alias, job.gate, metric, greater, settings)
