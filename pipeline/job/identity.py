"""The identity of a run: name, folder and settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.job.job import Job
from pipeline.job.stages import STAGE, Stage
from pipeline.system import storage


@dataclass(frozen=True)
class Identity:
    """A run, and the settings that may not change when it resumes."""

    stage: str
    name: str
    storage_path: str
    overwrite: bool  # whether to start over although a run of this name exists
    source: str  # the job file
    settings: dict[str, Any]  # all keys of the job with their values, as in job.json and result.json

    @property
    def facts(self) -> Stage:
        """Returns the facts about the stage."""
        return STAGE[self.stage]

    @property
    def folder(self) -> str:
        """Returns the folder of the run, with checkpoints, result.json and report."""
        return storage.join(self.storage_path, self.name)


def identity_of(job: Job) -> Identity:
    """Returns the identity of a job whose run.name is set."""
    run, settings = job.run, json.loads(json.dumps(job.to_dict(), default=str))
    return Identity(job.stage, str(run.name), run.storage_path, run.overwrite, job.source, settings)
