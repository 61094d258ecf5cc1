"""Tests that the KubeRay manifests of job files are valid for the operator and Kueue."""

import importlib
import shlex
import subprocess
import urllib.request

import pytest
import yaml
from running import ROOT

from pipeline.cloud import rayjob
from pipeline.commands.run import ORDER, overrides_of
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
    """Returns every pod of a RayJob: head, workers, submitter."""
    cluster = made["spec"]["rayClusterSpec"]
    templates = [
        cluster["headGroupSpec"]["template"],
        *(one["template"] for one in cluster["workerGroupSpecs"]),
    ]
    return [one["spec"] for one in [*templates, made["spec"]["submitterPodTemplate"]]]


def test_the_shipped_manifest_is_the_one_that_its_command_makes(capsys, monkeypatch):
    text = SHIPPED.read_text()
    words = shlex.split(text.splitlines()[0].removeprefix("# Made by: "))
    start = words.index("python")
    for variable in words[:start]:
        monkeypatch.setenv(*variable.split("=", 1))
    assert words[start : start + 3] == ["python", "-m", "pipeline.cloud.rayjob"]
    assert made(capsys, *words[start + 3 :]) == text


def test_workers_get_what_the_job_asks_for(capsys, h100):
    overrides = ["run.storage_path=/mnt/runs", MLFLOW]
    manifest = yaml.safe_load(made(capsys, "jobs/llama3-8b/sft.yaml", *overrides))
    spec = manifest["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert group["labels"] == {"ray.io/accelerator-type": "H100"}
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts == {"rlhf-runs": "/mnt/runs", "rlhf-models": "/models"}  # the operator adds /dev/shm
    assert {"name": "HF_HOME", "value": "/models"} in container["env"]  # the base is fetched once
    head = spec["rayClusterSpec"]["headGroupSpec"]
    accounts = [one["template"]["spec"]["serviceAccountName"] for one in (head, group)]
    # the service account that may start pods is not the workers'
    assert accounts == ["rlhf-head", "rlhf-worker"]
    assert "tolerations" not in head["template"]["spec"]
    # The dashboard must answer the operator's pod, so it listens on all interfaces. The token protects it.
    assert head["rayStartParams"]["dashboard-host"] == "0.0.0.0"
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    command = [
        "python",
        "-m",
        "pipeline",
        "sft",
        "jobs/llama3-8b/sft.yaml",
        *overrides,
        "run.name=llama3-8b-sft",
    ]
    assert spec["entrypoint"] == shlex.join(command)


def test_workers_of_a_fixed_number_share_pods_of_up_to_a_node(h100, monkeypatch, capsys):
    def shape(job, *overrides):
        (group,) = groups(job, *overrides)
        assert group["minReplicas"] == group["replicas"]
        wanted = limits(group)
        return (
            group["replicas"],
            group["maxReplicas"],
            wanted["nvidia.com/gpu"],
            wanted["cpu"],
            wanted["memory"],
        )

    assert shape("jobs/llama3-8b/sft.yaml") == (1, 1, "4", "32", "256Gi")
    twelve = ["scaling.num_workers=12", "data.batch_size=24"]
    assert shape("jobs/llama3-8b/sft.yaml", *twelve) == (2, 2, "6", "48", "384Gi")
    assert shape("jobs/llama3-8b/sft.yaml", "scaling.num_workers=[1,4]") == (1, 4, "1", "8", "64Gi")
    assert shape("jobs/llama3-8b/sft.yaml", "scaling.placement_strategy=SPREAD") == (4, 4, "1", "8", "64Gi")
    assert shape("jobs/llama3-70b/sft.yaml") == (1, 1, "8", "64", "512Gi")  # STRICT_PACK
    monkeypatch.setenv("NODE_GPUS", "4")
    assert shape("jobs/llama3-8b/sft.yaml", *twelve) == (3, 3, "4", "32", "256Gi")
    says = "NODE_GPUS: found 4, but 8 workers have to share one node"
    assert says in refused(capsys, "jobs/llama3-70b/sft.yaml", *SHARED_STORAGE)
    monkeypatch.setenv("NODE_GPUS", "many")
    assert "NODE_GPUS: found many, expected a number" in refused(
        capsys, "jobs/llama3-8b/sft.yaml", *SHARED_STORAGE
    )


def test_only_a_range_of_workers_has_an_autoscaler():
    def cluster(*overrides):
        return rayjob.manifest(["jobs/demo/sft.yaml"], [*SHARED_STORAGE, *overrides])["spec"][
            "rayClusterSpec"
        ]

    assert "enableInTreeAutoscaling" not in cluster("scaling.num_workers=2")
    ranged = cluster("scaling.num_workers=[1,2]")
    assert ranged["enableInTreeAutoscaling"] and ranged["autoscalerOptions"]["version"] == "v2"


def test_kueue_takes_what_names_a_queue(monkeypatch, capsys):
    """Checks the rules of Kueue's webhook for RayJobs (v0.19): Kueue starts the job, and the job ends its cluster."""
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
    says = "QUEUE: Kueue takes no cluster that grows"
    assert says in refused(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE, "scaling.num_workers=[1,2]")
    monkeypatch.setenv("SCHEDULE", "0 3 * * 1")
    assert says in refused(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE)


def test_a_folder_is_one_job_that_resumes_if_it_is_applied_again():
    overrides = ["run.storage_path=/mnt/runs", MLFLOW, "ppo.run.name=mine"]
    manifest = rayjob.manifest(["jobs/demo"], overrides)
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("RayJob", "demo")
    command = shlex.split(manifest["spec"]["entrypoint"])
    assert command[:5] == ["python", "-m", "pipeline", "run", "jobs/demo"]
    jobs = [load_job(f"jobs/demo/{one}.yaml", overrides_of(one, command[5:]), one) for one in ORDER]
    assert [job.run.name for job in jobs] == ["demo-sft", "demo-rm", "mine", "demo-evaluate"]
    # identical workers share a pod group
    assert len(manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]) == 1
    assert manifest["spec"]["activeDeadlineSeconds"] == 72 * 3600


def test_arguments_that_make_no_manifest_are_refused(monkeypatch, capsys):
    sft, serve, shared = "jobs/demo/sft.yaml", "jobs/demo/serve.yaml", ["run.storage_path=/mnt/runs", MLFLOW]
    says = "use one folder, one serve.yaml without SCHEDULE, or job files of other stages"
    for paths in ([serve, sft], [sft, serve], ["jobs/demo", "jobs/demo/kto.yaml"]):
        assert f"{shlex.join(paths)}: not one manifest; {says}" in refused(capsys, *paths, *shared)
    for port in (0, 9000):
        only = (
            f"serve.port: found {port}, but the operator asks and opens port 8000 only; set serve.port=8000"
        )
        assert only in refused(capsys, serve, *shared, f"serve.port={port}")
    monkeypatch.setenv("SCHEDULE", "0 3 * * 1")
    assert says in refused(capsys, serve, *shared)
    again = "run.name: the schedule's second job would find this run finished, and train nothing (mine)"
    assert again in refused(capsys, sft, *shared, "run.name=mine")
    assert again in refused(capsys, "jobs/demo", *shared, "ppo.run.name=mine")
    monkeypatch.delenv("SCHEDULE")
    for wrong in ("abc", "=b", "a=b,", "a=b=c"):
        monkeypatch.setenv("NODE_SELECTOR", wrong)
        says = f"NODE_SELECTOR: found {wrong!r}, expected NAME=VALUE,..."
        assert says in refused(capsys, sft, *shared)


def test_paths_that_no_pod_has_are_named(tmp_path, capsys):
    def warned(*overrides):
        assert rayjob.main(["jobs/demo/sft.yaml", "run.storage_path=/mnt/runs", MLFLOW, *overrides]) == 0
        return capsys.readouterr().err

    there = ["model.name_or_path=/models/llama", "data.eval=/mnt/runs/rows.jsonl"]
    assert warned(*there) == ""
    rows = tmp_path / "rows.jsonl"
    for path in (str(rows), "my/rows.jsonl", "jobs/../rows.jsonl", "/mnt/runs2/rows.jsonl"):
        says = f"warning: data.train: {path!r} is neither in the image, which has jobs/ of this folder, nor below"
        assert warned(f"data.train={path}").startswith(says)


def test_a_schedule_starts_new_runs_of_several_stages(monkeypatch, capsys):
    """Schedules feedback -> kto -> evaluate for every Monday, one after another in one cluster."""
    monkeypatch.setenv("SCHEDULE", "0 3 * * 1")
    text = made(capsys, "jobs/own/kto.yaml", "jobs/own/evaluate.yaml", *SHARED_STORAGE)
    manifest = yaml.safe_load(text)
    assert manifest["kind"] == "RayCronJob" and manifest["spec"]["schedule"] == "0 3 * * 1"
    job = manifest["spec"]["jobTemplate"]
    assert "SCHEDULE=0 3 * * 1" in text.splitlines()[0]
    shell, option, line = shlex.split(job["entrypoint"])
    commands = [shlex.split(one) for one in line.split(" && ")]
    assert (shell, option) == ("bash", "-c") and "run.name" not in line
    assert [one[3:5] for one in commands] == [
        ["kto", "jobs/own/kto.yaml"],
        ["evaluate", "jobs/own/evaluate.yaml"],
    ]
    # The command as `ray job submit` passes it to the shell
    said = subprocess.check_output(
        subprocess.list2cmdline(["bash", "-c", "echo 'a b' && echo c"]), shell=True, text=True
    )
    assert said == "a b\nc\n"


def test_each_job_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setenv("GPU", "H100")
    monkeypatch.setenv("NODE_SELECTOR", "a=b")
    long = "n" * 46
    # names must begin with a letter
    names = {f"{long}-x": long, "7B_run": "rlhf-7b-run", f"7{long}": f"rlhf-7{'n' * 41}"}
    for run, name in (None, "llama3-8b-sft"), *names.items():
        more = [f"run.name={run}"] if run else []
        made = rayjob.manifest(["jobs/llama3-8b/sft.yaml"], [*SHARED_STORAGE, *more])
        assert made["metadata"]["name"] == name


def test_the_gpu_and_its_nodes_have_to_be_named(capsys, monkeypatch):
    """Shows why: Ray trusts a pod's label, so on a node with another GPU the workers would run out of memory."""
    job = ["jobs/llama3-70b-qlora/ppo.yaml", *SHARED_STORAGE]
    assert "GPU: found A100-80G, H100, H200, expected one of in(A100-80G,H100,H200)" in refused(capsys, *job)
    monkeypatch.setenv("GPU", "L40S")
    assert "GPU: found L40S, expected one of in(A100-80G,H100,H200)" in refused(capsys, *job)
    monkeypatch.setenv("GPU", "H100")
    assert "NODE_SELECTOR: missing; Ray believes the label H100" in refused(capsys, *job)
    monkeypatch.setenv("NODE_SELECTOR", "cloud.google.com/gke-accelerator=nvidia-h100-80gb")
    [group] = groups(job[0])
    assert group["labels"] == {"ray.io/accelerator-type": "H100"}
    selector = {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert group["template"]["spec"]["nodeSelector"] == selector


def test_secrets_are_named_and_never_written(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    text = made(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE)
    assert "hf_" not in text
    for pod in pods(yaml.safe_load(text)):
        assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "rlhf", "optional": True}}]


def test_pods_pass_the_restricted_standard_and_may_write_their_volumes():
    ours = pods(rayjob.manifest(["jobs/demo/sft.yaml"], [*SHARED_STORAGE]))
    platform = yaml.safe_load_all((ROOT / "jobs/cloud/kubernetes.yaml").read_text())
    postgres, mlflow = (
        one["spec"]["template"]["spec"] for one in platform if "template" in one.get("spec", {})
    )
    for pod in [*ours, mlflow, postgres]:
        user, (container,) = pod["securityContext"], pod["containers"]
        assert user["runAsNonRoot"] and user["seccompProfile"] == {"type": "RuntimeDefault"}
        # ray and users come from the Dockerfile, postgres from PostgreSQL's image
        assert (user["runAsUser"], user["fsGroup"]) == ((999, 999) if pod is postgres else (1000, 100))
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_folder_of_one_pod_and_an_image_of_nobody_are_refused(capsys, monkeypatch):
    assert "would lie inside one pod" in refused(capsys, "jobs/demo/sft.yaml")
    for image in ("", "ghcr.io/OWNER/rlhf:0.1.0"):
        monkeypatch.setenv("IMAGE", image)
        says = f"IMAGE: found {image!r}, expected an image that you pushed: make image REGISTRY=..."
        assert says in refused(capsys, "jobs/demo/sft.yaml", *SHARED_STORAGE)


def test_rollout_workers_have_pods_of_their_own(h100, monkeypatch):
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


def test_a_service_starts_the_application_that_serve_starts(storage, monkeypatch, capsys):
    """Lets Ray Serve read the configuration, whose import path builds the application from the job."""
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeDeploySchema
    from toy_models import registered

    manifest = yaml.safe_load(made(capsys, "jobs/demo/serve.yaml", "run.storage_path=/mnt/runs", MLFLOW))
    assert manifest["kind"] == "RayService"
    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.route_prefix == "/" and get_app_code_version(application)
    module, _, name = application.import_path.partition(":")
    registered(storage)
    monkeypatch.setenv("RLHF_SERVE_TOKENS", "a" * 32)
    policies = "serve.policies={toy: models:/toy-policy@champion}"
    policies = [
        policies,
        "serve.rewards={}",
        f"run.storage_path={storage}",
        "model.name_or_path=jobs/demo/model",
    ]
    built = getattr(importlib.import_module(module), name)({**application.args, "overrides": policies})
    assert built._bound_deployment.name == "server"


def test_the_platform_has_what_the_manifests_name():
    """Checks jobs/cloud/kubernetes.yaml: the pods' claims, accounts and secret exist, and MLflow has the documented address."""
    there = {
        (one["kind"], one["metadata"]["name"]): one
        for one in yaml.safe_load_all((ROOT / "jobs/cloud/kubernetes.yaml").read_text())
    }
    named = set()
    for pod in pods(rayjob.manifest(["jobs/own"], ["run.storage_path=/mnt/runs", MLFLOW])):
        named |= {
            ("PersistentVolumeClaim", one["persistentVolumeClaim"]["claimName"]) for one in pod["volumes"]
        }
        named |= {("ServiceAccount", pod["serviceAccountName"]), ("Secret", "rlhf")}
    assert len(named) == 5 and named <= there.keys()
    for claim in ("rlhf-runs", "rlhf-models"):
        assert there["PersistentVolumeClaim", claim]["spec"]["accessModes"] == ["ReadWriteMany"]
    server = there["Deployment", "mlflow"]["spec"]["template"]["spec"]["containers"][0]
    assert "mlflow server" in server["args"][0] and "postgresql://" in server["args"][0]
    assert (
        there["Service", "mlflow"]["spec"]["ports"] == [{"port": 5000}] and ("Service", "postgres") in there
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "paths"), [("rayjob", ["jobs/own"]), ("rayservice", ["jobs/own/serve.yaml"]),
                                             ("raycronjob", ["jobs/own/kto.yaml"])])  # fmt: skip
def test_kuberay_has_every_field(kind, paths, monkeypatch):
    """Checks the schemas of KubeRay 1.7.0, made strict: the operator drops an unknown field silently."""
    jsonschema = pytest.importorskip("jsonschema")
    try:
        text = urllib.request.urlopen(CRDS.format(kind), timeout=30).read()
    except OSError as error:
        pytest.skip(f"needs {CRDS.format(kind)} ({error})")
    if kind == "raycronjob":
        monkeypatch.setenv("SCHEDULE", "0 3 * * 1")
    else:
        monkeypatch.setenv("QUEUE", "team-a")
    monkeypatch.setenv("PRIORITY_CLASS", "training")
    [schema] = [
        one["schema"]["openAPIV3Schema"]
        for one in yaml.safe_load(text)["spec"]["versions"]
        if one["name"] == "v1"
    ]
    jsonschema.validate(rayjob.manifest(paths, ["run.storage_path=/mnt/runs", MLFLOW]), closed(schema))


def closed(schema):
    """Returns a schema that rejects unknown fields."""
    if isinstance(schema, dict):
        schema = {key: closed(value) for key, value in schema.items() if key != "x-kubernetes-int-or-string"}
        if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema["additionalProperties"] = False
    return schema
