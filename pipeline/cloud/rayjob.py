"""A job file as a RayJob of KubeRay: the manifest that starts a cluster for one run, and ends it afterwards.

    python -m pipeline.cloud.rayjob jobs/demo/sft.yaml run.storage_path=/mnt/runs mlflow.tracking_uri=http://mlflow:5000 \
        > jobs/rayjob.yaml
    kubectl create secret generic rlhf --from-literal=HF_TOKEN=$HF_TOKEN       (and MLFLOW_TRACKING_*, as needed)
    kubectl apply -f jobs/rayjob.yaml

The image is built from jobs/cloud/Dockerfile; IMAGE names it. Storage is a bucket, or a claim `rlhf-runs` mounted at the
storage path. Checked against the schema of the operator; secrets are named, never written.
"""

import os
import re
import shlex
import sys
from importlib.metadata import version
from typing import Any

import yaml

from pipeline.cloud.submit import FORWARDED
from pipeline.config import Job, load_job
from pipeline.errors import InputError
from pipeline.system import storage

HOME = "/home/ray/rlhf"  # where jobs/cloud/Dockerfile puts the project
IMAGE = f"REGISTRY/rlhf:{version('ray')}-py311"
SECRET = "rlhf"
CLAIM = "rlhf-runs"


def manifest(job: Job, path: str, overrides: list[str]) -> dict[str, Any]:
    """The RayJob that runs `path` with `overrides`.

    Raises:
        InputError: for storage that pods would not share.
    """
    storage_path = job.run.storage_path
    if not storage.is_remote(storage_path) and not os.path.isabs(storage_path):
        raise InputError(
            f"{storage_path!r} would lie inside one pod; type run.storage_path=s3://BUCKET/runs, or "
            f"run.storage_path=/mnt/runs for the claim {CLAIM}",
            key="run.storage_path",
        )
    name = re.sub(r"[^a-z0-9-]+", "-", (job.run.name or f"rlhf-{job.stage}").lower()).strip("-")
    ray = version("ray")
    least, most = job.workers
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
                "autoscalerOptions": {"idleTimeoutSeconds": 600},
                "headGroupSpec": {
                    # No tasks on the head: it runs Ray's control and the driver. The operator, in a pod of its own, asks
                    # the dashboard how the job does, with the token.
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": {"spec": pod(job, "ray-head", {"cpu": "2", "memory": "8Gi"})},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": 0,
                        "minReplicas": 0,
                        "maxReplicas": max(most, least),
                        "rayStartParams": {},
                        "template": {"spec": pod(job, "ray-worker", per_pod(job))},
                    }
                ],
            },
        },
    }


def per_pod(job: Job) -> dict[str, str]:
    """Requests of one worker pod: it holds one worker of the job, and a CPU for data tasks."""
    each = dict(job.scaling.get("resources_per_worker") or {"CPU": 1})
    gpus = each.get("GPU", 1 if job.scaling.get("use_gpu") else 0)
    asked = {"cpu": str(int(each.get("CPU", 1)) + 1), "memory": "48Gi" if gpus else "8Gi"}
    return asked | ({"nvidia.com/gpu": str(int(gpus) or 1)} if gpus else {})


def pod(job: Job, container: str, resources: dict[str, str]) -> dict[str, Any]:
    """A pod: the image, the secrets by name, memory for Ray's object store, the shared folder if there is one."""
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if not storage.is_remote(job.run.storage_path):
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": CLAIM}})  # ReadWriteMany
        mounts.append({"name": "runs", "mountPath": job.run.storage_path})
    secret = {"name": SECRET, "optional": True}
    return {
        "containers": [
            {
                "name": container,
                "image": os.environ.get("IMAGE", IMAGE),
                "workingDir": HOME,
                "env": [{"name": n, "valueFrom": {"secretKeyRef": {**secret, "key": n}}} for n in FORWARDED],
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
