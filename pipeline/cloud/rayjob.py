"""A job file as a RayJob of KubeRay: the manifest that starts a cluster for one run, and ends it afterwards.

    python -m pipeline.cloud.rayjob jobs/demo/sft.yaml run.storage_path=/mnt/runs mlflow.tracking_uri=http://mlflow:5000 \
        > sft.yaml
    kubectl create secret generic rlhf --from-literal=HF_TOKEN=$HF_TOKEN       (and MLFLOW_TRACKING_*, as needed)
    kubectl create serviceaccount rlhf-head; kubectl create serviceaccount rlhf-worker   (EKS, GKE: their access to a bucket)
    kubectl apply -f sft.yaml

jobs/rayjob.yaml is one with rollout workers; of a job of `serve` it is a RayService, as jobs/rayservice.yaml. Their first
lines say how they were made. The image is built from jobs/cloud/Dockerfile; IMAGE names it. Storage is a bucket, or a claim
`rlhf-runs` mounted at the storage path; a base from the hub is kept in a claim `rlhf-models`, which outlives the job (both
ReadWriteMany). Where a job says which GPUs it needs, GPU names the one that its pods get (default: the first that the job
allows) and NODE_SELECTOR the Kubernetes nodes that have it, e.g. cloud.google.com/gke-accelerator=nvidia-h100-80gb. Rollout
workers of a ppo job get pods of their own, on the nodes that ROLLOUT_NODE_SELECTOR names, e.g.
cloud.google.com/gke-spot=true; the pods of each group carry the labels that scaling.label_selector and rollout.label_selector
ask for. Checked against the schema of the operator; secrets are named, never written.
"""

import math
import os
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from pipeline.cloud.submit import FORWARDED
from pipeline.config import Job, load_job
from pipeline.errors import InputError
from pipeline.planning.plan import GPUS
from pipeline.runtime import placement
from pipeline.runtime.placement import Bundle
from pipeline.system import storage

HOME = "/home/ray/rlhf"  # where jobs/cloud/Dockerfile puts the project
IMAGE = f"REGISTRY/rlhf:{version('ray')}-py311"
SECRET = "rlhf"
CLAIM = "rlhf-runs"
MODELS = "rlhf-models"  # a claim, mounted at /models: the hub's cache
# The operator gives the head's account the right to start and end pods of its cluster; the workers' has none.
ACCOUNTS = {"ray-head": "rlhf-head", "ray-worker": "rlhf-worker"}
# The variables that name the Kubernetes nodes of a group's pods, by the section of the job that the group is for.
NODE_SELECTORS = {"scaling": "NODE_SELECTOR", "rollout": "ROLLOUT_NODE_SELECTOR"}
NAME = 47  # characters of a RayJob's name that the operator accepts
# What most clusters keep pods without a GPU away from GPU nodes with.
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


class Lines(str):
    """A text that YAML shows line by line."""


class Dumper(yaml.SafeDumper):
    """yaml.safe_dump's, for Lines too."""


Dumper.add_representer(
    Lines, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def manifest(job: Job, path: str, overrides: list[str]) -> dict[str, Any]:
    """The RayJob that runs `path` with `overrides`, or the RayService that serves it.

    Raises:
        InputError: for storage that pods would not share, and a GPU that the job does not allow.
    """
    storage_path = job.run.storage_path
    if not storage.is_remote(storage_path) and not os.path.isabs(storage_path):
        raise InputError(
            f"{storage_path!r} would lie inside one pod; type run.storage_path=s3://BUCKET/runs, or "
            f"run.storage_path=/mnt/runs for the claim {CLAIM}",
            key="run.storage_path",
        )
    given = job.run.name or f"{Path(path).parent.name or 'rlhf'}-{job.stage}"  # profile and stage
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:NAME].rstrip("-")
    ray = version("ray")
    groups = [group(job, "workers", placement.bundles(job)[0], job.workers[1], "scaling")]
    if count := job.rollout_config.workers[1]:
        groups.append(group(job, "rollout-workers", placement.rollout_bundle(job), count, "rollout"))
    cluster = {
        "rayVersion": ray,
        # The operator creates a secret with a token and gives it to every pod. Without it, anyone who reaches port
        # 8265 of the head can run code in the cluster. Needs KubeRay 1.6.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 600},  # v1 knows no label selectors
        "headGroupSpec": {
            # Rows are tokenised on two of its CPUs; the others run Ray's control and the driver. The operator, in a pod
            # of its own, asks the dashboard how the job does, with the token.
            "rayStartParams": {"num-cpus": "2", "dashboard-host": "0.0.0.0"},
            "template": {"spec": pod(job, "ray-head", {"cpu": "4", "memory": "16Gi"})},
        },
        "workerGroupSpecs": groups,
    }
    top = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}}
    if job.stage == "serve":
        config = Lines(yaml.safe_dump(serve_config(job, path, overrides), sort_keys=False, width=120))
        return {**top, "kind": "RayService", "spec": {"serveConfigV2": config, "rayClusterConfig": cluster}}
    return {
        **top,
        "spec": {
            "entrypoint": shlex.join(["python", "-m", "pipeline", job.stage, path, *overrides]),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,  # the pods stay for a look at their logs
            "backoffLimit": 0,  # run.max_failures restarts workers; a job that is wrong would be wrong again
            "rayClusterSpec": cluster,
        },
    }


def serve_config(job: Job, path: str, overrides: list[str]) -> dict[str, Any]:
    """What `serve deploy` and a RayService start: the application, behind Ray Serve's proxy on each node."""
    return {
        "http_options": {"host": "0.0.0.0", "port": job.serve.port},
        "applications": [
            {
                "name": job.run.name or "serve",
                "route_prefix": "/",
                "import_path": "pipeline.commands.serve:build",
                "args": {"job": path, "overrides": [*overrides, "serve.host=0.0.0.0"]},
            }
        ],
    }


def group(job: Job, name: str, each: Bundle, count: int, section: str) -> dict[str, Any]:
    """Pods that come and go, up to `count`, each for one worker that asks for `each`.

    Args:
        section: of the job, whose label_selector the pods satisfy.
    """
    labels = labels_of(each, section)
    return {
        "groupName": name,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": count,
        # No task without a GPU starts a pod with one.
        "rayStartParams": {"num-cpus": "0"} if each.resources.get("GPU") else {},
        **({"labels": labels} if labels else {}),
        "template": {"spec": pod(job, "ray-worker", per_pod(each), os.environ.get(NODE_SELECTORS[section]))},
    }


def per_pod(each: Bundle) -> dict[str, str]:
    """Requests of one worker pod: it holds one worker of the job."""
    if gpus := math.ceil(each.resources.get("GPU", 0)):
        return {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
    return {"cpu": str(math.ceil(each.resources.get("CPU", 1))), "memory": "8Gi"}


def labels_of(each: Bundle, section: str) -> dict[str, str]:
    """Labels of worker pods that satisfy the selector of a worker: the autoscaler would else start none.

    Raises:
        InputError: when $GPU is none that the job allows.
    """
    labels = {}
    for key, value in each.selector.items():
        if placement.matches({key: value}, {}):  # it says what the label must not be
            continue
        names = re.sub(r"^in\((.*)\)$", r"\1", value).split(",")
        if key == placement.GPU_LABEL:
            names = [os.environ["GPU"]] if os.environ.get("GPU") else list(GPUS)
        wanted = {key: value}
        fitting = [name for name in names if placement.matches(wanted, {key: name})]
        if not fitting:
            what = "GPU" if key == placement.GPU_LABEL else key
            raise InputError(
                f"{what}: found {', '.join(names)}, expected one of {value}", key=f"{section}.label_selector"
            )
        labels[key] = fitting[0]
    return labels


def pod(
    job: Job, container: str, resources: dict[str, str], node_selector: str | None = None
) -> dict[str, Any]:
    """A pod: the image, the secrets by name, memory for Ray's object store, the shared folders.

    Args:
        node_selector: labels of the Kubernetes nodes that it may be on, as NAME=VALUE,...
    """
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if not storage.is_remote(job.run.storage_path):
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": CLAIM}})  # ReadWriteMany
        mounts.append({"name": "runs", "mountPath": job.run.storage_path})
    secret = {"name": SECRET, "optional": True}
    env: list[dict[str, Any]] = [
        {"name": n, "valueFrom": {"secretKeyRef": {**secret, "key": n}}} for n in FORWARDED
    ]
    if not os.path.isdir(job.model.name_or_path):  # a folder is part of the image
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": MODELS}})  # ReadWriteMany
        mounts.append({"name": "models", "mountPath": "/models"})
        env.append({"name": "HF_HOME", "value": "/models"})
    nodes: dict[str, Any] = {}
    if "nvidia.com/gpu" in resources:
        nodes["tolerations"] = [TOLERATION]
    if node_selector:
        nodes["nodeSelector"] = dict(one.split("=", 1) for one in node_selector.split(","))
    return {
        "serviceAccountName": ACCOUNTS[container],
        **nodes,
        "containers": [
            {
                "name": container,
                "image": os.environ.get("IMAGE", IMAGE),
                "workingDir": HOME,
                "env": env,
                "resources": {"requests": resources, "limits": resources},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def main(arguments: list[str]) -> int:
    try:
        if not arguments:
            raise InputError(
                "expected a job file: python -m pipeline.cloud.rayjob jobs/demo/sft.yaml run.storage_path=..."
            )
        path, *overrides = arguments
        job = load_job(path, overrides)
        rayjob = manifest(job, path, overrides)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"# Made by: python -m pipeline.cloud.rayjob {shlex.join(arguments)}")
    print("# What it is and what it needs: pipeline/cloud/rayjob.py. Apply it: kubectl apply -f THIS_FILE")
    print(yaml.dump(rayjob, Dumper=Dumper, sort_keys=False, width=120), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
