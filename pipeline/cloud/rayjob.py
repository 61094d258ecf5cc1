"""A job file as a RayJob of KubeRay: the manifest that starts a cluster for one run, and ends it afterwards.

    python -m pipeline.cloud.rayjob jobs/demo/sft.yaml run.storage_path=/mnt/runs mlflow.tracking_uri=http://mlflow:5000 \
        > jobs/rayjob.yaml
    kubectl create secret generic rlhf --from-literal=HF_TOKEN=$HF_TOKEN       (and MLFLOW_TRACKING_*, as needed)
    kubectl create serviceaccount rlhf-head; kubectl create serviceaccount rlhf-worker      (on EKS and GKE: their access to a bucket)
    kubectl apply -f jobs/rayjob.yaml

The image is built from jobs/cloud/Dockerfile; IMAGE names it. Storage is a bucket, or a claim `rlhf-runs` mounted at the
storage path; a base from the hub is kept in a claim `rlhf-models`, which outlives the job (both ReadWriteMany). Where a job
says which GPUs it needs, GPU names the one that its pods get (default: the first that the job allows) and NODE_SELECTOR
the Kubernetes nodes that have it, e.g. cloud.google.com/gke-accelerator=nvidia-h100-80gb. Checked against the schema of the
operator; secrets are named, never written.
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
from pipeline.system import storage

HOME = "/home/ray/rlhf"  # where jobs/cloud/Dockerfile puts the project
IMAGE = f"REGISTRY/rlhf:{version('ray')}-py311"
SECRET = "rlhf"
CLAIM = "rlhf-runs"
MODELS = "rlhf-models"  # a claim, mounted at /models: the hub's cache
# The operator gives the head's account the right to start and end pods of its cluster; the workers' has none.
ACCOUNTS = {"ray-head": "rlhf-head", "ray-worker": "rlhf-worker"}
NAME = 47  # characters of a RayJob's name that the operator accepts
# What most clusters keep pods without a GPU away from GPU nodes with.
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def manifest(job: Job, path: str, overrides: list[str]) -> dict[str, Any]:
    """The RayJob that runs `path` with `overrides`.

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
    ray, needs_gpu = version("ray"), bool(placement.bundles(job)[0].resources.get("GPU"))
    labels = gpu_labels(job)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": shlex.join(["python", "-m", "pipeline", job.stage, path, *overrides]),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,  # the pods stay for a look at their logs
            "backoffLimit": 0,  # run.max_failures restarts workers; a job that is wrong would be wrong again
            "rayClusterSpec": {
                "rayVersion": ray,
                # The operator creates a secret with a token and gives it to every pod. Without it, anyone who reaches port
                # 8265 of the head can run code in the cluster. Needs KubeRay 1.6.
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {
                    "version": "v2",
                    "idleTimeoutSeconds": 600,
                },  # v1 knows no label selectors
                "headGroupSpec": {
                    # Rows are tokenised on two of its CPUs; the others run Ray's control and the driver. The operator, in a pod
                    # of its own, asks the dashboard how the job does, with the token.
                    "rayStartParams": {"num-cpus": "2", "dashboard-host": "0.0.0.0"},
                    "template": {"spec": pod(job, "ray-head", {"cpu": "4", "memory": "16Gi"})},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": 0,
                        "minReplicas": 0,
                        "maxReplicas": job.workers[1],
                        # No task without a GPU starts a pod with one.
                        "rayStartParams": {"num-cpus": "0"} if needs_gpu else {},
                        **({"labels": labels} if labels else {}),
                        "template": {"spec": pod(job, "ray-worker", per_pod(job))},
                    }
                ],
            },
        },
    }


def per_pod(job: Job) -> dict[str, str]:
    """Requests of one worker pod: it holds one worker of the job."""
    each = placement.bundles(job)[0].resources
    if gpus := math.ceil(each.get("GPU", 0)):
        return {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
    return {"cpu": str(math.ceil(each.get("CPU", 1))), "memory": "8Gi"}


def gpu_labels(job: Job) -> dict[str, str]:
    """The label of the worker pods' GPUs, without which the autoscaler would start none for a job with a selector.

    Raises:
        InputError: when $GPU is none that the job allows.
    """
    selector = placement.bundles(job)[0].selector
    if placement.GPU_LABEL not in selector:
        return {}
    wanted = {placement.GPU_LABEL: selector[placement.GPU_LABEL]}
    names = [os.environ["GPU"]] if os.environ.get("GPU") else list(GPUS)
    for name in names:
        if placement.matches(wanted, label := {placement.GPU_LABEL: name}):
            return label
    raise InputError(
        f"GPU: found {', '.join(names)}, expected one of {wanted[placement.GPU_LABEL]}",
        key="scaling.label_selector",
    )


def pod(job: Job, container: str, resources: dict[str, str]) -> dict[str, Any]:
    """A pod: the image, the secrets by name, memory for Ray's object store, the shared folders."""
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
    on_gpus: dict[str, Any] = {}
    if "nvidia.com/gpu" in resources:
        on_gpus["tolerations"] = [TOLERATION]
        if selector := os.environ.get("NODE_SELECTOR"):
            on_gpus["nodeSelector"] = dict(one.split("=", 1) for one in selector.split(","))
    return {
        "serviceAccountName": ACCOUNTS[container],
        **on_gpus,
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
    print(yaml.safe_dump(rayjob, sort_keys=False, width=120), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
