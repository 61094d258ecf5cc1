"""Tests that an error soon names a bucket, tracking server or cluster that does not answer. Uses real clients and local
servers."""

import json
import shutil
import subprocess
import sys

import pytest
import ray
from running import ROOT
from servers import answering, silent

from pipeline import registry
from pipeline.__main__ import main
from pipeline.cloud import submit
from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.settle.identity import tracking_of
from pipeline.system import deadline


@pytest.fixture(autouse=True)
def two_seconds(monkeypatch):
    monkeypatch.setattr(deadline, "SECONDS", 2.0)


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """Removes all real credentials. Redirects all bucket requests to a server that never answers."""
    with silent() as where:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{where}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "x")
        monkeypatch.setenv("HOME", str(tmp_path))  # hides the user's credentials files
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
        monkeypatch.setattr(deadline, "SECONDS", 1.0)
        yield


SFT = ["sft", "jobs/demo/sft.yaml"]


@pytest.mark.parametrize(
    "given",
    [
        [*SFT, "run.storage_path=s3://bucket/runs"],
        ["report", "gs://bucket/runs/one"],
        pytest.param([*SFT, "data.train=s3://bucket/rows.jsonl"], marks=pytest.mark.slow),
        pytest.param([*SFT, "data.cache_dir=gs://bucket/cache"], marks=pytest.mark.slow),
    ],
)
def test_a_bucket_that_never_answers(given, nobody, migrated, tmp_path, capsys, in_root):
    shutil.copy(migrated, tmp_path)
    given = [*given, f"run.storage_path={tmp_path}"] if given[-1].startswith("data.") else given
    assert main(given) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and "no answer within 1 seconds" in errors


def test_what_the_call_itself_raises_comes_back(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        deadline.call_with_deadline(lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="its own"):
        deadline.call_with_deadline(lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    assert deadline.call_with_deadline(lambda a, b: a + b, 1, 2) == 3


def test_a_process_does_not_wait_for_a_call_that_was_left_behind(nobody):
    """When the interpreter exits, pyarrow's S3 client waits for its open requests. In this test, the wait would take minutes."""
    program = (
        "import sys; from pipeline.system import deadline, process; from pipeline.__main__ import main;"
        "deadline.SECONDS = 1; sys.exit(process.run_main(main))"
    )
    command = [sys.executable, "-c", program, "report", "s3://bucket/runs/one"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    says = "error: s3://bucket/runs/one: cannot draw a report (TimeoutError"
    assert done.returncode == 2 and done.stderr.startswith(says)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, "who?", r"401.*who\?"),
        (200, "<html>", r"JSON"),
        (200, '{"experiment": {"name": "rlhf", "experiment_id": "7", "lifecycle_stage": "deleted"}}', r"was deleted.*experiment-id 7"),
    ],
)  # fmt: skip
def test_a_server_that_is_no_mlflow(status, body, says, tmp_path, in_root, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with answering(status, body) as where:
        job = load_job("jobs/demo/sft.yaml", [f"mlflow.tracking_uri=http://{where}"], "sft")
        with pytest.raises(InputError, match=rf"mlflow\.\w+: .*{says}"):
            registry.check_store(tracking_of(job))


def test_a_tracking_server_that_never_answers(in_root):
    with silent() as where:
        job = load_job("jobs/demo/sft.yaml", [f"mlflow.tracking_uri=http://{where}"], "sft")
        with pytest.raises(InputError, match=r"does not answer .*no answer within 2 seconds"):
            registry.check_store(tracking_of(job))


# ------------------------------------------------------------------------------------------------- RAY_ADDRESS


@pytest.mark.parametrize(
    "value",
    [
        "garbage",
        "ray://127.0.0.1:10001",
        "x:99999",
        "127.0.0.1:1",
        "127.0.0.1\n:6379",
        "http://127.0.0.1:9",
        "http://x:y",
    ],
)
def test_an_address_that_is_no_cluster_is_answered_at_once(value, monkeypatch, capsys, in_root):
    monkeypatch.setenv("RAY_ADDRESS", value)
    assert main(["sft", "jobs/demo/sft.yaml"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: RAY_ADDRESS: ") and "expected http://HEAD:8265" in errors
    assert errors.count("\n") == 1


VERSION = json.dumps({"ray_version": ray.__version__, "version": "4", "ray_commit": "x", "session_name": "s"})


@pytest.mark.parametrize("body", ["<html>", '{"ray_version": "1.0"}'])
@pytest.mark.parametrize("known", [{}, {"/api/version": VERSION}], ids=["all", "but its version"])
def test_a_dashboard_that_is_none(body, known, monkeypatch, capsys, in_root):
    with answering(200, body, at=known) as where:
        monkeypatch.setenv("RAY_ADDRESS", f"http://{where}")
        sft = ["sft", "jobs/demo/sft.yaml", "run.storage_path=s3://b/r"]
        statuses = [main(sft), submit.main(["stop", "one"])]
    errors = capsys.readouterr().err
    assert statuses == [2, 2] and "Traceback" not in errors and errors.count("error: ") == 2, errors


@pytest.mark.parametrize("given", [[], ["list"], ["logs", "a", "b"], ["stop"]])
def test_the_verbs_of_a_cluster_take_what_they_take(given, capsys):
    assert submit.main(given) == 2
    assert capsys.readouterr().err.startswith("error: expected logs")
