"""Checks on the submitting machine, before the upload, that a job can run on a cluster.

`query_cluster` gets the cluster's properties from the head over HTTP. Each check raises InputError if the job cannot run.
"""

import glob
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipeline.cloud import clusterfile
from pipeline.cloud.clusterfile import NodeType
from pipeline.cloud.workload import Workload
from pipeline.errors import InputError
from pipeline.planning import plan
from pipeline.registry.store import uri_of
from pipeline.settle import placement
from pipeline.settle.placement import Bundle, Places
from pipeline.system import console, storage

UPLOAD_LIMIT = 100 * 2**20  # maximum bytes of an upload, which Ray keeps in the head's memory


@dataclass(frozen=True)
class Cluster:
    """The properties of a Ray cluster that its head reports over HTTP."""

    nodes: list[NodeType]  # nodes that are alive
    types: dict[str, NodeType] = field(default_factory=dict)  # node types that the autoscaler may add
    max_workers: int = 0
    tracking_uri: str | None = None  # address at which the nodes reach the cluster's MLflow server
    unknown_types: bool = False  # whether there may be an autoscaler whose node types are unknown

    @property
    def several(self) -> bool:
        """Returns True if the cluster has, or may get, more than one node."""
        growing = self.unknown_types or any(kind.max_workers for kind in self.types.values())
        return len(self.nodes) > 1 or growing


# ------------------------------------------------------------------------------------------------ the cluster


def query_cluster(get: Callable[[str], Any], address: str) -> Cluster:
    """Queries the cluster at `address`. Raises InputError if the cluster's version of Ray or Python differs from this machine's.

    Args:
        get: function that sends an authorized GET request for a path, and returns the parsed JSON.
    """
    import ray

    version = get("/api/version")["ray_version"]
    python = get("/api/v0/cluster_metadata")["data"]["pythonVersion"].rpartition(".")[0]
    own_python = "{}.{}".format(*sys.version_info)
    if (version, python) != (ray.__version__, own_python):
        raise InputError(
            f"the cluster at {address} runs Ray {version} and Python {python}, but this environment has {ray.__version__} and {own_python}; "
            f"run make down and make up from this environment, or make setup PYTHON=python{python} with ray=={version}",
            key="RAY_ADDRESS",
        )
    records = get("/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
    alive = [node for node in records if node["state"] == "ALIVE"]
    nodes = [NodeType(node["resources_total"] or {}, labels=node["labels"] or {}) for node in alive]
    heads = ((node["node_ip"], node["labels"] or {}) for node in alive if node["is_head_node"])
    head, labels = next(heads, ("HEAD", {}))
    # The API does not list the autoscaler's node types, so this code reads the cluster file whose name is in the head's label.
    types, limit = clusterfile.types_of(labels.get("cluster-file", ""))
    mlflow = f"http://{head}:{labels['mlflow-port']}" if "mlflow-port" in labels else None
    # KubeRay and `ray up` set the label ray.io/node-group on each node that they start.
    return Cluster(nodes, types, limit, mlflow, unknown_types=not types and "ray.io/node-group" in labels)


# --------------------------------------------------------------------------------------------------- the jobs


def check_storage(path: str, tracking_uri: str | None, cluster: Cluster) -> None:
    """Raises InputError if the nodes cannot all use the same storage path and the same MLflow server."""
    problem = ""
    if not storage.is_remote(path) and not os.path.isabs(path):
        problem = "is inside the job's copy of this folder on the head, which Ray deletes with the job"
    elif not storage.is_remote(path) and cluster.several and _on_local_disk(path):
        problem = "is on this machine's own disk, but the cluster has or may get several nodes"
    if problem:
        advice = "use a folder that every node mounts, or a bucket: run.storage_path=s3://BUCKET/runs"
        raise InputError(f"{path!r} {problem}; {advice}", key="run.storage_path")
    uri = uri_of(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or cluster.tracking_uri, path)
    own = uri.startswith("sqlite:") or urlsplit(uri).hostname in ("localhost", "127.0.0.1", "0.0.0.0", "::1")
    if cluster.several and own:
        problem = f"{uri} is a different file or server on each node, but the cluster may have several nodes"
        server = cluster.tracking_uri or "http://HEAD:5000"
        raise InputError(
            f"{problem}; set a server that all nodes can reach, such as {server}", "mlflow.tracking_uri"
        )


def _on_local_disk(path: str) -> bool:
    """Returns True if a path is on the same disk as the working directory."""
    return os.path.exists(path) and os.stat(path).st_dev == os.stat(".").st_dev


def check_resources(places: Places, cluster: Cluster) -> None:
    """Raises InputError if neither the live nodes nor the autoscaler's nodes have enough resources for all workers."""
    for section, worker, count, _, need in places.groups:
        capacity = _possible_workers(need, cluster)
        if capacity >= count:
            continue
        resources = [f"{amount:g} {name}" for name, amount in sorted(need.resources.items())]
        resources += [f"{key}: {value}" for key, value in need.selector.items()]
        if cluster.unknown_types:
            print(
                f"warning: {section}.num_workers: no live nodes have resources for {count} {worker}s with {', '.join(resources)} each. "
                "The cluster may have an autoscaler; if it starts no such nodes, the run ends after run.placement_timeout_s",
                flush=True,
            )
            continue
        types = [f"{kind.max_workers} x {name} ({_shown(kind)})" for name, kind in cluster.types.items()]
        growth = f"may start {', '.join(types)}" if types else "if it has an autoscaler, set CLUSTER=FILE"
        change = places.fewer(capacity) if section == "scaling" else ""
        lower = f"lower {section}.num_workers or {section}.resources_per_worker"
        advice = f"set {change}" if change else lower
        raise InputError(
            f"{count} {worker}s with {', '.join(resources)} each, but the cluster has resources for {capacity} (nodes: "
            f"{'; '.join(map(_shown, cluster.nodes))}; {growth}); {advice}, change {section}.use_gpu or "
            f"{section}.label_selector, or add nodes",
            key=f"{section}.num_workers",
            change=change,
        )


def _possible_workers(need: Bundle, cluster: Cluster) -> int:
    """Returns how many workers fit on the live nodes, or on the nodes that the autoscaler may have, whichever is larger.

    The two numbers are not added, because `max_workers` includes the live nodes.
    """
    total, remaining = 0, cluster.max_workers
    fitting = ((need.fits(kind.resources, kind.labels), kind.max_workers) for kind in cluster.types.values())
    for per_node, count in sorted(fitting, reverse=True):
        total, remaining = total + min(count, remaining) * per_node, remaining - min(count, remaining)
    return max(total, sum(need.fits(node.resources, node.labels) for node in cluster.nodes))


def _shown(node: NodeType) -> str:
    amounts = [f"{node.resources[name]:g} {name}" for name in ("CPU", "GPU") if node.resources.get(name)]
    return f"{' + '.join(amounts) or 'no CPU'} {node.labels.get(placement.GPU_LABEL, '')}".strip()


def check_memory(workload: Workload, cluster: Cluster) -> None:
    """Raises InputError if Ray may place a worker on a GPU that has less memory than `plan` estimates for the worker.

    Skips GPUs that `plan` does not know. Checks nothing if this machine cannot read the base's config.json.
    """
    nodes = [*cluster.nodes, *cluster.types.values()]
    for section, worker, _, _, need in workload.places.groups:
        offered = {n.labels.get(placement.GPU_LABEL, "") for n in nodes if need.fits(n.resources, n.labels)}
        gpus = {name: memory for name in sorted(offered) if (memory := plan.memory_of(name))}
        if not gpus or not need.resources.get("GPU"):
            continue
        with console.print_if_slow(f"estimating the memory of a {worker}"):
            planned = workload.planned(section)
        if planned is None:
            return  # only the cluster can read the base; the run will check the memory
        too_small = {name: memory for name, memory in gpus.items() if memory * plan.GIB < planned.peak}
        if not too_small:
            continue
        listed = " or ".join(f"{name} with {memory:g}" for name, memory in too_small.items())
        advice = f"reduce the worker's memory; run make plan JOB={workload.source}"
        if large_enough := sorted({*gpus} - {*too_small}) or plan.fitting_gpus(planned):
            # without spaces, because Ray would treat a space as part of a name
            selector = need.selector | {placement.GPU_LABEL: f"in({','.join(large_enough)})"}
            text = yaml.safe_dump(selector, default_flow_style=True, sort_keys=False, width=1000).strip()
            key = f"{section}.label_selector"
            advice = f'set "{key}={text}" if the cluster has such nodes, or {advice}'
        problem = f"a {worker} needs {planned.peak / plan.GIB:.0f} GiB, but Ray may place it on {listed}"
        raise InputError(f"{problem}; {advice}", key=f"{section}.label_selector")


# -------------------------------------------------------------------------------------------------- the files


def upload_files(folder: str = ".") -> dict[str, int]:
    """Returns {path: bytes} for the files that Ray uploads. Raises InputError if the total size exceeds UPLOAD_LIMIT."""
    # Ray 2.60 uploads the files that this private function lists. Use a public function when Ray has one.
    from ray._private.runtime_env.packaging import _dir_travel

    root, sizes = Path(folder).absolute(), {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(root).as_posix()] = path.stat().st_size

    _dir_travel(root, [], note, include_gitignore=True, logger=logging.getLogger(__name__))
    total = sum(sizes.values())
    if total > UPLOAD_LIMIT:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
        listing = "\n".join(f"  {sizes[name] / 2**20:8.1f} MiB  {name}" for name in largest)
        raise InputError(
            f"the working directory {root} is {total / 2**20:.0f} MiB, but the limit for uploads is {UPLOAD_LIMIT / 2**20:.0f} "
            f"MiB; add files that a job does not need to .rayignore, or put data into a bucket. The largest files:\n{listing}"
        )
    return sizes


def check_paths_on_cluster(paths: Iterable[tuple[str, str]], cluster: Cluster, files: dict[str, int]) -> None:
    """Raises InputError if a path of the job exists only on this machine and is not part of the upload."""
    for key, path in paths:
        if not cluster.several and os.path.isabs(path):  # the cluster's only node may be this machine
            continue
        if os.path.isabs(path) and os.path.relpath(path).startswith(".."):
            if _on_local_disk(path):
                problem = f"{path!r} is on this machine's own disk, which the nodes do not have"
                raise InputError(f"{problem}; move it below {os.getcwd()}, or into a bucket", key=key)
            continue  # nodes may mount a folder at this path
        matches = [path, *glob.glob(path, recursive=True), *glob.glob(f"{path}/**", recursive=True)]
        names = [os.path.relpath(match) for match in matches if os.path.isfile(match)]
        if missing := [name for name in names if name not in files]:
            problem = f"{missing[0]!r} would not be uploaded, because .rayignore or .gitignore excludes it"
            raise InputError(f"{problem}; change that ignore file, or put the file into a bucket", key=key)
