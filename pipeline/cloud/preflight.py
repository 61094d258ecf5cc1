"""Checks on the submitter's machine, before anything is uploaded, started or paid for.

look() asks the head over HTTP, in two seconds. The checks raise InputError for the first mistake, and nothing is submitted.
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

# Bytes of the largest upload, which Ray keeps in the head's memory
LIMIT = 100 * 2**20


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster as its head describes it over HTTP."""

    nodes: list[NodeType]  # alive
    types: dict[str, NodeType] = field(default_factory=dict)  # node types that the autoscaler may add
    max_workers: int = 0
    # The address of the cluster's own MLflow as its nodes see it. Jobs inherit it from them, and its password.
    tracking_uri: str | None = None
    # Something else than `make up` may add nodes of types that are not known here.
    unknown_types: bool = False

    @property
    def several(self) -> bool:
        """Returns True if a job's processes can run on more than one node."""
        growing = self.unknown_types or any(kind.max_workers for kind in self.types.values())
        return len(self.nodes) > 1 or growing


# ------------------------------------------------------------------------------------------------ the cluster


def look(get: Callable[[str], Any], address: str) -> Cluster:
    """Returns the cluster behind `address`; `get(path)` is an authorized GET that returns parsed JSON.

    Raises InputError if its Ray or Python has another version.
    """
    import ray

    version = get("/api/version")["ray_version"]
    python = get("/api/v0/cluster_metadata")["data"]["pythonVersion"].rpartition(".")[0]
    here = "{}.{}".format(*sys.version_info)
    if (version, python) != (ray.__version__, here):
        raise InputError(
            f"the cluster at {address} runs Ray {version} and Python {python}, this environment has {ray.__version__} and {here}; "
            f"run make down and make up from this environment, or make setup PYTHON=python{python} with ray=={version}",
            key="RAY_ADDRESS",
        )
    listed = get("/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
    alive = [node for node in listed if node["state"] == "ALIVE"]
    nodes = [NodeType(node["resources_total"] or {}, labels=node["labels"] or {}) for node in alive]
    heads = ((node["node_ip"], node["labels"] or {}) for node in alive if node["is_head_node"])
    head, labels = next(heads, ("HEAD", {}))
    # HTTP does not tell what an autoscaler may add. The head's label names the file that it was started from.
    types, most = clusterfile.types_of(labels.get("cluster-file", ""))
    mlflow = f"http://{head}:{labels['mlflow-port']}" if "mlflow-port" in labels else None
    # KubeRay, `ray up` and the like name the group of each node that they start.
    return Cluster(nodes, types, most, mlflow, unknown_types=not types and "ray.io/node-group" in labels)


# --------------------------------------------------------------------------------------------------- the jobs


def check_storage(path: str, tracking_uri: str | None, cluster: Cluster) -> None:
    """Raises InputError if nodes would not share the storage path or the MLflow server."""
    why = ""
    if not storage.is_remote(path) and not os.path.isabs(path):
        why = "would lie in the job's copy of this folder on the head, which is deleted with the job"
    elif not storage.is_remote(path) and cluster.several and _on_local_disk(path):
        why = "is on this machine's own disk, but the cluster has or may get several nodes"
    if why:
        advice = "use a folder that every node mounts, or a bucket: run.storage_path=s3://BUCKET/runs"
        raise InputError(f"{path!r} {why}; {advice}", key="run.storage_path")
    uri = uri_of(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or cluster.tracking_uri, path)
    own = uri.startswith("sqlite:") or urlsplit(uri).hostname in ("localhost", "127.0.0.1", "0.0.0.0", "::1")
    if cluster.several and own:
        why = f"{uri} means another file or machine on each node, and the cluster has or may get several"
        server = cluster.tracking_uri or "http://HEAD:5000"
        raise InputError(f"{why}; name a server as the nodes see it, e.g. {server}", "mlflow.tracking_uri")


def _on_local_disk(path: str) -> bool:
    """Returns True if a path exists on the working directory's disk, which nodes do not share."""
    return os.path.exists(path) and os.stat(path).st_dev == os.stat(".").st_dev


def check_resources(places: Places, cluster: Cluster) -> None:
    """Raises InputError if no node of the cluster, present or future, can hold a worker: Ray would wait forever."""
    for section, who, count, _, need in places.groups:
        room = _room(need, cluster)
        if room >= count:
            continue
        wanted = [f"{amount:g} {name}" for name, amount in sorted(need.resources.items())]
        wanted += [f"{key}: {value}" for key, value in need.selector.items()]
        more = [f"{kind.max_workers} x {name} ({_shown(kind)})" for name, kind in cluster.types.items()]
        grows = f"may start {', '.join(more)}" if more else "CLUSTER=FILE names the file of an autoscaler"
        change = places.fewer(room) if section == "scaling" else ""
        lower = f"lower {section}.num_workers or {section}.resources_per_worker"
        advice = f"set {change}" if change else lower
        if cluster.unknown_types:
            print(
                f"warning: {section}.num_workers: no node that is up has resources for {count} {who}s with {', '.join(wanted)} each. "
                "This cluster may have an autoscaler; if that starts no such nodes, the run ends after run.placement_timeout_s",
                flush=True,
            )
            continue
        raise InputError(
            f"{count} {who}s with {', '.join(wanted)} each, but the cluster has resources for {room} (nodes: "
            f"{'; '.join(map(_shown, cluster.nodes))}; {grows}); {advice}, change {section}.use_gpu or "
            f"{section}.label_selector, or add nodes",
            key=f"{section}.num_workers",
            change=change,
        )


def _room(need: Bundle, cluster: Cluster) -> int:
    """Returns how many workers with `need` fit onto the live nodes or onto all nodes that may start, whichever is more.

    The two are not added, because live nodes count towards the types' `max_workers`.
    """
    future, left = 0, cluster.max_workers
    fitting = ((need.fits(kind.resources, kind.labels), kind.max_workers) for kind in cluster.types.values())
    for each, most in sorted(fitting, reverse=True):
        future, left = future + min(most, left) * each, left - min(most, left)
    return max(future, sum(need.fits(node.resources, node.labels) for node in cluster.nodes))


def _shown(node: NodeType) -> str:
    amounts = [f"{node.resources[name]:g} {name}" for name in ("CPU", "GPU") if node.resources.get(name)]
    return f"{' + '.join(amounts) or 'no CPU'} {node.labels.get(placement.GPU_LABEL, '')}".strip()


def check_memory(workload: Workload, cluster: Cluster) -> None:
    """Raises InputError if Ray may place a job on GPUs with less memory than `plan` counts for one worker.

    There is no check for GPUs that `plan` does not know, or for a base whose config.json cannot be read from here.
    """
    nodes = [*cluster.nodes, *cluster.types.values()]
    for section, who, _, _, need in workload.places.groups:
        offered = {n.labels.get(placement.GPU_LABEL, "") for n in nodes if need.fits(n.resources, n.labels)}
        gpus = {name: memory for name in sorted(offered) if (memory := plan.memory_of(name))}
        if not gpus or not need.resources.get("GPU"):
            continue
        with console.waiting(f"counting the memory of a {who}"):
            planned = workload.planned(section)
        if planned is None:
            return  # the cluster has this folder or version, and checks it
        small = {name: memory for name, memory in gpus.items() if memory * plan.GIB < planned.peak}
        if not small:
            continue
        listed = " or ".join(f"{name} with {memory:g}" for name, memory in small.items())
        advice = f"make it smaller: make plan JOB={workload.source}"
        if enough := sorted({*gpus} - {*small}) or plan.fitting(planned):
            # without spaces: Ray takes them as part of the name
            selector = need.selector | {placement.GPU_LABEL: f"in({','.join(enough)})"}
            text = yaml.safe_dump(selector, default_flow_style=True, sort_keys=False, width=1000).strip()
            key = f"{section}.label_selector"
            advice = f'set "{key}={text}" (a cluster without such nodes needs them), or {advice}'
        needs = f"a {who} needs {planned.peak / plan.GIB:.0f} GiB, but Ray may place it on {listed}"
        raise InputError(f"{needs}; {advice}", key=f"{section}.label_selector")


# -------------------------------------------------------------------------------------------------- the files


def upload_files(folder: str = ".") -> dict[str, int]:
    """Returns {path below `folder`: bytes} of what Ray uploads. Raises InputError above 100 MiB, with the five largest."""
    # The function that the upload uses (ray 2.60, private). Remove when Ray lists what it would upload.
    from ray._private.runtime_env.packaging import _dir_travel

    root, sizes = Path(folder).absolute(), {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(root).as_posix()] = path.stat().st_size

    _dir_travel(root, [], note, include_gitignore=True, logger=logging.getLogger(__name__))
    total = sum(sizes.values())
    if total > LIMIT:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:5]
        listing = "\n".join(f"  {sizes[name] / 2**20:8.1f} MiB  {name}" for name in largest)
        raise InputError(
            f"the working directory {root} is {total / 2**20:.0f} MiB, and an upload may have {LIMIT / 2**20:.0f}; add files "
            f"that a job does not need to .rayignore, or put data into a bucket. The largest:\n{listing}"
        )
    return sizes


def check_paths(paths: Iterable[tuple[str, str]], cluster: Cluster, files: dict[str, int]) -> None:
    """Raises InputError for paths that exist only on this machine. Nodes get data, models and templates with the upload."""
    for key, path in paths:
        if not cluster.several and os.path.isabs(path):  # its node may be this machine; the job looks there
            continue
        if os.path.isabs(path) and os.path.relpath(path).startswith(".."):
            if _on_local_disk(path):
                why = f"{path!r} is on this machine's own disk, which the nodes do not have"
                raise InputError(f"{why}; move it below {os.getcwd()}, or into a bucket", key=key)
            continue  # a folder that the nodes mount; the job checks it before it starts a worker
        found = [path, *glob.glob(path, recursive=True), *glob.glob(f"{path}/**", recursive=True)]
        names = [os.path.relpath(one) for one in found if os.path.isfile(one)]
        if missing := [name for name in names if name not in files]:
            why = f"{missing[0]!r} would not be uploaded, because .rayignore or .gitignore names it"
            raise InputError(f"{why}; change that, or put the file into a bucket", key=key)
