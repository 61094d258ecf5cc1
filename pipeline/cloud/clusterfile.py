"""cluster.yaml, read on the submitter's machine: what `make up` is about to start, and what a job may ask of it.

    python -m pipeline.cloud.clusterfile cluster.yaml     # make up: checks it, says what will run, and calls `ray up`

`CLUSTER` names another file than cluster.yaml.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError
from pipeline.runtime.placement import ACCELERATOR_TYPE, GPU_LABEL, Bundle

EDIT = "EDIT"  # stands in the value of every line that its user has to fill in
TOOLS = {"ssh": "openssh-client", "rsync": "rsync"}  # `ray up` calls them; without them it stops half way


@dataclass(frozen=True)
class NodeType:
    """One kind of node that the autoscaler may start."""

    resources: dict[str, float]
    max_workers: int
    instance: str = ""
    spot: bool = False
    labels: dict[str, str] = field(default_factory=dict)


def path() -> Path:
    return Path(os.environ.get("CLUSTER", "cluster.yaml"))


def read(file: Path) -> dict[str, Any]:
    """The parsed file. Raises InputError when it is missing or no mapping."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{file}: cannot be read ({error}); CLUSTER=file.yaml names another") from error
    if not isinstance(config, dict) or "provider" not in config:
        raise InputError(f"{file}: expected a cluster file for `ray up`, with a `provider` section")
    return config


def worker_types(config: dict[str, Any]) -> dict[str, NodeType]:
    """The node types of a cluster file, less its head's."""
    head = config.get("head_node_type")
    return {
        name: NodeType(
            resources=_resources(kind),
            max_workers=int(kind.get("max_workers", config.get("max_workers", 2))),
            instance=kind["node_config"].get("InstanceType", kind["node_config"].get("machineType", "")),
            spot=(kind.get("labels") or {}).get("ray.io/market-type") == "spot",
            labels=kind.get("labels") or {},
        )
        for name, kind in (config.get("available_node_types") or {}).items()
        if name != head
    }


def _resources(kind: dict[str, Any]) -> dict[str, float]:
    """A node type's resources, with what Ray adds to them for its kind of GPU: A100 for both sizes of it."""
    resources = {key: float(value) for key, value in (kind.get("resources") or {}).items()}
    if gpu := (kind.get("labels") or {}).get(GPU_LABEL):
        resources.setdefault(f"{ACCELERATOR_TYPE}{re.sub('^A100-.*', 'A100', gpu)}", 1.0)
    return resources


def types_of(name: str) -> tuple[dict[str, NodeType], int]:
    """(types, most workers) of the cluster file, if it is the one that the cluster of that name was started from."""
    if not name or not path().is_file():
        return {}, 0
    config = read(path())
    if config.get("cluster_name") != name:
        return {}, 0
    return worker_types(config), int(config.get("max_workers", 2))


def room(need: Bundle, nodes: Iterable[NodeType], types: Iterable[NodeType], max_workers: int) -> int:
    """How many workers that ask for `need` each fit onto the live nodes, or onto all nodes that may be started.

    Live nodes count towards the types' `max_workers` too, so the larger of the two numbers is returned.
    """
    live = sum(need.fits(node.resources, node.labels) for node in nodes)
    future, left = 0, max_workers
    for fitting, most in sorted(
        ((need.fits(t.resources, t.labels), t.max_workers) for t in types), reverse=True
    ):
        count = min(most, left)
        future, left = future + count * fitting, left - count
    return max(live, future)


# ------------------------------------------------------------------------------------------------- make up


def check(file: Path) -> dict[str, Any]:
    """Everything about a cluster file that can be told without a cloud account.

    Raises:
        InputError: a missing tool, a line that was not filled in, a mistake in the file, no token.
    """
    config = read(file)
    for tool, package in TOOLS.items():
        if not shutil.which(tool):
            raise InputError(
                f"`ray up` needs {tool}, which is not installed here: install the package {package}"
            )
    lines = file.read_text(encoding="utf-8").splitlines()
    if unedited := [f"{file}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if _to_edit(line)]:
        raise InputError(
            "these lines are still to be filled in; the comment at each says how:\n  " + "\n  ".join(unedited)
        )
    for remote, local in (config.get("file_mounts") or {}).items():
        if not os.path.exists(os.path.expanduser(local)):
            hint = "; make one with: ray get-auth-token --generate" if "auth_token" in local else ""
            raise InputError(f"{file}: file_mounts: {remote}: there is no {local}{hint}")
    _check_schema(file, config)
    return config


def _to_edit(line: str) -> bool:
    return EDIT in line.split("#")[0]


def _check_schema(file: Path, config: dict[str, Any]) -> None:
    """Runs the check of the file's schema with which `ray up` begins. Private in ray 2.60; use a public one once it exists."""
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(config))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        raise InputError(f"{file}: {where or 'top level'}: {error.message}") from error


def summary(file: Path, config: dict[str, Any]) -> str:
    """What `ray up` will start, and for how long it is paid for."""
    provider, types = config["provider"], worker_types(config)
    where = provider.get("region") or provider.get("head_ip") or provider.get("module", "")
    lines = [f"{file}: cluster {config['cluster_name']!r} on {provider['type']} {where}"]
    head = (
        (config.get("available_node_types") or {})
        .get(config.get("head_node_type"), {})
        .get("node_config", {})
    )
    if instance := head.get("InstanceType") or head.get("machineType"):
        lines.append(
            f"  now            1 x {instance}: it runs, and is paid for, until `make down`, whether a job runs or not"
        )
    for name, kind in types.items():
        market = "spot" if kind.spot else "on demand"
        lines.append(
            f"  when jobs ask  0 to {kind.max_workers} x {kind.instance} ({name}, {market}); each ends after "
            f"{config.get('idle_timeout_minutes', 5)} idle minutes"
        )
    for ip in [provider.get("head_ip"), *provider.get("worker_ips", [])]:
        lines += [f"  {ip}"] if ip else []
    if types:
        lines.append(
            f"  at most {config.get('max_workers', 2)} workers at a time; disks are deleted with their nodes"
        )
    return "\n".join(lines)


def up(file: Path, config: dict[str, Any], options: list[str]) -> None:
    """Becomes `ray up`.

    Autoscaler 2, Ray's default, falls back from a spot type after a launch that failed. On machines of one's own it
    counts the head as a worker and starts one too few (ray 2.60, LocalNodeProvider), so those get autoscaler 1. Remove
    when it starts them all.
    """
    version = "0" if config["provider"]["type"] == "local" else "1"
    environment = {**os.environ, "RAY_UP_enable_autoscaler_v2": version}
    ray = str(Path(sys.executable).parent / "ray")
    os.execve(ray, [ray, "up", str(file), "--disable-usage-stats", *options], environment)


def main(arguments: list[str]) -> int:
    file, options = Path(arguments[0]) if arguments else path(), arguments[1:]
    try:
        config = check(file)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(file, config), flush=True)
    up(file, config, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
