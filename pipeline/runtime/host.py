"""A process that holds the models of a job: what it starts from (Work), and how it loads its inputs (Host)."""

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from pipeline import registry
from pipeline.config import Job, Model
from pipeline.config.stages import STAGE, Stage
from pipeline.models import hub
from pipeline.runtime.lease import Lease


@dataclass(frozen=True)
class SweepHandle:
    """The sweep that a run is a trial of."""

    rungs: Any  # the actor that every evaluation is reported to (pipeline/sweep/trials.py)
    run_id: str  # the MLflow run that is the parent of the trials' runs
    lease: Lease  # of the sweep's folder


@dataclass(frozen=True)
class Input:
    """A model or Python function that the job names: pinned, fetched and checked by the driver."""

    version: (
        str  # models:/NAME/3, hf://OWNER/NAME@COMMIT, a folder, python:MODULE:FUNCTION, or judge:FILE@DIGEST
    )
    kind: Literal["adapter", "model", "function", "judge"]
    folder: str = ""  # of its files on the driver's machine; of a full model on the hub, its id
    facts: dict[str, Any] = field(default_factory=dict)  # lineage.json of an adapter, or a judge's definition


@dataclass(frozen=True)
class Work:
    """What the driver hands to the workers; everything in it is small, pinned and picklable."""

    job: Job
    tokenizer: Any
    base: dict[str, Any]  # models.base.base_identity of the job's base
    digests: dict[str, str]  # digests of each dataset, of data.transform and of Python rewards
    fingerprints: dict[str, str]  # fingerprint of each tokenized dataset
    run_id: str | None  # MLflow's id of the run, or None to log nothing
    gate: registry.Gate  # of the version that it registers or promotes
    inputs: dict[str, Input] = field(default_factory=dict)  # by name: policy, baseline, reward.0, ...
    uri: str = ""  # MLflow's, of runs and versions
    room: int | None = (
        None  # most tokens of a row: the context less the completion; None if the base names no context
    )
    # {version: number of training rows that it has written}
    rows_from: dict[str, int] = field(default_factory=dict)
    judged_by: dict[str, int] = field(default_factory=dict)  # {judge: number of training rows that it scored}
    row_format: str | None = None  # format of the rows: chat, text, both
    mixture: Any = None  # data.feed.Mixture: sources of the training rows if they have weights
    sweep: SweepHandle | None = None  # set if the run is a trial
    lease: Lease = field(
        default_factory=Lease
    )  # of the run's folder, once the run is open; nothing else may write there

    @property
    def context(self) -> int:
        """Returns the most tokens of a row: the base's context length, or more than any row has if it names none."""
        return self.base["context_length"] or 1 << 20

    @property
    def stage(self) -> Stage:
        """Returns the facts about the job's stage."""
        return STAGE[self.job.stage]

    @cached_property
    def args(self) -> Any:
        """Returns the `trainer` section as its class. None for a TRL stage, which makes TRL's own in its workers."""
        return None if self.stage.trl else self.job.args

    @property
    def versions(self) -> dict[str, str]:
        """Returns {name of an input: its pinned version}."""
        return {name: one.version for name, one in self.inputs.items()}


class Host:
    """A process that holds the models of a job: a worker of a stage, an actor of Ray Data, or the driver itself."""

    rank = 0

    def __init__(self, work: Work):
        self.work, self.job, self.tokenizer = work, work.job, work.tokenizer
        self.args = work.args

    @property
    def device(self) -> str:
        """Returns the GPU that this process sees if the job uses one, else the CPU."""
        return "cuda" if self.job.scaling.get("use_gpu") else "cpu"

    def load_base(self, scorer_tokenizer: Any = None) -> Any:
        """Loads the job's frozen base. Rank 0 warns if the processor emulates the job's bfloat16."""
        import torch

        base = self.frozen_base(scorer_tokenizer)
        on_cpu = self.rank == 0 and base.device.type == "cpu"
        if on_cpu and self.job.bf16 and not torch.cpu._is_avx512_bf16_supported():
            print("warning: this processor emulates bfloat16; trainer.bf16=false may be faster", flush=True)
        return base

    def frozen_base(self, scorer_tokenizer: Any = None) -> Any:
        """Loads the job's frozen base directly onto this process's device; see models.base.load_base."""
        from pipeline.models.base import load_base

        return load_base(self.model, scorer_tokenizer, self.device)

    @property
    def model(self) -> Model:
        """Returns the job's `model` section with the base's dtype."""
        return replace(self.job.model, dtype=self.job.base_dtype)

    def input(self, name: str) -> str:
        """Returns the local folder of an input (`policy`, `reward.0`, ...). On another machine than the driver's, fetches it."""
        one = self.work.inputs[name]
        # A folder of the hub's cache may be there with other files of the same commit
        there = os.path.isdir(one.folder) and not one.version.startswith(hub.SCHEME)
        return one.folder if there else registry.fetch(one.version, self.work.uri)
