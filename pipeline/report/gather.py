"""Collects what is known about a run, finished or not: its folder, its curves in MLflow, and the versions it descends from."""

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
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
    pairs: list[dict[str, float]] = field(default_factory=list)  # scores of held-out pairs (rm)
    doubtful: list[dict[str, Any]] = field(default_factory=list)  # pairs with the lowest margins (rm)
    evaluation: dict[str, Any] = field(default_factory=dict)  # evaluation.json: its tables
    failure: dict[str, Any] = field(default_factory=dict)  # failed.json: error, traceback, seconds
    run_id: str | None = None  # MLflow's id of the run
    uri: str | None = None
    note: str | None = None  # what could not be read of the run, and why

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the final metrics, or else the newest ones."""
        newest = {metric: points[-1][1] for metric, points in self.history.items()}
        return self.result.get("metrics") or newest

    @property
    def last_step(self) -> int | None:
        return max((points[-1][0] for points in self.history.values()), default=None)

    @property
    def inputs(self) -> dict[str, str]:
        """Returns {"policy": "models:/rlhf-sft/3", ...}: pinned if the run got that far, or else as the job names them."""
        if "inputs" in self.result:
            return self.result["inputs"]
        return {key: self.job[key] for key in INPUTS if isinstance(self.job.get(key), str)}

    @property
    def data(self) -> dict[str, Any]:
        """Returns the report on the run's rows, or {}."""
        return (self.result.get("data") or {}).get("report") or {}

    @property
    def version(self) -> str | None:
        """Returns `models:/name/3`, which the run registered, or None. An evaluation only names a version that it promoted."""
        if not self.result.get("version") or not self.result.get("adapter"):
            return None
        return str(Ref(self.result["registered_model"], version=self.result["version"]))


def folders(reference: str, runs: str) -> list[str]:
    """Returns the folders that a reference may mean: a path, or a name under `runs`; a file in it stands for the folder."""
    given = re.sub(r"/+(result\.json|report\.html)?$", "", reference)
    storage.reach(given)
    return [given] if storage.is_remote(given) else [given, storage.join(runs, given)]


def read(reference: str, runs: str = "runs") -> Run:
    """Returns a run by its folder, its name under `runs`, or its MLflow id. Raises InputError if there is none."""
    for folder in folders(reference, runs):
        if storage.exists(storage.join(folder, "job.json")):
            return _from_folder(storage.absolute(folder))
    if re.fullmatch(r"[0-9a-f]{32}", reference):
        return _from_mlflow(reference, runs)
    raise InputError(
        f"{reference}: no run (a folder with job.json, a name under {runs}/, or an MLflow run id of 32 hex digits); the "
        f"newest under {runs}/: {newest(runs)}"
    )


def newest(runs: str = "runs") -> str:
    """Returns the newest runs of a folder, as text."""
    found = sorted(Path(runs).glob("*/job.json"), key=os.path.getmtime, reverse=True)
    return " ".join(str(path.parent) for path in found[:5]) or "none here yet"


def _from_folder(folder: str) -> Run:
    def content(name: str, default: Any) -> Any:
        path = storage.join(folder, name)
        return storage.read_json(path) if storage.exists(path) else default

    job, result, failure = (content(name, {}) for name in ("job.json", "result.json", "failed.json"))
    state = "finished" if result else "failed" if failure else "unfinished"
    run = Run(job["run"]["name"], job["stage"], state, job, folder, result, failure=failure)
    ended, given = result or failure, job["mlflow"].get("tracking_uri")
    run.uri = ended.get("tracking_uri") or registry.uri_of(given, job["run"]["storage_path"])
    run.run_id = ended.get("mlflow_run_id")
    if result.get("checkpoint"):
        run.pairs, run.doubtful = content("final/pairs.json", []), content("final/doubtful.json", [])
    if result:
        run.evaluation = content("evaluation.json", {})
    _add_curves(run)
    return run


def _from_mlflow(run_id: str, runs: str) -> Run:
    """Returns a run whose folder may be on another machine, from what MLflow stores about it."""
    uri = registry.uri_of(None, runs)
    known = registry.recorded(uri, run_id)
    folder = known["folder"]
    if folder and not storage.is_remote(folder) and os.path.exists(f"{folder}/job.json"):
        return _from_folder(folder)
    state = {"FINISHED": "finished", "FAILED": "failed"}.get(known["status"], "unfinished")
    run = Run(
        known["name"], known["stage"], state, known["job"], None, known["result"], run_id=run_id, uri=uri
    )
    _add_curves(run)
    return run


def _add_curves(run: Run) -> None:
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


# ------------------------------------------------------------------------------------------------------ lineage


BOX, GAP, ROW = 178, 74, 104  # pixels: width of a box, gap between columns, height of a row
MAX_ROW_ARROWS = 4  # versions whose rows have their own arrow


@dataclass
class Node:
    """One box of the lineage graph."""

    key: str  # models:/name/3, or another input of a run
    title: str
    lines: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)  # key of the parent -> its role
    rows_from: dict[str, int] = field(default_factory=dict)  # key of a version -> rows of its conversations
    kind: str = "version"  # or `run` (registered nothing), `base`, `input`
    depth: int = 0  # column
    y: float = 0.0

    @property
    def x(self) -> int:
        return 8 + self.depth * (BOX + GAP)

    @property
    def height(self) -> int:
        return 28 + 16 * len(self.lines)

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def arrows(self) -> dict[str, str]:
        """Returns {key of a box that this one was made from: as what}."""
        used = {key: [role] for key, role in self.parents.items()}
        for key, rows in self.rows_from.items():
            used[key] = [*used.get(key, []), count(rows)]
        return {key: ", ".join(filter(None, roles)) for key, roles in used.items()}


def lineage(runs: list[Run]) -> list[Node]:
    """Returns every version that these runs made or descend from, the runs that registered nothing, and their base."""
    nodes: dict[str, Node] = {}
    for run in runs:
        if run.version and run.uri:
            _add(nodes, run.version, run.uri)
            continue
        node = Node(f"run {run.folder or run.name}", f"{run.stage} ({run.state})", [run.name], kind="run")
        nodes[node.key] = node
        parents = {role: _pinned(reference, run.uri) for role, reference in run.inputs.items()}
        base = {"base_name_or_path": run.job["model"]["name_or_path"]}
        rows_from = run.data.get("splits", {}).get("train", {}).get("versions", {})
        _connect(nodes, node, parents, base, rows_from, run.uri)
    _place(nodes)
    return list(nodes.values())


def _pinned(reference: str, uri: str | None) -> str:
    """Returns the version that an alias now points to, or the reference itself."""
    try:
        return registry.pin(reference, uri) if uri else reference
    except InputError:
        return reference


def _add(nodes: dict[str, Node], key: str, uri: str | None) -> None:
    """Adds the box of a version, and all that it descends from."""
    if key in nodes:
        return
    if not Ref.parse(key).version or uri is None:
        nodes[key] = Node(key, _tail(key), kind="input")
        return
    node = nodes[key] = Node(key, references.title(key))
    try:
        version = registry.version(key, uri)
    except Exception as error:  # the version was deleted, or the server does not answer
        node.lines, node.kind = [f"unreadable: {type(error).__name__}"], "input"
        return
    tags = version["tags"]
    gate = tags.get("gate", "?")
    node.lines = [f"@{alias}" for alias in version["aliases"]]
    node.lines.append("no gate set" if gate == "none set" else f"gate {gate}")
    parents = {role: parent for role, parent in tags["parents"].items() if role != "judge"}
    _connect(nodes, node, parents, tags, tags["rows_from"], uri)


def _connect(
    nodes: dict[str, Node],
    node: Node,
    parents: dict[str, str],
    base: dict[str, str],
    counts: dict[str, int],
    uri: str | None,
) -> None:
    """Adds the boxes that a node was made from, with arrows: parents, or else the base, and the versions that wrote its rows.

    Args:
        parents: {role or role.number: version or another input}.
        base: tags, of which base_name_or_path and base_digest are read.
        counts: {version: rows of its conversations}.
    """
    for role, parent in parents.items():
        node.parents.setdefault(parent, role.partition(".")[0])
        _add(nodes, parent, uri)
    if not parents:
        name, digest = base.get("base_name_or_path", "base"), base.get("base_digest", "")
        key, lines = f"base {name}", [_tail(name), digest.removeprefix("sha256:")[:12]]
        nodes.setdefault(key, Node(key, "base", lines, kind="base"))
        node.parents[key] = ""
    for version, rows in most_frequent(counts, MAX_ROW_ARROWS).items():
        if Ref.parse(version).version:
            node.rows_from[version] = rows
            _add(nodes, version, uri)
        else:  # `others`
            node.lines.append(f"{count(rows)} from {version}")


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

    columns: dict[int, list[Node]] = defaultdict(list)
    for key, node in nodes.items():
        node.depth = depth(key)
        columns[node.depth].append(node)
    tallest = max(map(len, columns.values()))
    for column in columns.values():
        for row, node in enumerate(column):
            node.y = 8 + ROW * (row + (tallest - len(column)) / 2)
