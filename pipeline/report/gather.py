"""What is known about a run, finished or not: its folder, its curves in MLflow, and the versions it descends from."""

import os
import re
from dataclasses import dataclass, field
from typing import Any

from pipeline import references, registry
from pipeline.config.stages import INPUTS
from pipeline.data.counts import count, most_frequent
from pipeline.errors import InputError, summary
from pipeline.references import Ref
from pipeline.report import files
from pipeline.report.panels import History
from pipeline.system import storage
from pipeline.system.credentials import without_credentials


@dataclass
class Run:
    """One run as a report sees it. `result` is its result.json, empty while there is none."""

    name: str
    stage: str
    state: str  # "finished", "failed" or "unfinished"
    job: dict[str, Any]
    folder: str | None  # None: known from MLflow alone
    result: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # the final ones, else the newest
    pairs: list[dict[str, float]] = field(default_factory=list)  # scores of held-out pairs (rm)
    # the pairs with the lowest margins, as text (rm)
    doubtful: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] = field(default_factory=dict)  # failed.json: error, traceback, seconds
    run_id: str | None = None  # of MLflow
    uri: str | None = None
    note: str | None = None  # what could not be read, and why

    @property
    def last_step(self) -> int | None:
        steps = [points[-1][0] for points in self.history.values() if points]
        return max(steps, default=None)

    @property
    def kept(self) -> int | None:
        """The step whose adapter was kept because it was the best; None: the last one was, or nothing was trained."""
        kept = self.result.get("kept") or {}
        return kept.get("step") if kept.get("by") else None

    @property
    def inputs(self) -> dict[str, str]:
        """{"policy": "models:/rlhf-sft/3", ...}: pinned where the run got that far, else as the job names them."""
        if "inputs" in self.result:
            return self.result["inputs"]
        return {key: self.job[key] for key in INPUTS if isinstance(self.job.get(key), str)}

    @property
    def rows_from(self) -> dict[str, int]:
        """{models:/name/3: training rows that are from its conversations}."""
        report = (self.result.get("data") or {}).get("report") or {}
        return report.get("splits", {}).get("train", {}).get("versions", {})

    @property
    def version(self) -> str | None:
        """`models:/name/3`, what the run registered; None for an evaluation, which may name the one that it promoted."""
        if not self.result.get("version") or not self.result.get("adapter"):
            return None
        return str(Ref(self.result["registered_model"], version=self.result["version"]))


def read(reference: str, runs: str = "runs") -> Run:
    """A run by its folder, its name under `runs`, or its MLflow id.

    Raises:
        InputError: when there is no such run, with those that there are.
    """
    given = reference.rstrip("/").removesuffix("/result.json").removesuffix("/report.html")
    for folder in (given, storage.join(runs, given)):
        if _has_job(folder):
            return _from_folder(storage.absolute(folder))
    if re.fullmatch(r"[0-9a-f]{32}", given):
        return _from_mlflow(given, runs)
    raise InputError(
        f"{reference}: no run (a folder with job.json, a name under {runs}/, or an MLflow run id of 32 hex digits); "
        + (
            f"existing runs: {', '.join(known)}"
            if (known := _known(runs))
            else "train one first, e.g. make sft"
        )
    )


def _has_job(folder: str) -> bool:
    """Whether a run lies there. Raises InputError for a bucket that does not answer, or a name that can be none."""
    path = storage.join(folder, "job.json")
    try:
        storage.reach(path)
        return storage.exists(path)
    except Exception as error:  # pyarrow and each cloud's client raise types of their own
        raise InputError(
            f"{folder}: cannot be read ({summary(error)}); expected a run's folder, its name, or its MLflow id"
        ) from error


def _known(runs: str) -> list[str]:
    """Names of the newest runs."""
    if not os.path.isdir(runs):
        return []
    entries = [entry for entry in os.scandir(runs) if os.path.exists(os.path.join(entry.path, "job.json"))]
    return [entry.name for entry in sorted(entries, key=lambda e: e.stat().st_mtime, reverse=True)[:6]]


def _from_folder(folder: str) -> Run:
    job, result, failure = files.read(folder)
    state = "finished" if result else "failed" if failure else "unfinished"
    run = Run(job["run"]["name"], job["stage"], state, job, folder, result, failure=failure)
    run.metrics = dict(result.get("metrics", {}))
    run.uri = result.get("tracking_uri") or failure.get("tracking_uri") or _uri(job)
    run.run_id = result.get("mlflow_run_id") or failure.get("mlflow_run_id")
    if result.get("checkpoint"):
        paths = (storage.join(folder, "final", f"{name}.json") for name in ("pairs", "doubtful"))
        run.pairs, run.doubtful = (files.content(path) if storage.exists(path) else [] for path in paths)
    _add_history(run)
    return run


def _uri(job: dict[str, Any]) -> str:
    return registry.uri_of(job["mlflow"].get("tracking_uri"), job["run"]["storage_path"])


def _add_history(run: Run) -> None:
    """The curves; a server that does not answer costs the report its curves, and the report says so."""
    assert run.uri
    try:
        registry.check_reachable(run.uri)
        run.run_id = run.run_id or registry.find_run(run.uri, str(run.folder))
        if run.run_id:
            run.history = registry.history(run.uri, run.run_id)
    except Exception as error:  # whatever the store's driver or the network raises
        where = without_credentials(run.uri)
        run.note = f"No curves: {where} could not be read ({without_credentials(summary(error))})."
        run.uri = None  # nor is it asked for the versions that the run descends from
    if not run.metrics:
        run.metrics = {metric: points[-1][1] for metric, points in run.history.items()}


def _from_mlflow(run_id: str, runs: str) -> Run:
    """A run whose folder may be elsewhere: from what MLflow holds of it.

    Raises:
        InputError: when the server does not know it.
    """
    uri = registry.uri_of(None, runs)
    try:
        registry.check_reachable(uri)
    except Exception as error:  # whatever the store's driver or the network raises
        raise InputError(
            f"{run_id}: {uri} cannot be asked for it ({summary(error)}); name the run's folder, or its server "
            "with MLFLOW_TRACKING_URI"
        ) from error
    recorded = registry.recorded(uri, run_id)
    if (
        (folder := recorded["folder"])
        and not storage.is_remote(folder)
        and os.path.exists(f"{folder}/job.json")
    ):
        return _from_folder(folder)
    state = {"FINISHED": "finished", "FAILED": "failed"}.get(recorded["status"], "unfinished")
    job, result = (
        files.as_shape(files.content(path), shape, f"{name}.json of run {run_id}")
        if (path := recorded[name])
        else {}
        for name, shape in (("job", files.JOB), ("result", files.RESULT))
    )
    run = Run(recorded["name"], recorded["stage"], state, job, None, result, run_id=run_id, uri=uri)
    run.metrics = dict(result.get("metrics", {}))
    _add_history(run)
    return run


# ------------------------------------------------------------------------------------------------------ lineage


MOST_WRITERS = 4  # versions whose rows have an arrow of their own


@dataclass
class Node:
    """One box of the lineage graph."""

    key: str  # models:/name/3, or what else a run took as input
    title: str
    lines: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)  # key of the parent -> what it was taken for
    rows_from: dict[str, int] = field(default_factory=dict)  # key of a version -> rows of its conversations
    tags: dict[str, Any] = field(default_factory=dict)
    kind: str = "version"  # or `run` (registered nothing), `base`, `input`
    depth: int = 0
    row: float = 0.0


def lineage(runs: list[Run]) -> list[Node]:
    """Every version that these runs made or descend from, the runs that registered nothing, and the base under them."""
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
    """`reward.0` -> `reward`."""
    return name.partition(".")[0]


def _pinned(reference: str, uri: str | None) -> str:
    """An alias as the version it stands for now, or as it is where it stands for none."""
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
    except Exception as error:  # deleted since, or the server is away
        nodes[key] = Node(
            key, references.title(key), [f"not to be read: {type(error).__name__}"], kind="input"
        )
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
    """The versions whose conversations a box learned from: those with the most rows as boxes, the others as a number."""
    for version, rows in most_frequent(counts, MOST_WRITERS).items():
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
    """The last two parts of a path or hub id."""
    return "/".join(path.rstrip("/").split("/")[-2:])


def _place(nodes: dict[str, Node]) -> None:
    """Columns by the longest way from a root, rows in order of appearance; arrows that others imply are left out."""

    def ancestors(key: str) -> set[str]:
        return {up for parent in nodes[key].parents for up in (parent, *ancestors(parent))}

    def earlier(key: str, seen: set[str]) -> set[str]:
        """All that a box was made from, rows included."""
        for up in (*nodes[key].parents, *nodes[key].rows_from):
            if up not in seen:
                seen.add(up)
                earlier(up, seen)
        return seen

    for node in nodes.values():  # rows may name any version, also one that was made later
        node.rows_from = {
            key: n for key, n in node.rows_from.items() if node.key not in {key, *earlier(key, set())}
        }
    for node in nodes.values():
        beyond = {up for parent in node.parents for up in ancestors(parent)}
        node.parents = {key: role for key, role in node.parents.items() if key not in beyond}

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
