"""Starts and ends the cluster that a cluster file describes. Checks the file and the cloud account before `ray` runs.

    python -m pipeline.cloud.clusterfile up|status|dashboard|down cluster.yaml

If a check fails, prints one message and exits with status 2. Otherwise, exits with the status of `ray`.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError, in_brief
from pipeline.settle.placement import ACCELERATOR_TYPE, GPU_LABEL
from pipeline.system import prices

PLACEHOLDER = re.compile("EDIT|OWNER")  # matches placeholders that the user has to replace
RAY = str(Path(sys.executable).parent / "ray")
SIGN_IN = (
    "run `aws configure` or `aws sso login`, or export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
    "(AWS_PROFILE names one of several accounts)"
)
# {type of provider: resources that `make down` does not delete and that may cost money}
STAYS = {
    "aws": "the bucket, the stack with its roles and security group, and the key pair ray-autoscaler_*; to delete bucket and "
    "stack: aws s3 rb --force s3://BUCKET; aws cloudformation delete-stack --stack-name rlhf",
    "gcp": "the bucket and the service accounts; to delete the bucket: gcloud storage rm --recursive gs://BUCKET",
    "local": "~/rlhf and ~/mlflow on each machine",
}
TOOLS = {"ssh": "openssh-client", "rsync": "rsync"}  # {command that `ray up` runs: package to install}


@dataclass(frozen=True)
class NodeType:
    """Describes a node, or a type of node that the autoscaler may start."""

    resources: dict[str, float]
    max_workers: int = 1
    min_workers: int = 0
    instance: str = ""
    labels: dict[str, str] = field(default_factory=dict)


def read_cluster_file(file: Path) -> dict[str, Any]:
    """Returns the parsed cluster file. Raises InputError if the file cannot be read or is not a cluster file."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{file}: cannot be read ({error}); set CLUSTER=FILE for another file") from error
    if not isinstance(config, dict) or "provider" not in config:
        raise InputError(f"{file}: expected a cluster file for `ray up`, with a `provider` section")
    return config


def worker_types(config: dict[str, Any]) -> dict[str, NodeType]:
    """Returns {name: node type} for all node types except the head's. Adds the resource that Ray names after the type of GPU."""
    types = {}
    for name, kind in (config.get("available_node_types") or {}).items():
        if name == config.get("head_node_type"):
            continue
        resources = {key: float(value) for key, value in (kind.get("resources") or {}).items()}
        labels = kind.get("labels") or {}
        if gpu := labels.get(GPU_LABEL):  # Ray's resource has the name A100 for both A100-40G and A100-80G
            resources.setdefault(f"{ACCELERATOR_TYPE}{re.sub('^A100-.*', 'A100', gpu)}", 1.0)
        limit = int(kind.get("max_workers", config.get("max_workers", 2)))
        types[name] = NodeType(resources, limit, int(kind.get("min_workers", 0)), _instance(kind), labels)
    return types


def _instance(kind: dict[str, Any]) -> str:
    node = kind.get("node_config") or {}
    return node.get("InstanceType") or node.get("machineType") or ""


def types_of(name: str) -> tuple[dict[str, NodeType], int]:
    """Returns the worker types and the maximum number of workers of a cluster, or ({}, 0) if this machine lacks its cluster
    file."""
    file = Path(os.environ.get("CLUSTER", "cluster.yaml"))
    config = read_cluster_file(file) if name and file.is_file() else {}
    if not config or config.get("cluster_name") != name:
        return {}, 0
    return worker_types(config), int(config.get("max_workers", 2))


def check_cluster_file(file: Path) -> dict[str, Any]:
    """Returns the parsed cluster file. Raises InputError for missing tools, missing files to mount, and unedited placeholders."""
    config = read_cluster_file(file)
    for tool, package in TOOLS.items():
        if not shutil.which(tool):
            raise InputError(f"`ray up` needs {tool}; install the package {package}")
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    if unedited := [
        f"{file}:{n}: {line.strip()}" for n, line in lines if PLACEHOLDER.search(line.split("#")[0])
    ]:
        raise InputError(
            "fill in these lines; a comment at each line explains how:\n  " + "\n  ".join(unedited)
        )
    for remote, local in (config.get("file_mounts") or {}).items():
        if not os.path.exists(os.path.expanduser(local)):
            hint = "; run ray get-auth-token --generate" if "auth_token" in local else ""
            raise InputError(f"{file}: file_mounts: {remote}: there is no {local}{hint}")
    for name, kind in (config.get("available_node_types") or {}).items():
        if config["provider"]["type"] == "aws" and not kind["node_config"].get("SecurityGroupIds"):
            problem = "missing, so Ray would open port 22 to the world; use the security group of jobs/cloud/aws.yaml"
            raise InputError(problem, key=f"{file}: {name}.node_config.SecurityGroupIds")
    idle = [name for name, kind in worker_types(config).items() if kind.min_workers]
    if idle and _idle_hours(config):
        problem = "an idle head shuts itself down (HEAD_IDLE_HOURS), but these workers would keep running"
        raise InputError(f"{problem}; set 0, or remove HEAD_IDLE_HOURS", key=f"{file}: {idle[0]}.min_workers")
    return config


def _idle_hours(config: dict[str, Any]) -> str | None:
    """Returns the hours without a job after which the head shuts itself down, or None if the head never shuts itself down."""
    match = re.search(r"\bHEAD_IDLE_HOURS=(\S+)", " ".join(config.get("head_start_ray_commands") or []))
    return match and match[1]


def describe_cluster(config: dict[str, Any]) -> str:
    """Returns a text with the nodes that `ray up` or the autoscaler starts, their prices, and when they are shut down."""
    provider = config["provider"]
    location = provider.get("region") or provider.get("head_ip") or provider.get("module", "")
    lines = [f"cluster {config['cluster_name']!r} on {provider['type']} {location}"]
    head = (config.get("available_node_types") or {}).get(config.get("head_node_type"), {})
    if instance := _instance(head):
        hours = _idle_hours(config)
        until = (
            f"`make down`, or {hours} hours without a job" if hours else "`make down`, even if no job runs"
        )
        price = _price(NodeType({}, instance=instance))
        lines.append(f"  now            1 x {instance}, {price}, until {until}")
    types = worker_types(config)
    for name, kind in types.items():
        count = f"{kind.min_workers} to {kind.max_workers}"
        lines.append(f"  when jobs ask  {count} x {kind.instance} ({name}), {_price(kind)}")
    if types:
        minutes = config.get("idle_timeout_minutes", 5)
        lines.append(
            f"  at most {config.get('max_workers', 2)} workers; idle workers above the minimum are terminated after {minutes} minutes"
        )
    return "\n".join(lines)


def _price(kind: NodeType) -> str:
    """Returns a text with a node's hourly price: the price of the instance type if known, or else the price of the GPUs."""
    table = prices.read_prices()
    gpus = table.gpus.get(kind.labels.get(GPU_LABEL, ""), 0.0) * kind.resources.get("GPU", 0)
    dollars = table.instances.get(kind.instance) or gpus
    if not dollars:
        return "price unknown"
    return f"{'spot, below ' if kind.labels.get('market') == 'spot' else ''}${dollars:.2f} an hour ({table.date})"


def check_account(config: dict[str, Any]) -> None:
    """Raises InputError if the user is not signed in to AWS. Without this check, Ray would print a traceback."""
    if config["provider"]["type"] != "aws":
        return
    try:
        import boto3

        boto3.client("sts", region_name=config["provider"]["region"]).get_caller_identity()
    except ModuleNotFoundError as error:
        problem = f"{error.name} is not installed here"
        raise InputError(f'{problem}; run .venv/bin/pip install -c constraints.txt -e ".[cloud]"') from error
    except Exception as error:  # botocore raises many types of exceptions
        raise InputError(f"you are not signed in to AWS ({in_brief(error)}); {SIGN_IN}") from error


# {our subcommand: (subcommand of `ray`, arguments after the cluster file)}
VERBS = {
    "up": ("up", "--disable-usage-stats"),
    "status": ("exec", "RAY_AUTH_MODE=token ray status"),
    "dashboard": ("dashboard",),
    "down": ("down",),
}


def run_ray(verb: str, file: Path, options: list[str]) -> None:
    """Checks the file and the account, then replaces this process by `ray`. Before `down`, the head saves MLflow's data."""
    config = check_cluster_file(file) if verb == "up" else read_cluster_file(file)
    check_account(config)
    environment = dict(os.environ)
    if verb == "up":
        print(describe_cluster(config), flush=True)
        # Ray's default, autoscaler 2, supports labels and priorities. On your own machines, autoscaler 2 counts the head as a
        # worker and starts one worker too few (ray 2.60, LocalNodeProvider).
        environment["RAY_UP_enable_autoscaler_v2"] = "0" if config["provider"]["type"] == "local" else "1"
    if verb == "down":
        subprocess.run([RAY, "exec", str(file), "bash ~/rlhf/start-node.sh stop"])
        print(f"not deleted: {STAYS.get(config['provider']['type'], 'see your provider')}", flush=True)
    command, *arguments = VERBS[verb]
    os.execve(RAY, [RAY, command, str(file), *arguments, *options], environment)


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) < 2 or arguments[0] not in VERBS:
            raise InputError(f"expected {', '.join(VERBS)}, a cluster file, and options of `ray`")
        verb, file, *options = arguments
        run_ray(verb, Path(file), options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
