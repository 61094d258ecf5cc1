"""Collects what is known about a run, finished or not, from its folder and from its curves in MLflow."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import registry, run_folder
from pipeline.errors import InputError, summary
from pipeline.job.stages import INPUTS
from pipeline.report.panels import History
from pipeline.system import storage
from pipeline.system.credentials import without_credentials


@dataclass
class Run:
    """What a report needs to know about one run."""

    name: str
    stage: str
    state: str  # "finished", "failed" or "unfinished"
    job: dict[str, Any]
    folder: str
    result: dict[str, Any] = field(default_factory=dict)  # result.json, or empty if the run has not finished
    history: History = field(default_factory=dict)
    pairs: list[dict[str, float]] = field(default_factory=list)  # scores of held-out pairs (stage rm)
    doubtful: list[dict[str, Any]] = field(default_factory=list)  # pairs with the lowest margins (stage rm)
    evaluation: dict[str, Any] = field(default_factory=dict)  # the tables in evaluation.json
    failure: dict[str, Any] = field(default_factory=dict)  # failed.json: error, traceback, seconds
    run_id: str | None = None  # id of the MLflow run
    uri: str | None = None
    note: str | None = None  # why the curves could not be read

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the final metrics. If the run has not finished, returns the newest values of its curves."""
        newest = {metric: points[-1][1] for metric, points in self.history.items()}
        return self.result.get("metrics") or newest

    @property
    def verdict(self) -> str:
        """Returns `gate passed` or `gate failed` if a finished run has a gate, or else its state."""
        if self.state != "finished" or not self.conditions:
            return self.state
        return "gate passed" if all(holds for *_, holds in self.conditions) else "gate failed"

    @property
    def conditions(self) -> list[tuple[Any, ...]]:
        """Returns (metric, condition, value, whether the condition is met) for each condition of the gate."""
        champion = (self.result.get("champion") or {}).get("metrics", {})
        return list(registry.conditions(self.job.get("gate") or {}, self.result.get("metrics", {}), champion))

    @property
    def last_step(self) -> int | None:
        return max((points[-1][0] for points in self.history.values()), default=None)

    @property
    def inputs(self) -> dict[str, str]:
        """Returns {"policy": "models:/rlhf-sft/3", ...}. For a run that has not finished, returns the names in its job."""
        if "inputs" in self.result:
            return self.result["inputs"]
        return {key: self.job[key] for key in INPUTS if isinstance(self.job.get(key), str)}

    @property
    def data(self) -> dict[str, Any]:
        """Returns the report on the run's rows, or {}."""
        return (self.result.get("data") or {}).get("report") or {}


def read_run(reference: str, runs: str = "runs") -> Run:
    """Returns a run by its folder, or by its name under `runs`. Raises InputError if there is no such run."""
    storage.reach(reference)
    for folder in [reference] if storage.is_remote(reference) else [reference, storage.join(runs, reference)]:
        if storage.exists(storage.join(folder, run_folder.JOB)):
            return _from_folder(storage.absolute(folder))
    expected = f"expected a folder with {run_folder.JOB}, or a name under {runs}/"
    raise InputError(f"{reference}: no run; {expected}; the newest are {newest(runs)}")


def newest(runs: str = "runs") -> str:
    """Returns the paths of the newest runs in a folder, as text."""
    found = sorted(Path(runs).glob(f"*/{run_folder.JOB}"), key=os.path.getmtime, reverse=True)
    return " ".join(str(path.parent) for path in found[:5]) or "none here yet"


def _from_folder(folder: str) -> Run:
    def content(name: str, default: Any) -> Any:
        path = storage.join(folder, name)
        return storage.read_json(path) if storage.exists(path) else default

    names = run_folder.JOB, run_folder.RESULT, run_folder.FAILED
    job, result, failure = (content(name, {}) for name in names)
    state = "finished" if result else "failed" if failure else "unfinished"
    run = Run(job["run"]["name"], job["stage"], state, job, folder, result, failure=failure)
    ended, given = result or failure, job["mlflow"].get("tracking_uri")
    run.uri = ended.get("tracking_uri") or registry.uri_of(given, job["run"]["storage_path"])
    run.run_id = ended.get("mlflow_run_id")
    # result.json has an absolute path, but the folder may have been moved since.
    if last := str(result.get("checkpoint") or "").rpartition("/")[2]:
        run.pairs, run.doubtful = (
            content(f"{last}/{name}", []) for name in (run_folder.PAIRS, run_folder.DOUBTFUL)
        )
    if result:
        run.evaluation = content(run_folder.EVALUATION, {})
    _add_curves(run)
    return run


def _add_curves(run: Run) -> None:
    """Adds the curves, or a note if the MLflow server does not answer."""
    assert run.uri
    try:
        registry.check_reachable(run.uri)
        run.run_id = run.run_id or registry.find_run(run.uri, run.folder)
        if run.run_id:
            run.history = registry.read_curves(run.uri, run.run_id)
    except Exception as error:  # MLflow's store and the network raise errors of any type
        where = without_credentials(run.uri)
        run.note = f"No curves: {where} could not be read ({without_credentials(summary(error))})."
