"""Reads cluster.yaml on the submitter's machine: what `make up` will start, and which nodes a job may get.

    python -m pipeline.cloud.clusterfile up|status|dashboard|down cluster.yaml

Exit status 2 with one message if the file is wrong or you are not signed in to AWS, else Ray's.
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

PLACEHOLDER = re.compile("EDIT|OWNER")  # marks the values that the user has to fill in
RAY = str(Path(sys.executable).parent / "ray")
SIGN_IN = (
    "run `aws configure` or `aws sso login`, or export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
    "(AWS_PROFILE names one of several accounts)"
)
# {type of provider: what `make down` leaves, which may cost money}
STAYS = {
    "aws": "the bucket, the stack with its roles and security group, and the key pair ray-autoscaler_*; to end them, too: "
    "aws s3 rb --force s3://BUCKET; aws cloudformation delete-stack --stack-name rlhf",
    "gcp": "the bucket and the service accounts; to end the bucket, too: gcloud storage rm --recursive gs://BUCKET",
    "local": "~/rlhf and ~/mlflow on each machine",
}
TOOLS = {"ssh": "openssh-client", "rsync": "rsync"}  # {command that `ray up` runs: its package}


@dataclass(frozen=True)
class NodeType:
    """A node, or one kind of node that the autoscaler may start."""

    resources: dict[str, float]
    max_workers: int = 1
    min_workers: int = 0
    instance: str = ""
    labels: dict[str, str] = field(default_factory=dict)


def read(file: Path) -> dict[str, Any]:
    """Returns the parsed file. Raises InputError if it is missing or no mapping."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{file}: cannot be read ({error}); CLUSTER=file.yaml names another") from error
    if not isinstance(config, dict) or "provider" not in config:
        raise InputError(f"{file}: expected a cluster file for `ray up`, with a `provider` section")
    return config


def worker_types(config: dict[str, Any]) -> dict[str, NodeType]:
    """Returns the node types of a cluster file, except its head's, with the resource that Ray adds for their GPU."""
    found = {}
    for name, kind in (config.get("available_node_types") or {}).items():
        if name == config.get("head_node_type"):
            continue
        resources = {key: float(value) for key, value in (kind.get("resources") or {}).items()}
        labels = kind.get("labels") or {}
        if gpu := labels.get(GPU_LABEL):  # A100 for both sizes of A100
            resources.setdefault(f"{ACCELERATOR_TYPE}{re.sub('^A100-.*', 'A100', gpu)}", 1.0)
        most = int(kind.get("max_workers", config.get("max_workers", 2)))
        found[name] = NodeType(resources, most, int(kind.get("min_workers", 0)), _instance(kind), labels)
    return found


def _instance(kind: dict[str, Any]) -> str:
    node = kind.get("node_config") or {}
    return node.get("InstanceType") or node.get("machineType") or ""


def types_of(name: str) -> tuple[dict[str, NodeType], int]:
    """Returns (types, maximum of workers) of the cluster file if the cluster of that name was started from it, else ({}, 0)."""
    file = Path(os.environ.get("CLUSTER", "cluster.yaml"))
    config = read(file) if name and file.is_file() else {}
    if not config or config.get("cluster_name") != name:
        return {}, 0
    return worker_types(config), int(config.get("max_workers", 2))


def check(file: Path) -> dict[str, Any]:
    """Checks what needs no cloud account: tools, lines to fill in, files to mount, the token. `ray up` checks the rest."""
    config = read(file)
    for tool, package in TOOLS.items():
        if not shutil.which(tool):
            raise InputError(f"`ray up` needs {tool}; install the package {package}")
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    if unedited := [
        f"{file}:{n}: {line.strip()}" for n, line in lines if PLACEHOLDER.search(line.split("#")[0])
    ]:
        raise InputError("fill in these lines; the comment at each says how:\n  " + "\n  ".join(unedited))
    for remote, local in (config.get("file_mounts") or {}).items():
        if not os.path.exists(os.path.expanduser(local)):
            hint = "; make one with: ray get-auth-token --generate" if "auth_token" in local else ""
            raise InputError(f"{file}: file_mounts: {remote}: there is no {local}{hint}")
    for name, kind in (config.get("available_node_types") or {}).items():
        if config["provider"]["type"] == "aws" and not kind["node_config"].get("SecurityGroupIds"):
            why = "missing; Ray would create a security group that opens port 22 to the world; use the group in jobs/cloud/aws.yaml"
            raise InputError(why, key=f"{file}: {name}.node_config.SecurityGroupIds")
    warm = [name for name, kind in worker_types(config).items() if kind.min_workers]
    if warm and "HEAD_IDLE_HOURS=" in " ".join(config.get("head_start_ray_commands") or []):
        why = "the head ends itself when idle (HEAD_IDLE_HOURS), and would leave such a worker running"
        raise InputError(f"{why}; set 0, or remove HEAD_IDLE_HOURS", key=f"{file}: {warm[0]}.min_workers")
    return config


def summary(file: Path, config: dict[str, Any]) -> str:
    """Returns what `ray up` will start, for how long it costs money, and how much."""
    provider, types = config["provider"], worker_types(config)
    where = provider.get("region") or provider.get("head_ip") or provider.get("module", "")
    lines = [f"{file}: cluster {config['cluster_name']!r} on {provider['type']} {where}"]
    kinds = config.get("available_node_types") or {}
    head = NodeType({}, instance=_instance(kinds.get(config.get("head_node_type"), {})))
    if head.instance:
        hours = re.search(r"\bHEAD_IDLE_HOURS=(\S+)", " ".join(config.get("head_start_ray_commands") or []))
        until = f"or {hours[1]} hours without a job" if hours else "even if no job runs"
        lines.append(f"  now            1 x {head.instance}, {_price(head)}, until `make down`, {until}")
    for name, kind in types.items():
        lines.append(
            f"  when jobs ask  {kind.min_workers} to {kind.max_workers} x {kind.instance} ({name}), {_price(kind)}; those above "
            f"{kind.min_workers} end after {config.get('idle_timeout_minutes', 5)} idle minutes"
        )
    lines += [f"  {ip}" for ip in [provider.get("head_ip"), *provider.get("worker_ips", [])] if ip]
    if types:
        most = config.get("max_workers", 2)
        lines.append(f"  at most {most} workers at a time; disks are deleted with their nodes")
    return "\n".join(lines)


def _price(kind: NodeType) -> str:
    """Returns the dollars an hour of a node: of its instance if prices.yaml has it, else of its GPUs."""
    known = prices.read_prices()
    gpus = known.gpus.get(kind.labels.get(GPU_LABEL, ""), 0.0) * kind.resources.get("GPU", 0)
    dollars = known.instances.get(kind.instance) or gpus
    if not dollars:
        return "price unknown"
    return f"{'spot, below ' if kind.labels.get('market') == 'spot' else ''}${dollars:.2f} an hour ({known.date})"


def check_account(config: dict[str, Any]) -> None:
    """Raises InputError if you are not signed in to AWS: Ray would end with a traceback. Google's names the remedy."""
    if config["provider"]["type"] != "aws":
        return
    try:
        import boto3

        boto3.client("sts", region_name=config["provider"]["region"]).get_caller_identity()
    except ModuleNotFoundError as error:
        what = f"{error.name} is not installed here"
        raise InputError(f'{what}; run .venv/bin/pip install -c constraints.txt -e ".[cloud]"') from error
    except Exception as error:  # of many types
        raise InputError(f"aws does not let you in ({in_brief(error)}); {SIGN_IN}") from error


# What follows `ray` and the cluster file, by verb.
VERBS = {
    "up": ("up", "--disable-usage-stats"),
    "status": ("exec", "RAY_AUTH_MODE=token ray status"),
    "dashboard": ("dashboard",),
    "down": ("down",),
}


def run(verb: str, file: Path, options: list[str]) -> None:
    """Checks the file and the account, and becomes `ray`. `down` first lets the head finish writing, if it answers."""
    config = check(file) if verb == "up" else read(file)
    check_account(config)
    environment = dict(os.environ)
    if verb == "up":
        print(summary(file, config), flush=True)
        # Autoscaler 2, Ray's default, knows labels and priorities. On your own machines it counts the head as a worker and
        # starts one too few (ray 2.60, LocalNodeProvider).
        environment["RAY_UP_enable_autoscaler_v2"] = "0" if config["provider"]["type"] == "local" else "1"
    if verb == "down":
        subprocess.run([RAY, "exec", str(file), "bash ~/rlhf/start-node.sh stop"])
        print(f"stays: {STAYS.get(config['provider']['type'], 'what the provider leaves')}", flush=True)
    command, *more = VERBS[verb]
    os.execve(RAY, [RAY, command, str(file), *more, *options], environment)


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) < 2 or arguments[0] not in VERBS:
            raise InputError(f"expected {', '.join(VERBS)}, a cluster file, and options of `ray`")
        verb, file, *options = arguments
        run(verb, Path(file), options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
