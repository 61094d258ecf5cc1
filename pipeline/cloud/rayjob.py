"""Generates a KubeRay RayJob from job files. KubeRay starts a cluster, runs the jobs, and deletes the cluster.

    python -m pipeline.cloud.rayjob jobs/velo run.storage_path=/mnt/runs mlflow.tracking_uri=http://mlflow:5000 > velo.yaml

docs/clusters.md, "Kubernetes", explains the environment variables. jobs/cloud/kubernetes.yaml sets up a namespace: claims,
accounts, a secret, and MLflow.
"""

import copy
import json
import math
import os
import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from pipeline.cloud.workload import Workload, workload_of
from pipeline.commands import run as rlhf
from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.settle import placement
from pipeline.settle.placement import Bundle, Group, Places
from pipeline.system import storage

CLAIM = "rlhf-runs"
SERVICE_PORT = 8000  # port of the Service that KubeRay creates for a RayService
MODELS = "/models"  # path at which pods mount the claim rlhf-models
# {container: its service account}. Only the head's account may start and end pods.
ACCOUNTS = {"ray-head": "rlhf-head", "ray-worker": "rlhf-worker", "ray-job-submitter": "rlhf-worker"}
# {section of the job: environment variable with the labels of the Kubernetes nodes for its pods}
NODE_SELECTORS = {"scaling": "NODE_SELECTOR", "rollout": "ROLLOUT_NODE_SELECTOR"}
VARIABLES = (
    "IMAGE", "GPU", *NODE_SELECTORS.values(), "NODE_GPUS", "QUEUE", "PRIORITY_CLASS", "SCHEDULE",
)  # fmt: skip
# {kind of manifest: maximum length of its name in KubeRay}
MAX_NAME_LENGTH = {"RayJob": 47, "RayService": 47, "RayCronJob": 36}
TEMPLATE = yaml.safe_load(Path(__file__).with_name("rayjob-template.yaml").read_text(encoding="utf-8"))


def manifest(paths: list[str], overrides: list[str]) -> dict[str, Any]:
    """Returns a RayJob or RayCronJob for a folder of jobs or for job files, or a RayService for a serve job.

    Raises InputError if pods would not share the storage, or if an environment variable is missing or contradicts a job.
    """
    jobs = load_jobs(paths, overrides)
    first_job = jobs[0]
    # {volume claim: path at which pods mount the claim}
    claims = {} if storage.is_remote(first_job.storage_path) else {CLAIM: first_job.storage_path}
    claims |= {"rlhf-models": MODELS} if any(job.downloads for job in jobs) else {}
    warn_of_paths(jobs)
    schedule, queue = os.environ.get("SCHEDULE"), os.environ.get("QUEUE")
    kind = "RayService" if first_job.port is not None else "RayCronJob" if schedule else "RayJob"
    name = profile_of(first_job.source) if Path(paths[0]).is_dir() else run_name(first_job)
    name = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    name = re.sub("^(?![a-z])", "rlhf-", name)  # Kubernetes requires that a name begins with a letter
    cluster = {"rayVersion": version("ray"), **copy.deepcopy(TEMPLATE["cluster"])}
    cluster["headGroupSpec"]["template"] = make_pod("ray-head", {"cpu": "4", "memory": "16Gi"}, claims)
    cluster["workerGroupSpecs"] = worker_groups([job.places for job in jobs], claims)
    elastic = any(group["replicas"] < group["maxReplicas"] for group in cluster["workerGroupSpecs"])
    cluster |= TEMPLATE["autoscaler"] if elastic else {}
    metadata: dict[str, Any] = {"name": name[: MAX_NAME_LENGTH[kind]].rstrip("-")}
    if queue and (elastic or schedule):
        problem = "Kueue does not accept clusters with a variable number of workers, and KubeRay does not queue scheduled jobs"
        raise InputError(f"{problem}; set scaling.num_workers to one number, or unset SCHEDULE", key="QUEUE")
    if queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    spec: dict[str, Any]
    if kind == "RayService":
        spec = {"serveConfigV2": serve_config(first_job, overrides), "rayClusterConfig": cluster}
    else:
        spec = copy.deepcopy(TEMPLATE["job"])
        spec["entrypoint"] = entrypoint(paths, jobs, overrides)
        submitter = make_pod("ray-job-submitter", {"cpu": "500m", "memory": "1Gi"}, {})
        spec["submitterPodTemplate"]["spec"] |= submitter["spec"]
        # Kueue resumes the suspended job later
        spec |= {
            "suspend": bool(queue),
            "rayClusterSpec": cluster,
        }
    if kind == "RayCronJob":
        spec = {"schedule": schedule, "jobTemplate": spec}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def load_jobs(paths: list[str], overrides: list[str]) -> list[Workload]:
    """Loads the jobs of a folder or of job files.

    Raises InputError if one manifest cannot run all jobs, if serve.port is not 8000, or if pods would not share the storage.
    """
    is_folder = Path(paths[0]).is_dir()
    loaded = (
        [*rlhf.load_profile(paths[0], overrides).values()]
        if is_folder
        else [load_job(path, overrides) for path in paths]
    )
    jobs = [workload_of(job) for job in loaded]
    serves, schedule = any(job.port is not None for job in jobs), os.environ.get("SCHEDULE")
    if ((serves or is_folder) and len(paths) > 1) or (serves and schedule):
        advice = "use one folder, one serve.yaml without SCHEDULE, or job files of other stages"
        raise InputError(f"{shlex.join(paths)}: these jobs do not fit into one manifest; {advice}")
    for job in jobs:
        if schedule and job.name:
            problem = f"found {job.name}, so the second scheduled job would find a finished run"
            raise InputError(f"{problem}; remove run.name, or unset SCHEDULE", key="run.name")
        if job.port not in (None, SERVICE_PORT):
            problem = f"found {job.port}, but KubeRay checks and opens only port {SERVICE_PORT}"
            raise InputError(f"{problem}; set serve.port={SERVICE_PORT}", key="serve.port")
        if not storage.is_remote(job.storage_path) and not os.path.isabs(job.storage_path):
            advice = f"use s3://BUCKET/runs, or /mnt/runs for the claim {CLAIM}"
            raise InputError(
                f"{job.storage_path!r} would be inside a single pod; {advice}", key="run.storage_path"
            )
    return jobs


def warn_of_paths(jobs: list[Workload]) -> None:
    """Prints a warning for each local path of a job that will not exist in the pods."""
    roots = ("jobs", "pipeline", jobs[0].storage_path, MODELS)  # the Dockerfile copies `jobs` and `pipeline`
    for key, path in dict.fromkeys(entry for job in jobs for entry in job.paths):
        if not any(Path(os.path.normpath(path)).is_relative_to(folder) for folder in roots):
            problem = "is neither in the image, which contains only jobs/ of this folder, nor below run.storage_path"
            advice = "move the file into jobs/ and run make image again, or put the file into a bucket"
            print(f"warning: {key}: {path!r} {problem}; {advice}", file=sys.stderr)


def profile_of(job_file: str) -> str:
    return Path(job_file).parent.name or "rlhf"


def run_name(job: Workload) -> str:
    """Returns a fixed run name, so that KubeRay's next attempt, or `kubectl replace --force`, resumes the run."""
    return job.name or f"{profile_of(job.source)}-{job.stage}"


def entrypoint(paths: list[str], jobs: list[Workload], overrides: list[str]) -> str:
    """Returns the driver's command: `run` for a folder of jobs, or else the commands of all job files, joined by `&&`.

    Unless the job has a schedule, the command sets run.name for each run, so that a retry resumes the run.
    """
    start, scheduled = ["python", "-m", "pipeline"], bool(os.environ.get("SCHEDULE"))
    if Path(paths[0]).is_dir():
        unnamed = not scheduled and not rlhf.common_name(overrides)
        names = [f"run.name={profile_of(jobs[0].source)}"] if unnamed else []
        return shlex.join([*start, "run", paths[0], *overrides, *names])
    commands = []
    for path, job in zip(paths, jobs, strict=True):
        names = [] if scheduled or job.name else [f"run.name={run_name(job)}"]
        commands.append(shlex.join([*start, job.stage, path, *overrides, *names]))
    return commands[0] if len(commands) == 1 else shlex.join(["bash", "-c", " && ".join(commands)])


def serve_config(job: Workload, overrides: list[str]) -> str:
    """Returns the configuration of Ray Serve for a serve job, as JSON."""
    config = copy.deepcopy(TEMPLATE["serve"])
    config["http_options"]["port"] = job.port
    config["applications"][0] |= {
        "name": job.name or "serve",
        "args": {"job": job.source, "overrides": [*overrides, "serve.host=0.0.0.0"]},
    }
    return json.dumps(config)


def worker_groups(jobs: list[Places], claims: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the pod groups of all jobs. Jobs with the same resources per worker share a group, sized for the largest job."""
    groups: dict[str, list[tuple[Group, str]]] = {}
    for places in jobs:
        strategy = places.scaling.get("placement_strategy") or "PACK"
        for workers in places.groups:
            groups.setdefault(f"{workers.section} {workers.each}", []).append((workers, strategy))
    specs: list[dict[str, Any]] = []
    for members in groups.values():
        largest = max((workers for workers, _ in members), key=lambda group: (group.most, group.fewest))
        spec = pod_group(largest, {strategy for _, strategy in members}, claims)
        count = sum(previous["groupName"].startswith(spec["groupName"]) for previous in specs)
        specs.append(spec | {"groupName": f"{spec['groupName']}-{count + 1}" if count else spec["groupName"]})
    return specs


def pod_group(workers: Group, strategies: set[str], claims: dict[str, str]) -> dict[str, Any]:
    """Returns a pod group for workers. The pods get labels that satisfy the workers' label_selector.

    If the number of training workers is fixed, several workers share a pod, so that they exchange gradients within one node.
    """
    bundle, section, count = workers.each, workers.section, workers.most
    gpus = math.ceil(bundle.resources.get("GPU", 0))
    node_gpus = os.environ.get("NODE_GPUS") or "8"
    if not re.fullmatch("[1-9][0-9]*", node_gpus):
        raise InputError(f"found {node_gpus}, expected a number above 0", key="NODE_GPUS")
    fitting = int(node_gpus) // gpus if gpus else 1  # number of workers that fit on one node
    single = section == "rollout" or workers.fewest < count or strategies & {"SPREAD", "STRICT_SPREAD"}
    per_pod = 1 if single else max(n for n in range(1, max(fitting, 1) + 1) if count % n == 0)
    if "STRICT_PACK" in strategies and section == "scaling":
        per_pod = count
        if gpus and count > fitting:
            raise InputError(
                f"found {fitting * gpus}, but all {count} workers must run on one node", "NODE_GPUS"
            )
    cpus = 8 if gpus else math.ceil(bundle.resources.get("CPU", 1))
    requests = {"cpu": str(cpus * per_pod), "memory": f"{(64 if gpus else 8) * per_pod}Gi"}
    requests |= {"nvidia.com/gpu": str(gpus * per_pod)} if gpus else {}
    labels, nodes = pod_labels(bundle, section), node_selector(section)
    if placement.GPU_LABEL in labels and not nodes:
        problem = f"missing; Ray does not check the label {labels[placement.GPU_LABEL]}; select the nodes that have this GPU"
        example = "cloud.google.com/gke-accelerator=nvidia-h100-80gb"
        raise InputError(f"{problem}, e.g. {example}", key=NODE_SELECTORS[section])
    return {
        "groupName": "workers" if section == "scaling" else "rollout-workers",
        "replicas": workers.fewest // per_pod,
        "minReplicas": workers.fewest // per_pod,
        "maxReplicas": count // per_pod,
        # GPU pods declare no CPUs to Ray, so that tasks without GPUs do not make the autoscaler start a GPU pod.
        "rayStartParams": {"num-cpus": "0"} if gpus else {},
        **({"labels": labels} if labels else {}),
        "template": make_pod("ray-worker", requests, claims, nodes),
    }


def node_selector(section: str) -> dict[str, str]:
    """Returns the labels that the Kubernetes nodes of a section's pods must have."""
    text = os.environ.get(NODE_SELECTORS[section])
    try:
        return dict(pair.split("=") for pair in text.split(",")) if text else {}
    except ValueError as error:
        raise InputError(f"found {text!r}, expected NAME=VALUE,...", key=NODE_SELECTORS[section]) from error


def pod_labels(bundle: Bundle, section: str) -> dict[str, str]:
    """Returns the labels that a pod needs so that Ray can place the workers in it."""
    labels = {}
    for key, value in bundle.selector.items():
        if placement.matches_labels({key: value}, {}):  # a selector that only excludes values needs no label
            continue
        names = re.sub(r"^in\((.*)\)$", r"\1", value).split(",")
        if key == placement.GPU_LABEL and os.environ.get("GPU"):
            names = [os.environ["GPU"]]
        fitting = [name for name in names if placement.matches_labels({key: value}, {key: name})]
        label = "GPU" if key == placement.GPU_LABEL else key
        if not fitting or (label == "GPU" and len(fitting) > 1):
            raise InputError(
                f"{label}: found {', '.join(names)}, expected one of {value}", f"{section}.label_selector"
            )
        labels[key] = fitting[0]
    return labels


def make_pod(
    container: str,
    resources: dict[str, str],
    claims: dict[str, str],
    nodes: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Returns a pod that mounts `claims`, and that runs on nodes with the labels `nodes`."""
    pod = copy.deepcopy(TEMPLATE["pod"])
    spec, (main,) = pod["spec"], pod["spec"]["containers"]
    image = os.environ.get("IMAGE", "")
    if not image or "OWNER" in image:
        problem = f"found {image!r}, expected an image that you pushed; run make image REGISTRY=..."
        raise InputError(problem, key="IMAGE")
    spec["serviceAccountName"] = ACCOUNTS[container]
    main |= {"name": container, "image": image}
    main["resources"] = {"requests": resources, "limits": dict(resources)}
    if MODELS in claims.values():
        main["env"] = [{"name": "HF_HOME", "value": MODELS}]
    for claim, path in claims.items():
        spec["volumes"].append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
        main["volumeMounts"].append({"name": claim, "mountPath": path})
    if "nvidia.com/gpu" in resources:
        spec["tolerations"] = copy.deepcopy(TEMPLATE["tolerations"])
    if nodes:
        spec["nodeSelector"] = nodes
    if priority_class := os.environ.get("PRIORITY_CLASS"):
        spec["priorityClassName"] = priority_class
    return pod


def main(arguments: list[str]) -> int:
    try:
        paths = [argument for argument in arguments if "=" not in argument]
        if not paths:
            raise InputError("expected a folder of jobs or job files, such as jobs/velo run.storage_path=...")
        document = manifest(paths, [argument for argument in arguments if "=" in argument])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    command = shlex.join([*variables, "python", "-m", "pipeline.cloud.rayjob", *arguments])
    print(f"# Made by: {command}")
    print("# docs/clusters.md explains this file. To apply it: kubectl apply -f THIS_FILE")
    print(yaml.safe_dump(document, sort_keys=False, width=120), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
