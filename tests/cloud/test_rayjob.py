"""The RayJob manifest: made from a job file, and of the shape that KubeRay's operator asks for."""

import shlex

import pytest
import yaml
from running import ROOT, SHARED

from pipeline.cloud import rayjob
from pipeline.config import load_job

CRD = SHARED / "schemas/ray.io_rayjobs.yaml"
SHIPPED = ROOT / "jobs/rayjob.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("IMAGE", raising=False)


def made(capsys, *arguments):
    assert rayjob.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_shipped_manifest_is_the_one_that_its_command_makes(capsys):
    text = SHIPPED.read_text()
    command = shlex.split(text.splitlines()[0].partition("pipeline.cloud.rayjob ")[2])
    assert yaml.safe_load(made(capsys, *command)) == yaml.safe_load(text)


@pytest.mark.skipif(not CRD.exists(), reason="the operator's schema is not here")
@pytest.mark.parametrize(
    "path", ["jobs/demo/sft.yaml", "jobs/llama3-8b/ppo.yaml", "jobs/llama3-8b-qlora/rm.yaml"]
)
def test_the_operator_takes_it(path, capsys):
    import jsonschema

    versions = {
        one["name"]: one["schema"]["openAPIV3Schema"]
        for one in yaml.safe_load(CRD.read_text())["spec"]["versions"]
    }
    manifest = yaml.safe_load(
        made(capsys, path, "run.storage_path=s3://bucket/runs", "mlflow.tracking_uri=http://m:5000")
    )
    schema = strict(versions[manifest["apiVersion"].partition("/")[2]])
    jsonschema.validate(manifest, schema)
    manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imagee"):
        jsonschema.validate(manifest, schema)


def strict(schema):
    """The schema with unknown keys refused, as the API server's strict field validation does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict):
        closed["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return closed


def test_workers_get_what_the_job_asks_for(capsys):
    overrides = ["run.storage_path=/mnt/runs", "mlflow.tracking_uri=http://m:5000"]
    spec = yaml.safe_load(made(capsys, "jobs/llama3-8b/sft.yaml", *overrides))["spec"]
    job = load_job("jobs/llama3-8b/sft.yaml", overrides)
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert (group["minReplicas"], group["maxReplicas"]) == (0, job.workers[1])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"name": "runs", "mountPath": "/mnt/runs"} in container["volumeMounts"]
    head = spec["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert spec["entrypoint"] == shlex.join(
        ["python", "-m", "pipeline", "sft", "jobs/llama3-8b/sft.yaml", *overrides]
    )


def test_nobody_in_the_network_commands_the_head_without_the_token():
    """The dashboard has to answer the operator's pod, so it listens on all interfaces: the token is what guards it."""
    cluster = yaml.safe_load(SHIPPED.read_text())["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "0.0.0.0"
    assert cluster["authOptions"] == {"mode": "token"}


def test_secrets_are_named_and_never_written(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    text = made(
        capsys, "jobs/demo/sft.yaml", "run.storage_path=s3://b/runs", "mlflow.tracking_uri=http://m:5000"
    )
    assert "hf_" not in text and "secretKeyRef" in text and "key: HF_TOKEN" in text


def test_a_folder_of_one_pod_is_refused(capsys):
    assert rayjob.main(["jobs/demo/sft.yaml"]) == 2
    assert "would lie inside one pod" in capsys.readouterr().err
