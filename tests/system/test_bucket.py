"""A whole run in a bucket, and MLflow behind a server: a mock of S3, all else real, from the command line."""

import importlib.util
import json
import logging
import os
import signal
import time

import pytest

from tests.chaos.runs import ROOT, SMALL, Run, Server, comparable, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="needs the extra `mock`"),
]


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """A client of a mock S3 with one bucket, which every process of the test finds."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        **dict.fromkeys(("AWS_ENDPOINT_URL", "MLFLOW_S3_ENDPOINT_URL"), endpoint),  # of pyarrow and boto3
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test"),
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "tmp"),
        "RAY_TMPDIR": "/tmp",  # sockets have short names
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # the one of these credentials ends with the test
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    server.stop()


def read(s3, key):
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def keys(s3, prefix):
    return [one["Key"] for one in s3.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])]


def newest_checkpoint(s3, name):
    """Its folder, once the workers that outlived their driver have ended."""

    def unchanged():
        before = keys(s3, f"runs/{name}/")
        time.sleep(8)
        return before == keys(s3, f"runs/{name}/")

    until(unchanged, "the workers to end")
    return max(key for key in keys(s3, f"runs/{name}/") if "/digests.json" in key).removesuffix(
        "/digests.json"
    )


def test_a_killed_run_goes_on_before_a_spoilt_checkpoint_and_what_it_registers_is_fetched_once(s3, tmp_path):
    with Server(tmp_path, artifacts="s3://bucket/mlflow") as server:

        def run(stage, name, *overrides):
            return Run(stage, name, tmp_path, server, [*overrides, "run.storage_path=s3://bucket/runs"])

        untouched, killed = (run("sft", name, *SMALL["trl"]) for name in ("untouched", "killed"))
        assert untouched.start().ends() == 0, untouched.lines[-20:]

        killed.start().wait_for(r"step +(7|8|9|10|11)/14")
        os.killpg(killed.process.pid, signal.SIGKILL)
        killed.ends()
        spoilt = newest_checkpoint(s3, "killed")
        s3.put_object(Bucket="bucket", Key=f"{spoilt}/optimizer.pt", Body=b"spoilt")
        assert killed.again().ends() == 0, killed.lines[-20:]
        assert killed.says(r"continuing from checkpoint_0000000\d$")
        name = spoilt.rpartition("/")[2]
        assert killed.says(name + r" is damaged \(optimizer\.pt has 6 bytes, .*\): moved to damaged/")

        results = [json.loads(read(s3, f"runs/{one}/result.json")) for one in ("untouched", "killed")]
        assert comparable(results[0]["metrics"]) == comparable(results[1]["metrics"])
        folders = [one["adapter"].removeprefix("s3://bucket/") for one in results]
        assert folders == ["runs/untouched/final/adapter", "runs/killed/final/adapter"]
        weights = [read(s3, f"{folder}/adapter_model.safetensors") for folder in folders]
        assert weights[0] == weights[1]

        reward = "reward=python:bad_rewards:length"
        for name in ("first", "second"):
            ppo = run("ppo", name, *SMALL["ppo"], "policy=models:/killed@champion", reward)
            ppo.env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
            assert ppo.start().ends() == 0, ppo.lines[-20:]
        # Two runs, each with a driver and a worker that want it.
        (kept,) = (tmp_path / "cache/rlhf-pipeline/versions").iterdir()
        assert (kept / "adapter_model.safetensors").read_bytes() == weights[1]
        assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("tmp")]


def test_a_bucket_that_is_not_there_is_said_before_anything_is_done(s3, tmp_path):
    with Server(tmp_path) as server:
        run = Run("sft", "nowhere", tmp_path, server, ["run.storage_path=s3://not-there/runs"])
        assert run.start().ends() == 2
        assert run.says(r"error: run\.storage_path: .*not-there"), run.lines[-20:]
