"""Collects the data of a report: a run's folder, its curves in MLflow, and the model versions that were its inputs."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline import registry, run_folder
from pipeline.data.counts import most_frequent, with_unit
from pipeline.errors import InputError, error_summary
from pipeline.input_uri import InputURI
from pipeline.job.stages import INPUTS
from pipeline.report.panels import History
from pipeline.system import storage
from pipeline.system.credentials import without_credentials


@dataclass
class ReportedRun:
    """The data of a run that is shown in a report."""

    name: str
    stage: str
    state: str  # "finished", "failed" or "unfinished"
    job: dict[str, Any]
    folder: str
    result: run_folder.Result = field(default_factory=run_folder.Result)  # {} if the run has not finished
    history: History = field(default_factory=dict)
    pairs: list[dict[str, float]] = field(default_factory=list)  # scores of held-out pairs (stage rm)
    doubtful: list[dict[str, Any]] = field(default_factory=list)  # pairs with the lowest margins (stage rm)
    evaluation: dict[str, Any] = field(default_factory=dict)  # content of evaluation.json
    failure: dict[str, Any] = field(default_factory=dict)  # content of failed.json: error, traceback, seconds
    run_id: str | None = None  # id of the MLflow run
    uri: str | None = None
    note: str | None = None  # why the curves could not be read

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the final metrics, or the newest values of the curves if the run has not finished."""
        newest = {metric: points[-1][1] for metric, points in self.history.items()}
        return self.result.get("metrics") or newest

    @property
    def verdict(self) -> str:
        """Returns `gate passed` or `gate failed` for a finished run with a gate, or else the run's state."""
        if self.state != "finished" or not self.conditions:
            return self.state
        return "gate passed" if all(holds for *_, holds in self.conditions) else "gate failed"

    @property
    def conditions(self) -> list[tuple[Any, ...]]:
        """Returns (metric, condition, value, whether the condition is met) for each condition of the gate."""
        champion = (self.result.get("champion") or {}).get("metrics", {})
        return list(
            registry.check_conditions(self.job.get("gate") or {}, self.result.get("metrics", {}), champion)
        )

    @property
    def last_step(self) -> int | None:
        return max((points[-1][0] for points in self.history.values()), default=None)

    @property
    def inputs(self) -> dict[str, str]:
        """Returns {"policy": "models:/rlhf-sft/3", ...}. If the run has not finished, returns the references in the run's job."""
        if "inputs" in self.result:
            return self.result["inputs"]
        return {key: self.job[key] for key in INPUTS if isinstance(self.job.get(key), str)}

    @property
    def data(self) -> dict[str, Any]:
        """Returns the report on the run's rows, or {}."""
        return (self.result.get("data") or {}).get("report") or {}

    @property
    def version(self) -> str | None:
        """Returns `models:/name/3`, the version that the run registered, or None. An evaluation registers no version."""
        if not self.result.get("version") or not self.result.get("adapter"):
            return None
        return str(InputURI(self.result["registered_model"], version=self.result["version"]))


def read_run(reference: str, runs: str = "runs") -> ReportedRun:
    """Reads a run. Raises InputError if the run does not exist.

    Args:
        reference: the run's folder, the path of its result.json or report.html, or its name in the folder `runs`.
    """
    path = re.sub(r"/+(result\.json|report\.html)?$", "", reference)
    storage.reach(path)
    for folder in [path] if storage.is_remote(path) else [path, storage.join(runs, path)]:
        if storage.exists(storage.join(folder, run_folder.JOB)):
            return _from_folder(storage.absolute(folder))
    expected = f"expected a folder with {run_folder.JOB}, or a name under {runs}/"
    raise InputError(f"{reference}: no run; {expected}; the newest runs are {newest_runs(runs)}")


def newest_runs(runs: str = "runs") -> str:
    """Returns a text with the paths of the five newest runs in a folder."""
    paths = sorted(Path(runs).glob(f"*/{run_folder.JOB}"), key=os.path.getmtime, reverse=True)
    return " ".join(str(path.parent) for path in paths[:5]) or "none in this folder"


def _from_folder(folder: str) -> ReportedRun:
    def content(name: str, default: Any) -> Any:
        path = storage.join(folder, name)
        return storage.read_json(path) if storage.exists(path) else default

    names = run_folder.JOB, run_folder.RESULT, run_folder.FAILED
    job, result, failure = (content(name, {}) for name in names)
    state = "finished" if result else "failed" if failure else "unfinished"
    run = ReportedRun(job["run"]["name"], job["stage"], state, job, folder, result, failure=failure)
    outcome, tracking_uri = result or failure, job["mlflow"].get("tracking_uri")
    run.uri = outcome.get("tracking_uri") or registry.uri_of(tracking_uri, job["run"]["storage_path"])
    run.run_id = outcome.get("mlflow_run_id")
    # Uses only the last part of the checkpoint's path, because the run's folder may have been moved.
    if checkpoint := str(result.get("checkpoint") or "").rpartition("/")[2]:
        run.pairs, run.doubtful = (
            content(f"{checkpoint}/{name}", []) for name in (run_folder.PAIRS, run_folder.DOUBTFUL)
        )
    if result:
        run.evaluation = content(run_folder.EVALUATION, {})
    _add_curves(run)
    return run


def _add_curves(run: ReportedRun) -> None:
    """Adds the curves to a run, or a note if the MLflow store cannot be read."""
    assert run.uri
    try:
        registry.check_reachable(run.uri)
        run.run_id = run.run_id or registry.find_run(run.uri, run.folder)
        if run.run_id:
            run.history = registry.read_curves(run.uri, run.run_id)
    except Exception as error:  # the database driver and the network raise many types of errors
        store = without_credentials(run.uri)
        run.note = (
            f"No curves, because {store} could not be read ({without_credentials(error_summary(error))})."
        )
        run.uri = None  # so that `ancestors_of_run` does not query the server again


# ------------------------------------------------------------------------------------------------------ lineage

MOST_VERSIONS = 4  # maximum number of listed versions that wrote training rows


@dataclass
class Ancestor:
    """A model version, or a different input, that was used, directly or indirectly, to train a run's model."""

    role: str  # how the ancestor was used: `policy`, `reward`, ..., or `300 rows` if it wrote training rows
    reference: str  # models:/name/3, or another input
    state: str = ""  # the version's aliases and the result of its gate, as text
    sources: list[tuple[str, str]] = field(default_factory=list)  # (role, reference) of the inputs


def ancestors_of_run(run: ReportedRun) -> list[Ancestor]:
    """Returns a run's inputs, the inputs of these inputs, and so on. Each input appears once, nearest inputs first."""
    rows_from = run.data.get("splits", {}).get("train", {}).get("versions", {})
    inputs = {role: _pinned(reference, run.uri) for role, reference in run.inputs.items()}
    ancestors: dict[str, Ancestor] = {}
    queue = _sources(inputs, rows_from, run.job["model"]["name_or_path"])
    for role, reference in queue:  # the loop body appends to `queue`
        if reference not in ancestors:
            ancestors[reference] = ancestor = Ancestor(role, reference)
            if run.uri and InputURI.parse(reference).version:
                ancestor.state, ancestor.sources = _read_sources(reference, run.uri)
                queue += ancestor.sources
    return list(ancestors.values())


def _sources(inputs: dict[str, str], rows_from: dict[str, int], base: str) -> list[tuple[str, str]]:
    """Returns (role, reference) of a model's inputs, or of the base, and of the versions that wrote training rows."""
    pairs = [(role.partition(".")[0], reference) for role, reference in inputs.items()] or [("base", base)]
    return pairs + [(with_unit(rows), ref) for ref, rows in most_frequent(rows_from, MOST_VERSIONS).items()]


def _pinned(reference: str, uri: str | None) -> str:
    """Replaces an alias by the version to which it points now. Returns all other references unchanged."""
    try:
        return registry.pin(reference, uri) if uri else reference
    except InputError:
        return reference


def _read_sources(reference: str, uri: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns a text with the aliases and gate of a version, and (role, reference) of its inputs."""
    try:
        version = registry.read_version(reference, uri)
    except Exception as error:  # the version was deleted, or the server does not answer
        return f"unreadable: {type(error).__name__}", []
    tags = version["tags"]
    gate = tags.get("gate", "?")
    state = [f"@{alias}" for alias in version["aliases"]]
    state.append("no gate set" if gate == "none set" else f"gate {gate}")
    return ", ".join(state), _sources(
        tags["parents"], tags["rows_from"], tags.get("base_name_or_path", "base")
    )


def version_url(reference: str, uri: str | None) -> str | None:
    """Returns the URL of a version's page in MLflow, or None if the store is not a server or `reference` names no version."""
    ref = InputURI.parse(reference)
    if not ref.version or not uri or not uri.startswith("http"):
        return None
    return f"{without_credentials(uri)}/#/models/{quote(ref.name)}/versions/{ref.version}"
