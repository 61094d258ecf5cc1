"""Defines the values that the driver computes from a job and passes to the workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pipeline.job import Data, Model, Run, Serve
from pipeline.job.identity import Identity
from pipeline.job.judge import Definition
from pipeline.job.rollout import RolloutConfig
from pipeline.job.stages import StageSpec
from pipeline.registry import Gate, Tracking
from pipeline.settle.placement import Places
from pipeline.system.lease import Lease


@dataclass(frozen=True)
class SweepHandle:
    """The data that a trial needs about its sweep."""

    rungs: Any  # actor that gets the eval metrics of every trial (pipeline/sweep/trials.py)
    run_id: str  # id of the MLflow run that is the parent of the trials' runs
    lease: Lease  # the lease of the sweep's folder


@dataclass(frozen=True)
class Input:
    """A model, Python function or judge that is an input of the job. The driver has pinned, fetched and checked this input."""

    # models:/NAME/3, hf://OWNER/NAME@COMMIT, a folder, python:MODULE:FUNCTION, or judge:FILE@DIGEST
    version: str
    kind: Literal["adapter", "model", "function", "judge"]
    folder: str = ""  # folder with the files on the driver's machine, or the Hub id of a full model
    lineage: dict[str, Any] = field(default_factory=dict)  # lineage.json of an adapter
    definition: Definition | None = None  # the content of a judge's file
    weight: float = 1.0  # weight of this reward in the sum of all rewards


@dataclass(frozen=True)
class Sections:
    """The sections of a job, its stage, and its placement. The command `plan` needs only these fields."""

    spec: StageSpec
    identity: Identity
    places: Places
    model: Model  # `settle_job` sets the base's commit, so that all workers load the same base
    lora: dict[str, Any]
    data: Data
    trainer: dict[str, Any]
    args: Any  # section `trainer` as a config object, or None for a TRL stage (only workers import TRL)
    rollout: RolloutConfig
    serve: Serve
    run: Run
    bf16: bool  # whether matrix products are in bfloat16
    # {name of an input: its reference in the job}. A reference is a version, a folder, `base`, a function or a judge.
    named: dict[str, str]
    keys: dict[str, str]  # {name of an input: its key in the job}

    @property
    def frozen(self) -> Model:
        """Returns the section `model` with the dtype in which a worker holds the frozen base in memory.

        The dtype is model.dtype, except on a CPU with bfloat16 matrix products, where it is bfloat16. A float32 base would be
        slower there, because each product would first cast its weight to bfloat16.
        """
        on_cpu = self.spec.runs_in != "here" and not self.places.on_gpu
        return replace(self.model, dtype="bfloat16") if on_cpu and self.bf16 else self.model

    @property
    def writes(self) -> int:
        """Returns the maximum number of tokens of a sampled completion, or 0 if the job samples no completions."""
        writes = self.spec.writes and ("policy" in self.named or self.serve.policies)
        return int(self.args.response_length) if writes else 0


@dataclass(frozen=True)
class Work(Sections):
    """All values that the driver computes before the first worker starts, in three steps. They are small, and can be pickled."""

    # set by settle_job
    tracking: Tracking
    gate: Gate  # conditions for the version that the run registers or promotes
    base: dict[str, Any] = field(default_factory=dict)  # result of models.base.base_identity
    tokenizer: Any = None
    # maximum number of tokens of a row (context length minus completion length), or None if the context length is unknown
    room: int | None = None
    inputs: dict[str, Input] = field(default_factory=dict)  # {policy, baseline, reward.0, ...: input}

    # set by tokenize_rows
    # {name of a split, `transform`, or key of a Python function: digest}
    digests: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)  # {tokenized dataset: fingerprint}
    rows_from: dict[str, int] = field(
        default_factory=dict
    )  # {policy version: number of training rows that it wrote}
    judged_by: dict[str, int] = field(default_factory=dict)  # {judge: number of training rows that it scored}
    row_format: str | None = None  # format of the rows: chat, text, both
    mixture: Any = None  # a data.mixture.Mixture if the training data sources have weights

    # set by open_run and launch
    started: float = 0.0  # time.monotonic() at the start of the command, on the driver
    run_id: str | None = None  # MLflow's id of the run, or None to log nothing
    lease: Lease = field(
        default_factory=Lease
    )  # no other process may write to the run's folder during this lease
    sweep: SweepHandle | None = None  # the run's sweep, or None if the run is not a trial

    @property
    def folder(self) -> str:
        """Returns the run's folder, which holds its checkpoints, result.json and report."""
        return self.identity.folder

    @property
    def uri(self) -> str:
        """Returns the tracking URI of MLflow."""
        return self.tracking.uri

    @property
    def context(self) -> int:
        """Returns the context length of the base. If the length is unknown, returns 2^20, which exceeds the length of any row."""
        return self.base["context_length"] or 1 << 20

    @property
    def rewards(self) -> list[str]:
        """Returns the names of the inputs that are rewards (reward.0, reward.1, ...), in the order of the job."""
        return [name for name in self.named if name.startswith("reward.")]

    @property
    def versions(self) -> dict[str, str]:
        """Returns {name of an input: its pinned version}."""
        return {name: job_input.version for name, job_input in self.inputs.items()}
