"""The RayJob manifest: made from a job file, and of the shape that KubeRay's operator asks for."""

import importlib
import shlex

import pytest
import yaml
from running import ROOT

from pipeline.cloud import rayjob
from pipeline.config import load_job

SHIPPED = [ROOT / "jobs/rayjob.yaml", ROOT / "jobs/rayservice.yaml"]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("IMAGE", "GPU", "NODE_SELECTOR", "ROLLOUT_NODE_SELECTOR"):
        monkeypatch.delenv(name, raising=False)


MLFLOW = "mlflow.tracking_uri=http://m:5000"
SHARED_STORAGE = ["run.storage_path=s3://b/runs", MLFLOW]


def made(capsys, *arguments):
    assert rayjob.main(list(arguments)) == 0
    return capsys.readouterr().out


def groups(job, *overrides):
    """The groups of workers of the manifest of a job."""
    given = [*SHARED_STORAGE, *overrides]
    spec = rayjob.manifest(load_job(job, given), job, given)["spec"]
    return spec["rayClusterSpec"]["workerGroupSpecs"]


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_manifest_is_the_one_that_its_command_makes(shipped, capsys):
    text = shipped.read_text()
    command = shlex.split(text.splitlines()[0].partition("pipeline.cloud.rayjob ")[2])
    assert yaml.safe_load(made(capsys, *command)) == yaml.safe_load(text)


def test_workers_get_what_the_job_asks_for(capsys):
    overrides = ["run.storage_path=/mnt/runs", MLFLOW]
    spec = yaml.safe_load(made(capsys, "jobs/llama3-8b/sft.yaml", *overrides))["spec"]
    job = load_job("jobs/llama3-8b/sft.yaml", overrides)
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert (group["minReplicas"], group["maxReplicas"]) == (0, job.workers[1])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert group["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    # the first that the job's selector allows
    assert group["labels"] == {"ray.io/accelerator-type": "A100-40G"}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "runs": "/mnt/runs", "models": "/models"}
    assert {"name": "HF_HOME", "value": "/models"} in container["env"]  # the base is fetched once
    head = spec["rayClusterSpec"]["headGroupSpec"]
    accounts = [one["template"]["spec"]["serviceAccountName"] for one in (head, group)]
    assert accounts == ["rlhf-head", "rlhf-worker"]  # what may start pods is not what runs on workers
    assert "tolerations" not in head["template"]["spec"]
    # The dashboard has to answer the operator's pod, so it listens on all interfaces: the token is what guards it
    assert head["rayStartParams"]["dashboard-host"] == "0.0.0.0"
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    command = ["python", "-m", "pipeline", "sft", "jobs/llama3-8b/sft.yaml", *overrides]
    assert spec["entrypoint"] == shlex.join(command)


def test_each_job_has_a_name_of_its_own():
    for more, name in ([], "llama3-8b-sft"), ([f"run.name={'n' * 46}-x"], "n" * 46):
        job, given = "jobs/llama3-8b/sft.yaml", [*SHARED_STORAGE, *more]
        assert rayjob.manifest(load_job(job, given), job, given)["metadata"]["name"] == name


def test_the_gpu_and_its_nodes_can_be_named(capsys, monkeypatch):
    monkeypatch.setenv("GPU", "H100")
    monkeypatch.setenv("NODE_SELECTOR", "cloud.google.com/gke-accelerator=nvidia-h100-80gb")
    [group] = groups("jobs/llama3-70b-qlora/ppo.yaml")
    assert group["labels"] == {"ray.io/accelerator-type": "H100"}
    selector = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert group["template"]["spec"]["nodeSelector"] == selector
    monkeypatch.setenv("GPU", "L40S")
    assert rayjob.main(["jobs/llama3-70b-qlora/ppo.yaml", *SHARED_STORAGE]) == 2
    assert "GPU: found L40S, expected one of in(A100-80G,H100,H200)" in capsys.readouterr().err


def test_secrets_are_named_and_never_written(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    text = made(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE)
    assert "hf_" not in text and "secretKeyRef" in text and "key: HF_TOKEN" in text


def test_a_folder_of_one_pod_is_refused(capsys):
    assert rayjob.main(["jobs/demo/sft.yaml"]) == 2
    assert "would lie inside one pod" in capsys.readouterr().err


def test_rollout_workers_have_pods_of_their_own(monkeypatch):
    monkeypatch.setenv("ROLLOUT_NODE_SELECTOR", "cloud.google.com/gke-spot=true")
    selector = "rollout.label_selector={market: 'in(spot,preemptible)', ray.io/accelerator-type: L40S}"
    trainers, rollouts = groups("jobs/llama3-8b/ppo.yaml", "rollout.num_workers=3", selector)
    assert (rollouts["groupName"], rollouts["maxReplicas"]) == ("rollout-workers", 3)
    assert rollouts["labels"] == {"market": "spot", "ray.io/accelerator-type": "L40S"}
    assert rollouts["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    assert "nodeSelector" not in trainers["template"]["spec"] and "market" not in trainers["labels"]
    limits = rollouts["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    excludes = "rollout.label_selector={market: '!on-demand'}"
    assert "labels" not in groups("jobs/llama3-8b/ppo.yaml", "rollout.num_workers=2", excludes)[1]


def test_a_service_starts_the_application_that_serve_starts(storage, monkeypatch):
    """Ray Serve reads the configuration, and its import path makes the application from the job."""
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeDeploySchema
    from toy_models import registered

    spec = yaml.safe_load(SHIPPED[1].read_text())["spec"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    [application] = config.applications
    assert application.route_prefix == "/" and get_app_code_version(application)
    module, _, name = application.import_path.partition(":")
    registered(storage)
    monkeypatch.setenv("RLHF_SERVE_TOKENS", "a" * 32)
    policies = "serve.policies={toy: models:/toy-policy@champion}"
    policies = [policies, "serve.rewards={}", f"run.storage_path={storage}"]
    built = getattr(importlib.import_module(module), name)({**application.args, "overrides": policies})
    assert built._bound_deployment.name == "server"
