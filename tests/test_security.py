"""Tests that secrets appear in no file and no output, and that no file that a job reads can run code."""

import base64
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from running import NO_EVAL, ROOT
from servers import Handler, listening
from settled import work_of

from pipeline import registry
from pipeline.__main__ import main
from pipeline.job import load_job
from pipeline.run.launch import failure_recorded
from pipeline.settle.identity import tracking_of
from tools.chaos.runs import Server

SECRETS = {
    "HF_TOKEN": "hf_plantedPLANTED0123456789abcdefghij",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password-7f3a",
    "AWS_SECRET_ACCESS_KEY": "plantedAWS/secret+access/key0123456789ab",
}
PASSWORD = "planted-pass-7f3a"
SMALL = ["trainer.max_steps=2", "data.batch_size=8", "trainer.per_device_train_batch_size=8", *NO_EVAL]


def pipeline(*arguments, **environment):
    """Runs the real command with secrets in its environment."""
    command, env = [sys.executable, "-m", "pipeline", *arguments], os.environ | SECRETS | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=300)


def leaks(folder, *runs):
    """Returns the files below a folder and the outputs of these runs that contain a secret."""
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    contents |= {number: run.stdout + run.stderr for number, run in enumerate(runs)}
    secrets = [secret.encode() for secret in (*SECRETS.values(), PASSWORD)]
    return [place for place, content in contents.items() if any(secret in content for secret in secrets)]


class Guard(Handler):
    """A proxy that requires a password and forwards requests to an MLflow server."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.body()
        expected = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != expected:
            self.send(401, b"who are you?")
            return
        headers = {k: v for k, v in self.headers.items() if k not in ("Host", "Content-Length")}
        url = self.server.behind + self.path
        request = urllib.request.Request(url, body or None, headers, method=self.command)
        try:
            reply = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            reply = error
        with reply:
            self.send(reply.status, reply.read(), reply.headers.get("Content-Type", "text/plain"))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer


@pytest.mark.slow
def test_a_password_of_the_mlflow_server_appears_nowhere(tmp_path):
    """Runs a job that succeeds, and a job whose error message contains the environment. Makes a report of each job."""
    with Server(tmp_path) as mlflow, listening(Guard, behind=mlflow.uri) as guard:
        uri = guard.address.replace("://", f"://me:{PASSWORD}@")
        flags = [f"run.storage_path={tmp_path / 'runs'}", "gate={}", "trainer.logging_steps=1"]
        well = pipeline("sft", "jobs/demo/sft.yaml", *flags, *SMALL, "run.name=well", MLFLOW_TRACKING_URI=uri)
        assert well.returncode == 0, well.stderr.decode()[-3000:]
        recorded = json.loads((tmp_path / "runs/well/result.json").read_text())["tracking_uri"]
        assert recorded == uri.replace(f"me:{PASSWORD}@", "")
        ill = pipeline(
            "ppo", "jobs/demo/ppo.yaml", *flags[:2], "run.name=ill", "policy=models:/rlhf-sft@champion", "judge=null",
            "reward=python:bad_rewards:leaks", "data.eval=null", "trainer.total_episodes=4", "trainer.batch_size=4",
            "trainer.num_mini_batches=1", "trainer.response_length=8", MLFLOW_TRACKING_URI=uri,
        )  # fmt: skip
        assert ill.returncode == 1 and b"no reward with" in ill.stderr, ill.stderr.decode()[-3000:]
        assert "no reward with" in (tmp_path / "runs/ill/failed.json").read_text()
        names = [str(tmp_path / "runs" / name) for name in ("well", "ill")]
        pages = [pipeline("report", name, MLFLOW_TRACKING_URI=uri) for name in names]
        assert [page.returncode for page in pages] == [0, 0]
        assert not any(b"No curves" in page.stdout for page in pages), "the report did not use the password"
        bare = pipeline("report", str(tmp_path / "runs/well"), MLFLOW_TRACKING_URI="")
        assert b"No curves" in bare.stdout, "the server requires no password"
        assert leaks(tmp_path, well, ill, *pages, bare) == []


def test_credentials_of_the_tracking_uri_are_used_for_that_server_only(monkeypatch):
    """The stored address contains no credentials. The MLflow client reads the credentials from the environment."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{PASSWORD}@127.0.0.1:9")
    job = load_job(ROOT / "jobs/demo/sft.yaml", [], "sft")
    assert tracking_of(job).uri == "http://127.0.0.1:9"
    registry.client("http://127.0.0.1:10")
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == ""
    registry.client("http://127.0.0.1:9")
    used = os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]
    assert used == ("me", PASSWORD)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:planted-pass-7f3a@127.0.0.1/db")
    assert tracking_of(job).uri == "postgresql://127.0.0.1/db"


def test_the_file_about_a_failure_contains_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{PASSWORD}@127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
    job = load_job(ROOT / "jobs/demo/sft.yaml", [f"run.storage_path={tmp_path}", "run.name=ill"], "sft")
    work = work_of(job)
    with pytest.raises(RuntimeError), failure_recorded(work):
        raise RuntimeError(f"{SECRETS['HF_TOKEN']} at {os.environ['MLFLOW_TRACKING_URI']}")
    failed = json.loads((tmp_path / "ill/failed.json").read_text())
    assert failed["error"] == "RuntimeError: *** at http://127.0.0.1:9"
    assert failed["tracking_uri"] == "http://127.0.0.1:9" and leaks(tmp_path) == []


@pytest.mark.parametrize(
    ("key", "address"),
    [
        ("mlflow.tracking_uri", f"http://me:{PASSWORD}@127.0.0.1:9"),
        ("MLFLOW_TRACKING_URI", f"ftp://me:{PASSWORD}@127.0.0.1:9"),
        ("data.train", f"s3://AKIA:a/b{PASSWORD}@b/x.jsonl"),
        ("data.train", f"https://host/x.jsonl?sig={PASSWORD}"),
        ("run.storage_path", f"s3://b/runs?access_key=a&secret_key={PASSWORD}"),
        ("dpo.run.storage_path", f"gs://b/runs?token={PASSWORD}"),
    ],
)
def test_an_error_does_not_repeat_a_password(key, address, tmp_path, monkeypatch, capsys, in_root):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    arguments = ["sft", "jobs/demo/sft.yaml", f"run.storage_path={tmp_path}"]
    if key.isupper():
        monkeypatch.setenv(key, address)
    else:
        arguments.append(f"{key}={address}")
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and PASSWORD not in output.out + output.err


def test_no_source_file_unpickles_or_evaluates():
    """Only files that read results of the job's own Ray tasks and actors may call pickle."""
    own_tasks = {"data/read.py", "run/parts.py", "rollout/client.py", "rollout/worker.py"}
    calls = r"\bpickle\.loads?\(|\byaml\.(unsafe_)?load\(|(?<!\.)\beval\(|\bexec\("
    unsafe = re.compile(rf"{calls}|weights_only=False|shell=True")
    root = ROOT / "pipeline"
    sources = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.py")}
    assert {path for path, source in sources.items() if unsafe.search(source)} == own_tasks
    code = "".join(sources.values())
    loads = re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", code)
    assert len(loads) == code.count("torch.load(") >= 2
    assert all("weights_only=True" in call for call in loads)
