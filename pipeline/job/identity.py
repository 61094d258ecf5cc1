"""Defines the identity of a run: its name, its folder and its settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.job.job import Job
from pipeline.job.stages import STAGE_SPECS, StageSpec
from pipeline.system import storage


@dataclass(frozen=True)
class Identity:
    """The identity of a run, and the settings of the run's job."""

    stage: str
    name: str
    storage_path: str
    overwrite: bool  # whether to start from scratch if a run with this name exists
    source: str  # the job file
    settings: dict[str, Any]  # the resolved job as a dict, as stored in job.json

    @property
    def spec(self) -> StageSpec:
        """Returns the entry of the run's stage in STAGE_SPECS."""
        return STAGE_SPECS[self.stage]

    @property
    def folder(self) -> str:
        """Returns the run's folder, which contains checkpoints, result.json and the report."""
        return storage.join(self.storage_path, self.name)


def identity_of(job: Job) -> Identity:
    """Returns the identity of the run of a job. The job's run.name must be set."""
    run, settings = job.run, json.loads(json.dumps(job.to_dict(), default=str))
    return Identity(job.stage, str(run.name), run.storage_path, run.overwrite, job.source, settings)
