"""What run a job is: its name and folder, and all its settings as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pipeline.job.job import Job
from pipeline.job.stages import STAGE, Stage
from pipeline.system import storage


@dataclass(frozen=True)
class Identity:
    """A run by name, and what may not change when it resumes."""

    stage: str
    name: str
    storage_path: str
    overwrite: bool  # start over although a run of this name exists
    source: str  # the job file
    settings: dict[str, Any]  # the resolved job, as job.json and result.json have it

    @property
    def facts(self) -> Stage:
        """Returns the facts about its stage."""
        return STAGE[self.stage]

    @property
    def folder(self) -> str:
        """Returns the folder of the run: checkpoints, result.json, its report."""
        return storage.join(self.storage_path, self.name)


def identity_of(job: Job) -> Identity:
    """Returns the identity of a job that has a name."""
    run, settings = job.run, json.loads(json.dumps(job.to_dict(), default=str))
    return Identity(job.stage, str(run.name), run.storage_path, run.overwrite, job.source, settings)
