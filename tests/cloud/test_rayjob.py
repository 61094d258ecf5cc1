"""Tests the KubeRay manifests of jobs: commands, pods, labels, volumes, and the rules of KubeRay and Kueue."""

import importlib
import shlex
import subprocess
import urllib.request

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from running import ROOT

from pipeline.cloud import rayjob
from pipeline.commands import run as rlhf
from pipeline.job import load_job

SHIPPED = ROOT / "jobs/rayjob.yaml"
MLFLOW = "mlflow.tracking_uri=http://m:5000"
SHARED_STORAGE = ["run.storage_path=s3://b/runs", MLFLOW]
CRDS = "https://raw.githubusercontent.com/ray-project/kuberay/v1.7.0/helm-chart/kuberay-operator/crds/ray.io_{}s.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in rayjob.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IMAGE", "registry.io/me/rlhf:1")


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setenv("GPU", "H100")
    monkeypatch.setenv("NODE_SELECTOR", "cloud.google.com/gke-accelerator=nvidia-h100-80gb")
    monkeypatch.setenv("ROLLOUT_NODE_SELECTOR", "cloud.google.com/gke-spot=true")


def made(capsys, *arguments):
    assert rayjob.main(list(arguments)) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert rayjob.main(list(arguments)) == 2
    return capsys.readouterr().err


def groups(job, *overrides):
    """Returns the worker groups in a job's manifest."""
    spec = rayjob.manifest([job], [*SHARED_STORAGE, *overrides])["spec"]
    return spec["rayClusterSpec"]["workerGroupSpecs"]


def limits(group):
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]


def pods(made):
    """Returns all pod templates of a RayJob: head, workers and submitter."""
    cluster = made["spec"]["rayClusterSpec"]
    templates = [
        cluster["headGroupSpec"]["template"],
        *(one["template"] for one in cluster["workerGroupSpecs"]),
    ]
    return [one["spec"] for one in [*templates, made["spec"]["submitterPodTemplate"]]]


def test_the_shipped_manifest_is_the_one_that_its_command_makes(capsys, monkeypatch):
    """The manifest has the accounts, security settings and secrets of all pods, and a group of rollout workers."""
    text = SHIPPED.read_text()
    words = shlex.split(text.splitlines()[0].removeprefix("# Made by: "))
    start = words.index("python")
    for variable in words[:start]:
        monkeypatch.setenv(*variable.split("=", 1))
    assert words[start : start + 3] == ["python", "-m", "pipeline.cloud.rayjob"]
    assert made(capsys, *words[start + 3 :]) == text


def test_workers_get_what_the_job_asks_for(capsys, h100):
    overrides = ["run.storage_path=/mnt/runs", MLFLOW]
    spec = yaml.safe_load(made(capsys, "jobs/llama3-8b/sft.yaml", *overrides))["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert group["labels"] == {"ray.io/accelerator-type": "H100"}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    # The KubeRay operator adds /dev/shm.
    assert mounts == {"rlhf-runs": "/mnt/runs", "rlhf-models": "/models"}
    assert {"name": "HF_HOME", "value": "/models"} in container["env"]
    assert "tolerations" not in spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    command = ["python", "-m", "pipeline", "sft", "jobs/llama3-8b/sft.yaml", *overrides]
    assert spec["entrypoint"] == shlex.join([*command, "run.name=llama3-8b-sft"])


def test_a_fixed_number_of_workers_shares_pods_of_up_to_a_node(h100, monkeypatch, capsys):
    def shape(job, *overrides):
        (group,) = groups(job, *overrides)
        assert group["minReplicas"] == group["replicas"]
        requested = limits(group)
        return (group["replicas"], group["maxReplicas"], requested["nvidia.com/gpu"], requested["cpu"])

    assert shape("jobs/llama3-8b/sft.yaml") == (1, 1, "4", "32")
    twelve = ["scaling.num_workers=12", "data.batch_size=24"]
    assert shape("jobs/llama3-8b/sft.yaml", *twelve) == (2, 2, "6", "48")
    assert shape("jobs/llama3-8b/sft.yaml", "scaling.num_workers=[1,4]") == (1, 4, "1", "8")
    assert shape("jobs/llama3-8b/sft.yaml", "scaling.placement_strategy=SPREAD") == (4, 4, "1", "8")
    assert shape("jobs/llama3-70b/sft.yaml") == (1, 1, "8", "64"), "STRICT_PACK is one node"
    monkeypatch.setenv("NODE_GPUS", "4")
    assert shape("jobs/llama3-8b/sft.yaml", *twelve) == (3, 3, "4", "32")
    message = "NODE_GPUS: found 4, but all 8 workers must run on one node"
    assert message in refused(capsys, "jobs/llama3-70b/sft.yaml", *SHARED_STORAGE)
    monkeypatch.setenv("NODE_GPUS", "many")
    message = "NODE_GPUS: found many, expected a number"
    assert message in refused(capsys, "jobs/llama3-8b/sft.yaml", *SHARED_STORAGE)


def test_a_range_of_workers_has_an_autoscaler():
    """The shipped manifest has a fixed number of workers, and no autoscaler."""
    spec = rayjob.manifest(["jobs/demo/sft.yaml"], [*SHARED_STORAGE, "scaling.num_workers=[1,2]"])["spec"]
    ranged = spec["rayClusterSpec"]
    assert ranged["enableInTreeAutoscaling"] and ranged["autoscalerOptions"]["version"] == "v2"


def test_kueue_accepts_a_job_with_a_queue(monkeypatch, capsys):
    """Checks the rules of Kueue's webhook for RayJobs (v0.19)."""
    monkeypatch.setenv("QUEUE", "team-a")
    monkeypatch.setenv("PRIORITY_CLASS", "training")
    manifest = rayjob.manifest(["jobs/demo"], SHARED_STORAGE)
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    spec, cluster = manifest["spec"], manifest["spec"]["rayClusterSpec"]
    assert spec["suspend"] and spec["shutdownAfterJobFinishes"] and "clusterSelector" not in spec
    assert not cluster.get("enableInTreeAutoscaling")
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    assert len(set(names)) == len(names) < 18 and "head" not in names
    assert {pod["priorityClassName"] for pod in pods(manifest)} == {"training"}
    message = "QUEUE: Kueue does not accept clusters with a variable number of workers"
    assert message in refused(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE, "scaling.num_workers=[1,2]")
    monkeypatch.setenv("SCHEDULE", "0 3 * * 1")
    assert message in refused(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE)


def test_a_folder_is_one_job_whose_runs_have_names():
    manifest = rayjob.manifest(["jobs/demo"], ["run.storage_path=/mnt/runs", MLFLOW])
    command = shlex.split(manifest["spec"]["entrypoint"])
    jobs = rlhf.load_profile("jobs/demo", command[5:])
    assert [job.run.name for job in jobs.values()] == [f"{stage}-demo" for stage in jobs]
    named = rayjob.manifest(["jobs/demo"], ["run.storage_path=/mnt/runs", MLFLOW, "run.name=mine"])
    assert named["spec"]["entrypoint"].endswith("run.name=mine")
    groups = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert len(groups) == 1, "identical workers share a pod group"


@pytest.mark.parametrize("paths", [["jobs/own/kto.yaml", "jobs/own/evaluate.yaml"], ["jobs/own"]])
def test_a_schedule_starts_new_runs(paths, monkeypatch, capsys):
    """The entrypoint of a scheduled RayJob runs all job files, one after another."""
    monkeypatch.setenv("SCHEDULE", "0 3 * * 1")
    text = made(capsys, *paths, *SHARED_STORAGE)
    manifest = yaml.safe_load(text)
    assert manifest["kind"] == "RayCronJob" and manifest["spec"]["schedule"] == "0 3 * * 1"
    assert "SCHEDULE=0 3 * * 1" in text.splitlines()[0]
    words = shlex.split(manifest["spec"]["jobTemplate"]["entrypoint"])
    assert "run.name" not in text
    if len(paths) == 1:
        assert words[3:5] == ["run", "jobs/own"]
        return
    assert words[:2] == ["bash", "-c"]
    commands = [shlex.split(one)[3:5] for one in words[2].split(" && ")]
    assert commands == [["kto", paths[0]], ["evaluate", paths[1]]]
    # `ray job submit` joins the words with list2cmdline and passes the line to a shell
    line = subprocess.list2cmdline(["bash", "-c", "echo 'a b' && echo c"])
    assert subprocess.check_output(line, shell=True, text=True) == "a b\nc\n"


def test_arguments_that_make_no_manifest_are_refused(monkeypatch, capsys):
    sft, shared = "jobs/demo/sft.yaml", ["run.storage_path=/mnt/runs", MLFLOW]
    serve, message = (
        "jobs/demo/serve.yaml",
        "these jobs do not fit into one manifest; use one folder, one serve.yaml",
    )
    assert "expected a folder of jobs or job files" in refused(capsys, *shared)
    for paths in ([serve, sft], [sft, serve], ["jobs/demo", "jobs/demo/kto.yaml"]):
        assert f"{shlex.join(paths)}: {message}" in refused(capsys, *paths, *shared)
    with monkeypatch.context() as patch:
        patch.setenv("SCHEDULE", "0 3 * * 1")
        assert message in refused(capsys, serve, *shared)
        for job, name in (
            (sft, "run.name=mine"),
            ("jobs/demo", "run.name=a"),
            ("jobs/demo", "ppo.run.name=b"),
        ):
            assert "so the second scheduled job would find a finished run" in refused(
                capsys, job, *shared, name
            )
    assert "would be inside a single pod" in refused(capsys, sft)
    message = "serve.port: found 9000, but KubeRay checks and opens only port 8000; set serve.port=8000"
    assert message in refused(capsys, serve, *shared, "serve.port=9000")
    for wrong in ("abc", "a=b,", "a=b=c"):
        monkeypatch.setenv("NODE_SELECTOR", wrong)
        message = f"NODE_SELECTOR: found {wrong!r}, expected NAME=VALUE,..."
        assert message in refused(capsys, sft, *shared)
    monkeypatch.setenv("IMAGE", "ghcr.io/OWNER/rlhf:0.1.0")
    message = "IMAGE: found 'ghcr.io/OWNER/rlhf:0.1.0', expected an image that you pushed; run make image"
    assert message in refused(capsys, sft, *shared)


def test_local_paths_that_pods_do_not_have_are_named(tmp_path, capsys):
    def warned(*overrides):
        assert rayjob.main(["jobs/demo/sft.yaml", "run.storage_path=/mnt/runs", MLFLOW, *overrides]) == 0
        return capsys.readouterr().err

    there = ["model.name_or_path=/models/llama", "data.eval=/mnt/runs/rows.jsonl"]
    assert warned(*there) == ""
    rows = tmp_path / "rows.jsonl"
    for path in (str(rows), "jobs/../rows.jsonl", "/mnt/runs2/rows.jsonl"):
        warning = f"warning: data.train: {path!r} is neither in the image, which contains only jobs/ of this folder, nor below"
        assert warned(f"data.train={path}").startswith(warning)


@pytest.mark.parametrize(
    ("run", "name"),
    [("7B_run", "rlhf-7b-run"), (f"{'n' * 46}-x", "n" * 46), (f"7{'n' * 46}", f"rlhf-7{'n' * 41}")],
)
def test_a_name_follows_the_rules_of_kubernetes(run, name):
    manifest = rayjob.manifest(["jobs/demo/sft.yaml"], [*SHARED_STORAGE, f"run.name={run}"])
    assert manifest["metadata"]["name"] == name


def test_the_gpu_and_its_nodes_have_to_be_named(capsys, monkeypatch):
    """Ray does not check that a pod's GPU label is true. On a node with a smaller GPU, workers would run out of memory."""
    job = ["jobs/llama3-70b-qlora/ppo.yaml", *SHARED_STORAGE]
    assert "GPU: found A100-80G, H100, H200, expected one of in(A100-80G,H100,H200)" in refused(capsys, *job)
    monkeypatch.setenv("GPU", "L40S")
    assert "GPU: found L40S, expected one of in(A100-80G,H100,H200)" in refused(capsys, *job)
    monkeypatch.setenv("GPU", "H100")
    assert "NODE_SELECTOR: missing; Ray does not check the label H100" in refused(capsys, *job)
    monkeypatch.setenv("NODE_SELECTOR", "cloud.google.com/gke-accelerator=nvidia-h100-80gb")
    [group] = groups(job[0])
    assert group["labels"] == {"ray.io/accelerator-type": "H100"}
    selector = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert group["template"]["spec"]["nodeSelector"] == selector


def test_a_manifest_contains_no_token_of_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    assert "hf_" not in made(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE)


def test_rollout_workers_have_separate_pods(h100, monkeypatch):
    monkeypatch.setenv("GPU", "L40S")
    selector = "rollout.label_selector={market: 'in(spot,preemptible)', ray.io/accelerator-type: L40S}"
    trainers, rollouts = groups("jobs/llama3-8b/ppo.yaml", "rollout.num_workers=3", selector)
    assert (rollouts["groupName"], rollouts["replicas"]) == ("rollout-workers", 3)
    assert rollouts["labels"] == {"market": "spot", "ray.io/accelerator-type": "L40S"}
    assert rollouts["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    assert "gke-spot" not in str(trainers) and "market" not in trainers["labels"]
    assert limits(rollouts)["nvidia.com/gpu"] == "1"
    excludes = "rollout.label_selector={market: '!on-demand'}"
    assert "labels" not in groups("jobs/llama3-8b/ppo.yaml", "rollout.num_workers=2", excludes)[1]


def test_ray_serve_accepts_the_configuration_of_a_service(capsys):
    manifest = yaml.safe_load(made(capsys, "jobs/demo/serve.yaml", "run.storage_path=/mnt/runs", MLFLOW))
    assert manifest["kind"] == "RayService"
    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.route_prefix == "/"
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    job = load_job(application.args["job"], application.args["overrides"], "serve")
    assert (job.serve.host, job.serve.port) == ("0.0.0.0", 8000)


def test_the_platform_has_what_the_manifests_name():
    text = (ROOT / "jobs/cloud/kubernetes.yaml").read_text()
    platform = {(one["kind"], one["metadata"]["name"]) for one in yaml.safe_load_all(text)}
    named = {("Secret", "rlhf"), ("Service", "mlflow")}
    for pod in pods(rayjob.manifest(["jobs/own"], ["run.storage_path=/mnt/runs", MLFLOW])):
        claims = [one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]]
        named |= {("PersistentVolumeClaim", claim) for claim in claims}
        named.add(("ServiceAccount", pod["serviceAccountName"]))
    assert len(named) == 6 and named <= platform


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path"),
    [("rayjob", "jobs/own"), ("rayservice", "jobs/own/serve.yaml"), ("raycronjob", "jobs/own/kto.yaml")],
)
def test_kuberay_has_every_field(kind, path, monkeypatch):
    """Uses a strict copy of KubeRay's schemas, because the KubeRay operator silently drops unknown fields."""
    try:
        text = urllib.request.urlopen(CRDS.format(kind), timeout=30).read()
    except OSError as error:
        pytest.skip(f"needs {CRDS.format(kind)} ({error})")
    monkeypatch.setenv("PRIORITY_CLASS", "training")
    monkeypatch.setenv(*(("SCHEDULE", "0 3 * * 1") if kind == "raycronjob" else ("QUEUE", "team-a")))
    [schema] = [
        one["schema"]["openAPIV3Schema"]
        for one in yaml.safe_load(text)["spec"]["versions"]
        if one["name"] == "v1"
    ]
    jsonschema.validate(rayjob.manifest([path], ["run.storage_path=/mnt/runs", MLFLOW]), closed(schema))


def closed(schema):
    """Returns a schema that rejects unknown fields."""
    if isinstance(schema, dict):
        schema = {key: closed(value) for key, value in schema.items() if key != "x-kubernetes-int-or-string"}
        if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema["additionalProperties"] = False
    return schema
