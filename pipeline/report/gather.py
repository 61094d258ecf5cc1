"""Collects what is known about a run, finished or not: its folder, its curves in MLflow, and the versions it descends from."""

import os
import re
from dataclasses import dataclass, field
from typing import Any

from pipeline import references, registry
from pipeline.config.stages import INPUTS
from pipeline.data.counts import count, most_frequent
from pipeline.errors import InputError, summary
from pipeline.references import Ref
from pipeline.report.panels import History
from pipeline.system import storage
from pipeline.system.credentials import without_credentials


@dataclass
class Run:
    """One run as a report sees it. `result` is its result.json, or empty if it has none yet."""

    name: str
    stage: str
    state: str  # "finished", "failed" or "unfinished"
    job: dict[str, Any]
    folder: str | None  # missing if only MLflow knows the run
    result: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # the final ones, or else the newest
    pairs: list[dict[str, float]] = field(default_factory=list)  # scores of held-out pairs (rm)
    # Pairs with the lowest margins, as text (rm)
    doubtful: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)  # evaluation.json: its tables
    failure: dict[str, Any] = field(default_factory=dict)  # failed.json: error, traceback, seconds
    run_id: str | None = None  # MLflow's id of the run
    uri: str | None = None
    note: str | None = None  # what could not be read of the run, and why

    @property
    def last_step(self) -> int | None:
        steps = [points[-1][0] for points in self.history.values() if points]
        return max(steps, default=None)

    @property
    def kept(self) -> int | None:
        """Returns the step whose adapter was kept as the best. None: the last one was kept, or nothing was trained."""
        kept = self.result.get("kept") or {}
        return kept.get("step") if kept.get("by") else None

    @property
    def inputs(self) -> dict[str, str]:
        """{"policy": "models:/rlhf-sft/3", ...}: pinned if the run got that far, or else as the job names them."""
        if "inputs" in self.result:
            return self.result["inputs"]
        return {key: self.job[key] for key in INPUTS if isinstance(self.job.get(key), str)}

    @property
    def rows_from(self) -> dict[str, int]:
        """Returns {models:/name/3: number of training rows from its conversations}."""
        report = (self.result.get("data") or {}).get("report") or {}
        return report.get("splits", {}).get("train", {}).get("versions", {})

    @property
    def version(self) -> str | None:
        """`models:/name/3`, which the run registered, or None. An evaluation registers none: it may name one that it promoted."""
        if not self.result.get("version") or not self.result.get("adapter"):
            return None
        return str(Ref(self.result["registered_model"], version=self.result["version"]))


def read(reference: str, runs: str = "runs") -> Run:
    """Returns a run by its folder, its name under `runs`, or its MLflow id. Raises InputError if there is none."""
    given = reference.rstrip("/").removesuffix("/result.json").removesuffix("/report.html")
    for folder in (given, storage.join(runs, given)):
        if _has_job(folder):
            return _from_folder(storage.absolute(folder))
    if re.fullmatch(r"[0-9a-f]{32}", given):
        return _from_mlflow(given, runs)
    known = ", ".join(_known(runs))
    hint = f"existing runs: {known}" if known else "train one first, e.g. make sft"
    raise InputError(
        f"{reference}: no run (a folder with job.json, a name under {runs}/, or an MLflow run id of 32 hex digits); {hint}"
    )


def _has_job(folder: str) -> bool:
    """Returns whether the folder holds a run. Raises InputError if the folder cannot be read, for example because a bucket
    does not answer.
    """
    path = storage.join(folder, "job.json")
    try:
        storage.reach(path)
        return storage.exists(path)
    except Exception as error:  # pyarrow and each cloud's client raise different types
        raise InputError(
            f"{folder}: cannot be read ({summary(error)}); expected a run's folder, its name, or its MLflow id"
        ) from error


def _known(runs: str) -> list[str]:
    if not os.path.isdir(runs):
        return []
    entries = [entry for entry in os.scandir(runs) if os.path.exists(os.path.join(entry.path, "job.json"))]
    return [entry.name for entry in sorted(entries, key=lambda e: e.stat().st_mtime, reverse=True)[:6]]


def _from_folder(folder: str) -> Run:
    names = ("job.json", "result.json", "failed.json")
    job, result, failure = (_json(storage.join(folder, name), {}) for name in names)
    state = "finished" if result else "failed" if failure else "unfinished"
    run = Run(job["run"]["name"], job["stage"], state, job, folder, result, failure=failure)
    run.metrics = dict(result.get("metrics", {}))
    run.uri = result.get("tracking_uri") or failure.get("tracking_uri")
    run.uri = run.uri or registry.uri_of(job["mlflow"].get("tracking_uri"), job["run"]["storage_path"])
    run.run_id = result.get("mlflow_run_id") or failure.get("mlflow_run_id")
    if result.get("checkpoint"):
        run.pairs = _json(storage.join(folder, "final", "pairs.json"), [])
        run.doubtful = _json(storage.join(folder, "final", "doubtful.json"), [])
    if result:
        run.evaluation = _json(storage.join(folder, "evaluation.json"), {})
    _add_history(run)
    return run


def _json(path: str, default: Any) -> Any:
    """Returns the content of a run's file, or `default` if there is none. Raises InputError if it is damaged."""
    try:
        return storage.read_json(path) if storage.exists(path) else default
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: found no JSON ({type(error).__name__}: {error}); restore the file, or run the job again with run.fresh=true"
        ) from error


def _add_history(run: Run) -> None:
    """Adds the curves. If the server does not answer, the report has none and says so."""
    assert run.uri
    try:
        registry.check_reachable(run.uri)
        run.run_id = run.run_id or registry.find_run(run.uri, str(run.folder))
        if run.run_id:
            run.history = registry.history(run.uri, run.run_id)
    except Exception as error:  # the store's driver and the network raise any type
        where = without_credentials(run.uri)
        run.note = f"No curves: {where} could not be read ({without_credentials(summary(error))})."
        run.uri = None  # the lineage does not query the server either
    if not run.metrics:
        run.metrics = {metric: points[-1][1] for metric, points in run.history.items()}


def _from_mlflow(run_id: str, runs: str) -> Run:
    """Returns a run whose folder may be on another machine, from what MLflow stores about it."""
    uri = registry.uri_of(None, runs)
    try:
        registry.check_reachable(uri)
    except Exception as error:  # the store's driver and the network raise any type
        raise InputError(
            f"{run_id}: {uri} does not answer ({summary(error)}); give the run's folder, or set "
            "MLFLOW_TRACKING_URI to its server"
        ) from error
    recorded = registry.recorded(uri, run_id)
    folder = recorded["folder"]
    if folder and not storage.is_remote(folder) and os.path.exists(f"{folder}/job.json"):
        return _from_folder(folder)
    state = {"FINISHED": "finished", "FAILED": "failed"}.get(recorded["status"], "unfinished")
    job, result = (_json(recorded[name], {}) if recorded[name] else {} for name in ("job", "result"))
    run = Run(recorded["name"], recorded["stage"], state, job, None, result, run_id=run_id, uri=uri)
    run.metrics = dict(result.get("metrics", {}))
    _add_history(run)
    return run


# ------------------------------------------------------------------------------------------------------ lineage


MAX_ROW_ARROWS = 4  # versions whose rows have their own arrow


@dataclass
class Node:
    """One box of the lineage graph."""

    key: str  # models:/name/3, or another input of a run
    title: str
    lines: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)  # key of the parent -> its role
    rows_from: dict[str, int] = field(default_factory=dict)  # key of a version -> rows of its conversations
    tags: dict[str, Any] = field(default_factory=dict)
    kind: str = "version"  # or `run` (registered nothing), `base`, `input`
    depth: int = 0
    row: float = 0.0


def lineage(runs: list[Run]) -> list[Node]:
    """Returns every version that these runs made or descend from, the runs that registered nothing, and their base."""
    nodes: dict[str, Node] = {}
    for run in runs:
        if run.version and run.uri:
            _add_version(nodes, run.version, run.uri)
            continue
        node = Node(f"run {run.name}", f"{run.stage} ({run.state})", [run.name], kind="run")
        nodes[node.key] = node
        for role, reference in run.inputs.items():
            node.parents.setdefault(_pinned(reference, run.uri), _role(role))
            _add_version(nodes, _pinned(reference, run.uri), run.uri)
        if not node.parents:
            _add_base(nodes, node, run.job["model"]["name_or_path"], "")
        _add_rows(nodes, node, run.rows_from, run.uri)
    _place(nodes)
    return list(nodes.values())


def _role(name: str) -> str:
    """Returns `reward` for `reward.0`."""
    return name.partition(".")[0]


def _pinned(reference: str, uri: str | None) -> str:
    """Returns the version that an alias now points to, or the reference itself."""
    try:
        return registry.pin(reference, uri) if uri else reference
    except InputError:
        return reference


def _add_version(nodes: dict[str, Node], key: str, uri: str | None) -> None:
    if key in nodes:
        return
    if not Ref.parse(key).version or uri is None:
        nodes[key] = Node(key, _tail(key), kind="input")
        return
    try:
        version = registry.version(key, uri)
    except Exception as error:  # the version was deleted, or the server does not answer
        nodes[key] = Node(key, references.title(key), [f"unreadable: {type(error).__name__}"], kind="input")
        return
    tags = version["tags"]
    title = f"{version['name']} v{version['version']}"
    gate = tags.get("gate", "?")
    lines = [
        *(f"@{alias}" for alias in version["aliases"]),
        "no gate set" if gate == "none set" else f"gate {gate}",
    ]
    node = nodes[key] = Node(key, title, lines, tags=tags)
    for role, parent in tags["parents"].items():
        if role != "judge":
            node.parents.setdefault(parent, _role(role))
            _add_version(nodes, parent, uri)
    if not node.parents:
        _add_base(nodes, node, tags.get("base_name_or_path", "base"), tags.get("base_digest", ""))
    _add_rows(nodes, node, tags["rows_from"], uri)


def _add_rows(nodes: dict[str, Node], node: Node, counts: dict[str, int], uri: str | None) -> None:
    """Adds a box for each version that generated rows for a node; those with few rows share a line of text."""
    for version, rows in most_frequent(counts, MAX_ROW_ARROWS).items():
        if Ref.parse(version).version:
            node.rows_from[version] = rows
            _add_version(nodes, version, uri)
        else:
            node.lines.append(f"{count(rows)} from {version}")


def _add_base(nodes: dict[str, Node], child: Node, name: str, digest: str) -> None:
    key = f"base {name}"
    nodes.setdefault(key, Node(key, "base", [_tail(name), digest.removeprefix("sha256:")[:12]], kind="base"))
    child.parents[key] = ""


def _tail(path: str) -> str:
    """Returns the last two parts of a path or hub id."""
    return "/".join(path.rstrip("/").split("/")[-2:])


def _place(nodes: dict[str, Node]) -> None:
    """Sets columns by the longest path from a root, and rows by order of appearance. Removes arrows that others imply."""

    def above(key: str, *links: str) -> set[str]:
        """Returns all that a box was made from, along these links."""
        found: set[str] = set()
        queue = [key]
        while queue:
            node = nodes[queue.pop()]
            new = {up for link in links for up in getattr(node, link)} - found
            found |= new
            queue += new
        return found

    for node in nodes.values():  # rows may name any version, also one that was made later
        later = {key for key in node.rows_from if node.key in {key, *above(key, "parents", "rows_from")}}
        node.rows_from = {key: n for key, n in node.rows_from.items() if key not in later}
    for node in nodes.values():
        implied = {up for parent in node.parents for up in above(parent, "parents")}
        node.parents = {key: role for key, role in node.parents.items() if key not in implied}

    def depth(key: str) -> int:
        above = (*nodes[key].parents, *nodes[key].rows_from)
        return 1 + max((depth(one) for one in above), default=-1)

    columns: dict[int, list[Node]] = {}
    for key in sorted(nodes, key=depth):
        nodes[key].depth = depth(key)
        columns.setdefault(nodes[key].depth, []).append(nodes[key])
    tallest = max(map(len, columns.values()))
    for column in columns.values():
        for row, node in enumerate(column):
            node.row = row + (tallest - len(column)) / 2
