"""Tests complete runs whose files are in a bucket of a mock S3, with a real MLflow server."""

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import time

import pytest
from faults import below, kill
from head import TOKEN, Head
from s3 import mock_s3

from tools.chaos.runs import ROOT, SMALL, Run, Server, comparable, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="needs the extra `mock`"),
]


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """Returns a client of a mock S3 with one bucket for all processes of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # a short path, because the length of socket paths is limited
    (tmp_path / "tmp").mkdir()
    with mock_s3(monkeypatch) as client:
        yield client


def read(s3, key):
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def keys(s3, prefix):
    return [one["Key"] for one in s3.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])]


def newest_checkpoint(s3, name):
    """Waits until workers without a driver have ended. Returns the folder of the newest checkpoint."""

    def unchanged():
        before = keys(s3, f"runs/{name}/")
        time.sleep(8)
        return before == keys(s3, f"runs/{name}/")

    until(unchanged, "the workers to end")
    return max(key for key in keys(s3, f"runs/{name}/") if "/digests.json" in key).removesuffix(
        "/digests.json"
    )


def test_a_killed_run_resumes_before_a_damaged_checkpoint_and_its_version_is_fetched_once(s3, tmp_path):
    with Server(tmp_path, artifacts="s3://bucket/mlflow") as server:

        def run(stage, name, *overrides):
            return Run(stage, name, tmp_path, server, [*overrides, "run.storage_path=s3://bucket/runs"])

        untouched, killed = (run("sft", name, *SMALL["trl"]) for name in ("untouched", "killed"))
        assert untouched.start().ends() == 0, untouched.lines[-20:]

        killed.start().wait_for(r"step +(7|8|9|10|11)/14")
        os.killpg(killed.process.pid, signal.SIGKILL)
        killed.ends()
        damaged = newest_checkpoint(s3, "killed")
        s3.put_object(Bucket="bucket", Key=f"{damaged}/optimizer.pt", Body=b"damaged")
        assert killed.again().ends() == 0, killed.lines[-20:]
        assert killed.says(r"continuing from checkpoint_0000000\d$")
        name = damaged.rpartition("/")[2]
        assert killed.says(name + r" is damaged \(optimizer\.pt has 7 bytes, .*\): moved to damaged/")

        results = [json.loads(read(s3, f"runs/{one}/result.json")) for one in ("untouched", "killed")]
        assert comparable(results[0]["metrics"]) == comparable(results[1]["metrics"])
        folders = [one["adapter"].removeprefix("s3://bucket/") for one in results]
        assert folders == ["runs/untouched/final/adapter", "runs/killed/final-2/adapter"]
        weights = [read(s3, f"{folder}/adapter_model.safetensors") for folder in folders]
        assert weights[0] == weights[1]

        reward = "reward=python:bad_rewards:length"
        for name in ("first", "second"):
            ppo = run("ppo", name, *SMALL["ppo"], "policy=models:/killed@champion", reward)
            ppo.env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
            assert ppo.start().ends() == 0, ppo.lines[-20:]
        # the drivers and workers of both runs share one downloaded copy of the version
        (kept,) = (tmp_path / "cache/rlhf-pipeline/versions").iterdir()
        assert (kept / "adapter_model.safetensors").read_bytes() == weights[1]
        assert not [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("tmp")]


PPO = [*SMALL["ppo"], "policy=base", "reward=python:pipeline.demo:gold", "run.report=false"]
KILLS = 3


def ppo(s3, name, tmp_path, server):
    return Run("ppo", name, tmp_path, server, [*PPO, "run.storage_path=s3://bucket/runs"])


def sealed(s3, name):
    return {one.split("/")[2] for one in keys(s3, f"runs/{name}/") if one.endswith("/digests.json")}


def start_and_wait_for_a_checkpoint(s3, run):
    before = sealed(s3, run.name)
    run.start()
    until(lambda: sealed(s3, run.name) - before or run.process.poll() is not None, "a checkpoint", every=1.0)
    assert run.process.poll() is None, run.lines[-20:]


def assert_equals_an_undisturbed_run(s3, name, tmp_path, server):
    untouched = ppo(s3, "ppo-untouched", tmp_path, server)
    if not keys(s3, "runs/ppo-untouched/result.json"):  # moto keeps objects until this process ends
        assert untouched.start().ends() == 0, untouched.lines[-20:]
    results = [json.loads(read(s3, f"runs/{one}/result.json")) for one in ("ppo-untouched", name)]
    assert comparable(results[0]["metrics"]) == comparable(results[1]["metrics"])
    folders = [one["adapter"].removeprefix("s3://bucket/") for one in results]
    weights = [read(s3, f"{folder}/adapter_model.safetensors") for folder in folders]
    assert weights[0] == weights[1]


def attempts(s3, name):
    files = keys(s3, f"runs/{name}/lease/")
    # Skips the empty objects with which pyarrow marks folders.
    return [json.loads(read(s3, one)) for one in files if one.endswith(".json")]


def test_a_resumed_run_has_the_same_bits_and_one_writer_at_a_time(s3, tmp_path, monkeypatch):
    """Kills the Ray head and all processes of the run. Each attempt has its own TMPDIR, as if it ran on another machine."""
    monkeypatch.setenv("PIPELINE_LEASE_S", "6")
    with Server(tmp_path) as server, contextlib.ExitStack() as heads:
        killed = ppo(s3, "killed-head", tmp_path, server)
        killed.env["RAY_AUTH_TOKEN"] = TOKEN
        for number in range(KILLS + 1):
            monkeypatch.setenv("TMPDIR", str(tmp_path / f"tmp{number}"))
            (tmp_path / f"tmp{number}").mkdir()
            head = heads.enter_context(Head())
            killed.address = head.address
            if number == KILLS:
                break
            start_and_wait_for_a_checkpoint(s3, killed)
            kill(*below(head.process.pid), head.process.pid)
            kill(killed.process.pid)
            killed.process.wait()
        assert killed.again().ends() == 0, killed.lines[-20:]
        assert killed.says(rf"a lease to expire: attempt {KILLS} on .* may still write to its folder")
        assert_equals_an_undisturbed_run(s3, "killed-head", tmp_path, server)
    made = attempts(s3, "killed-head")
    assert [one["attempt"] for one in made] == list(range(1, KILLS + 2))
    for one, after in itertools.pairwise(made):
        assert one["ended"].endswith(f"taken over by attempt {after['attempt']}")
        assert one["renewed"] < one["expires"] < after["since"], "the killed attempt renewed its lease"
