"""Determines the identity of a job's run, and where the run is recorded."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from pipeline.config import Job
from pipeline.config.identity import identity_of
from pipeline.config.job import SPLITS, sources_of
from pipeline.registry.store import Tracking, tracking_uri
from pipeline.system import storage


def named(job: Job) -> Job:
    """Returns the job with a run name (default: stage and time) and an absolute storage path."""
    name = job.run.name or f"{job.stage}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid() % 10000:04d}"
    return replace(job, run=replace(job.run, name=name, storage_path=storage.absolute(job.run.storage_path)))


def tracking_of(job: Job) -> Tracking:
    """Returns the place where a job's run is recorded."""
    sources = {name: sources_of(getattr(job.data, name) or job.data.train) for name in SPLITS}
    locations = {name: ", ".join(one.location for one in given) for name, given in sources.items()}
    return Tracking(
        tracking_uri(job), job.mlflow.experiment, [*job.mlflow.report_to], identity_of(job), locations
    )
