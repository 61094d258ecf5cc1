"""Converts a job file to a RayJob of KubeRay, a manifest that starts a cluster for one run and then ends it.

    python -m pipeline.cloud.rayjob jobs/demo/sft.yaml run.storage_path=/mnt/runs mlflow.tracking_uri=http://mlflow:5000 \
        > sft.yaml
    kubectl create secret generic rlhf --from-literal=HF_TOKEN=$HF_TOKEN       (and MLFLOW_TRACKING_*, as needed)
    kubectl create serviceaccount rlhf-head; kubectl create serviceaccount rlhf-worker   (EKS, GKE: their access to a bucket)
    kubectl apply -f sft.yaml

jobs/rayjob.yaml is an example with rollout workers; a job of `serve` becomes a RayService, as in jobs/rayservice.yaml. Their
first lines have the commands that made them. The image is built from Dockerfile; IMAGE names another image. Storage is a
bucket, or a claim `rlhf-runs` mounted at the storage path. A base from the hub stays in a claim `rlhf-models`, which outlives
the job (both ReadWriteMany). If a job selects GPUs, GPU names the one of its pods (default: the first that the job allows) and
NODE_SELECTOR the Kubernetes nodes with it, e.g. cloud.google.com/gke-accelerator=nvidia-h100-80gb. Rollout workers of a ppo
job get separate pods, on the nodes of ROLLOUT_NODE_SELECTOR, e.g. cloud.google.com/gke-spot=true. The pods of each group have
the labels of scaling.label_selector and rollout.label_selector. Secrets are named, never written.
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
from pipeline.on_ray import placement
from pipeline.on_ray.placement import Bundle, Group
from pipeline.planning.plan import GPUS
from pipeline.system import storage

IMAGE = f"ghcr.io/OWNER/rlhf:{version('rlhf-pipeline')}"  # published by release.yml from the account OWNER
CLAIM = "rlhf-runs"
# The operator lets the head's account start and end the cluster's pods. The workers' account may not.
ACCOUNTS = {"ray-head": "rlhf-head", "ray-worker": "rlhf-worker"}
# {section of the job: environment variable that selects the Kubernetes nodes of its pods}
NODE_SELECTORS = {"scaling": "NODE_SELECTOR", "rollout": "ROLLOUT_NODE_SELECTOR"}
NAME = 47  # characters of a RayJob's name that the operator accepts
# Most clusters keep pods without a GPU away from GPU nodes by this taint.
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


class Lines(str):
    """A text that YAML writes as a block."""


class Dumper(yaml.SafeDumper):
    """Dumps YAML as yaml.safe_dump does, and Lines as blocks."""


Dumper.add_representer(
    Lines, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def manifest(job: Job, path: str, overrides: list[str]) -> dict[str, Any]:
    """Returns the RayJob that runs `path` with `overrides`, or the RayService that serves it.

    Raises InputError for storage that pods do not share, and for a GPU that the job does not allow.
    """
    storage_path = job.run.storage_path
    if not storage.is_remote(storage_path) and not os.path.isabs(storage_path):
        advice = f"use s3://BUCKET/runs, or /mnt/runs for the claim {CLAIM}"
        raise InputError(f"{storage_path!r} would lie inside one pod; {advice}", key="run.storage_path")
    given = job.run.name or f"{Path(path).parent.name or 'rlhf'}-{job.stage}"  # profile and stage
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:NAME].rstrip("-")
    ray = version("ray")
    cluster = {
        "rayVersion": ray,
        # The operator creates a secret with a token and gives it to every pod. Without it, anyone who reaches port
        # 8265 of the head can run code in the cluster. Needs KubeRay 1.6.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 600},  # v1 knows no label selectors
        "headGroupSpec": {
            # Two of the head's CPUs tokenize rows. The others run Ray's control processes and the driver. The operator, in
            # another pod, queries the dashboard about the job, with the token.
            "rayStartParams": {"num-cpus": "2", "dashboard-host": "0.0.0.0"},
            "template": {"spec": pod(job, "ray-head", {"cpu": "4", "memory": "16Gi"})},
        },
        "workerGroupSpecs": [group(job, one) for one in placement.groups(job)],
    }
    top = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}}
    if job.stage == "serve":
        application = {
            "name": job.run.name or "serve",
            "route_prefix": "/",
            "import_path": "pipeline.commands.serve:build",
            "args": {"job": path, "overrides": [*overrides, "serve.host=0.0.0.0"]},
        }
        # Ray Serve's proxy on each node
        proxy = {"host": "0.0.0.0", "port": job.serve.port}
        config = {"http_options": proxy, "applications": [application]}
        text = Lines(yaml.safe_dump(config, sort_keys=False, width=120))
        return {**top, "kind": "RayService", "spec": {"serveConfigV2": text, "rayClusterConfig": cluster}}
    return {
        **top,
        "spec": {
            "entrypoint": shlex.join(["python", "-m", "pipeline", job.stage, path, *overrides]),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,  # time to read the logs of the pods
            "backoffLimit": 0,  # no retries here: run.max_failures restarts workers
            "rayClusterSpec": cluster,
        },
    }


def group(job: Job, workers: Group) -> dict[str, Any]:
    """Returns a group of pods, one for each worker, with labels that satisfy the label_selector of `section`."""
    each, section = workers.each, workers.section
    labels = labels_of(each, section)
    if gpus := math.ceil(each.resources.get("GPU", 0)):
        requests = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
    else:
        requests = {"cpu": str(math.ceil(each.resources.get("CPU", 1))), "memory": "8Gi"}
    return {
        "groupName": "workers" if section == "scaling" else "rollout-workers",
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": workers.most,
        # No CPUs in GPU pods, so that tasks without a GPU do not start one.
        "rayStartParams": {"num-cpus": "0"} if gpus else {},
        **({"labels": labels} if labels else {}),
        "template": {"spec": pod(job, "ray-worker", requests, os.environ.get(NODE_SELECTORS[section]))},
    }


def labels_of(each: Bundle, section: str) -> dict[str, str]:
    """Returns the labels that worker pods need for a worker's selector; without them, the autoscaler starts no pod."""
    labels = {}
    for key, value in each.selector.items():
        if placement.matches({key: value}, {}):  # it only excludes values, so no label is needed
            continue
        names = re.sub(r"^in\((.*)\)$", r"\1", value).split(",")
        if key == placement.GPU_LABEL:
            names = [os.environ["GPU"]] if os.environ.get("GPU") else list(GPUS)
        wanted = {key: value}
        fitting = [name for name in names if placement.matches(wanted, {key: name})]
        if not fitting:
            what = "GPU" if key == placement.GPU_LABEL else key
            found = f"{what}: found {', '.join(names)}, expected one of {value}"
            raise InputError(found, key=f"{section}.label_selector")
        labels[key] = fitting[0]
    return labels


def pod(
    job: Job, container: str, resources: dict[str, str], node_selector: str | None = None
) -> dict[str, Any]:
    """Returns a pod: the image, the secrets by name, memory for Ray's object store, the shared folders.

    `node_selector` has the labels of the Kubernetes nodes that it may run on, as NAME=VALUE,...
    """
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if not storage.is_remote(job.run.storage_path):
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": CLAIM}})  # ReadWriteMany
        mounts.append({"name": "runs", "mountPath": job.run.storage_path})
    env: list[dict[str, Any]] = [
        {"name": n, "valueFrom": {"secretKeyRef": {"name": "rlhf", "optional": True, "key": n}}}
        for n in FORWARDED
    ]
    if not os.path.isdir(job.model.name_or_path):  # a folder would be part of the image
        # ReadWriteMany; the hub's cache
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": "rlhf-models"}})
        mounts.append({"name": "models", "mountPath": "/models"})
        env.append({"name": "HF_HOME", "value": "/models"})
    cuda = any(one.each.resources.get("GPU") for one in placement.groups(job))
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
                "image": os.environ.get("IMAGE", f"{IMAGE}-cuda" if cuda else IMAGE),
                "workingDir": "/home/ray/rlhf",  # the project in the image
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
            raise InputError("expected a job file, for example jobs/demo/sft.yaml run.storage_path=...")
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
