"""A settled job: the values that the driver passes to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pipeline.config import Job
from pipeline.config.identity import Identity
from pipeline.config.stages import Stage
from pipeline.on_ray.placement import Places
from pipeline.registry import Gate, Tracking
from pipeline.system.lease import Lease


@dataclass(frozen=True)
class SweepHandle:
    """The sweep of which a run is a trial."""

    rungs: Any  # actor that gets every evaluation (pipeline/sweep/trials.py)
    run_id: str  # MLflow run that is the parent of the trials' runs
    lease: Lease  # lease of the sweep's folder


@dataclass(frozen=True)
class Input:
    """A model or Python function that the job names: pinned, fetched and checked by the driver."""

    # models:/NAME/3, hf://OWNER/NAME@COMMIT, a folder, python:MODULE:FUNCTION, or judge:FILE@DIGEST
    version: str
    kind: Literal["adapter", "model", "function", "judge"]
    folder: str = ""  # folder of its files on the driver's machine; for a full model on the Hub, its id
    facts: dict[str, Any] = field(default_factory=dict)  # an adapter's lineage.json, or a judge's definition


@dataclass(frozen=True)
class Work:
    """All values that are decided before the first worker starts. They are small, pinned and picklable."""

    job: Job
    places: Places
    tracking: Tracking
    gate: Gate  # gate of the version that the run registers or promotes
    tokenizer: Any
    base: dict[str, Any]  # models.base.base_identity of the job's base
    # maximum tokens of a row (context minus completion), or None if the base names no context
    room: int | None = None
    inputs: dict[str, Input] = field(default_factory=dict)  # name -> input: policy, baseline, reward.0, ...
    digests: dict[str, str] = field(default_factory=dict)  # each dataset's, data.transform's, Python rewards'
    fingerprints: dict[str, str] = field(default_factory=dict)  # fingerprint of each tokenized dataset
    # {version: number of training rows that it wrote}
    rows_from: dict[str, int] = field(default_factory=dict)
    judged_by: dict[str, int] = field(default_factory=dict)  # {judge: number of training rows that it scored}
    row_format: str | None = None  # format of the rows: chat, text, both
    mixture: Any = None  # data.feed.Mixture: sources of the training rows if they have weights
    run_id: str | None = None  # MLflow's id of the run, or None to log nothing
    sweep: SweepHandle | None = None  # set if the run is a trial
    # the lease of the run's folder, once the run is open; no other process may write there
    lease: Lease = field(default_factory=Lease)

    @property
    def run(self) -> Identity:
        return self.tracking.run

    @property
    def folder(self) -> str:
        """Returns the folder of the run: checkpoints, result.json, its report."""
        return self.run.folder

    @property
    def uri(self) -> str:
        """Returns MLflow's URI for runs and versions."""
        return self.tracking.uri

    @property
    def context(self) -> int:
        """Returns the maximum tokens of a row: the base's context length, or if unknown, more than any row has."""
        return self.base["context_length"] or 1 << 20

    @property
    def stage(self) -> Stage:
        """Returns the facts about the job's stage."""
        return self.job.facts

    @cached_property
    def args(self) -> Any:
        """Returns the `trainer` section as its class, or None for a TRL stage, whose workers make TRL's class."""
        return None if self.stage.trl else self.job.args

    @property
    def versions(self) -> dict[str, str]:
        """Returns {name of an input: its pinned version}."""
        return {name: one.version for name, one in self.inputs.items()}
