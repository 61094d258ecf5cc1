"""A settled job: the values that the driver passes to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.job import Data, Model, Run, Serve
from pipeline.job.identity import Identity
from pipeline.job.rollout import RolloutConfig
from pipeline.job.stages import Stage
from pipeline.registry import Gate, Tracking
from pipeline.settle.placement import Places
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
    weight: float = 1.0  # of a reward, in the sum of all rewards


@dataclass(frozen=True)
class Sections:
    """What a job says, as workers and the plan read it: its sections, the stage's facts, the places, the inputs by name."""

    stage: Stage
    run: Identity
    places: Places
    model: Model  # of settled work, with the commit of the base, so that all workers load the same one
    lora: dict[str, Any]
    data: Data
    trainer: dict[str, Any]
    args: Any  # `trainer` as its class; None for a TRL stage, whose workers make TRL's class
    rollout: RolloutConfig
    serve: Serve
    options: Run  # the section `run`
    bf16: bool  # whether matrix products are in bfloat16
    # {name of an input: what the job names: a version, a folder, `base`, a function, a judge}
    named: dict[str, str]
    keys: dict[str, str]  # {name of an input: its key in the job}

    @property
    def frozen(self) -> Model:
        """Returns the section `model` with the dtype in which workers hold the frozen base.

        It is model.dtype, except on a CPU that multiplies matrices in bfloat16. There it is bfloat16, because casting a float32
        weight before each matrix product takes as long as the product of a few rows.
        """
        on_cpu = self.stage.runs_in != "here" and not self.places.on_gpu
        return replace(self.model, dtype="bfloat16") if on_cpu and self.bf16 else self.model

    @property
    def writes(self) -> int:
        """Returns the maximum tokens of the completions, or 0 if none are written."""
        writes = self.stage.writes and ("policy" in self.named or self.serve.policies)
        return int(self.args.response_length) if writes else 0


@dataclass(frozen=True)
class Work(Sections):
    """All values that are decided before the first worker starts. They are small, pinned and picklable."""

    tracking: Tracking
    gate: Gate  # gate of the version that the run registers or promotes
    base: dict[str, Any] = field(default_factory=dict)  # models.base.base_identity
    tokenizer: Any = None
    # maximum tokens of a row (context minus completion), or None if the base names no context
    room: int | None = None
    inputs: dict[str, Input] = field(default_factory=dict)  # name -> input: policy, baseline, reward.0, ...
    digests: dict[str, str] = field(default_factory=dict)  # each dataset's, data.transform's, Python rewards'
    fingerprints: dict[str, str] = field(default_factory=dict)  # fingerprint of each tokenized dataset
    # {version: number of training rows that it wrote}
    rows_from: dict[str, int] = field(default_factory=dict)
    judged_by: dict[str, int] = field(default_factory=dict)  # {judge: number of training rows that it scored}
    row_format: str | None = None  # format of the rows: chat, text, both
    mixture: Any = None  # data.mixture.Mixture: sources of the training rows if they have weights
    run_id: str | None = None  # MLflow's id of the run, or None to log nothing
    sweep: SweepHandle | None = None  # set if the run is a trial
    # the lease of the run's folder, once the run is open; no other process may write there
    lease: Lease = field(default_factory=Lease)

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
    def rewards(self) -> list[str]:
        """Returns the names of the inputs that are rewards, in the order of the job: reward.0, reward.1, ..."""
        return [name for name in self.named if name.startswith("reward.")]

    @property
    def versions(self) -> dict[str, str]:
        """Returns {name of an input: its pinned version}."""
        return {name: one.version for name, one in self.inputs.items()}
