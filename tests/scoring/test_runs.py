"""Tests that failures of the endpoint, the driver or a rollout worker do not change the result of a run with a judge."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from judging import FAULTS, judging
from running import ROOT, curve

from pipeline.__main__ import main
from pipeline.job import load_job

PPO = [
    "policy=base", "judge=null", "data.eval=null", "gate={}", "mlflow.registered_model=null", "run.report=false", "run.name=judged",
    "trainer.total_episodes=24", "trainer.batch_size=8", "trainer.num_mini_batches=1", "trainer.num_ppo_epochs=1",
    "trainer.response_length=8", "trainer.save_steps=1", "trainer.local_rollout_forward_batch_size=4",
    "trainer.normalize_rewards=false", "trainer.num_generations=2", "trainer.advantage_estimator=rloo",
]  # fmt: skip


def arguments(server, folder, *more):
    folder.mkdir(exist_ok=True)
    (folder / "judge.yaml").write_text(
        f"model: wise\nform: score\nendpoint: {server.address}/v1\ntimeout_s: 2\nconcurrency: 3\n"
        "dollars_per_million_input: 1\n"
    )
    return [
        "ppo",
        "jobs/demo/ppo.yaml",
        f"reward={{judge: {folder}/judge.yaml}}",
        f"run.storage_path={folder}",
        *PPO,
        *more,
    ]


def weights(folder):
    result = json.loads((folder / "judged/result.json").read_text())
    return (Path(result["adapter"]) / "adapter_model.safetensors").read_bytes()


def killed_while_it_asks(server, arguments, after):
    """Runs the command, and kills the command while it waits for answers of a judge that hangs."""
    server.faults = [None] * after + ["hangs"] * 3
    expected = len(server.requests) + after + 3
    begun = subprocess.Popen(
        [sys.executable, "-m", "pipeline", *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 240
    while len(server.requests) < expected and begun.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    begun.kill()
    server.faults = []
    assert begun.wait(timeout=280) == -signal.SIGKILL


@pytest.mark.slow
def test_failures_of_judge_and_driver_do_not_change_the_result(tmp_path, in_root):
    with judging() as server:
        assert main(arguments(server, tmp_path / "calm")) == 0
        questions = server.paid.total()
        assert set(server.paid.values()) == {1} and 0 < questions <= 24
        result = json.loads((tmp_path / "calm/judged/result.json").read_text())
        judged, dollars = (
            curve(tmp_path / "calm", result, f"judges/reward/{key}") for key in ("judged", "dollars")
        )
        assert len(judged) == 3 and judged[0] < judged[1] < judged[2] == questions
        assert dollars[-1] == pytest.approx(questions * 1e-4), (
            "100 tokens of a question at a dollar a million"
        )
        server.paid.clear()
        troubled = arguments(server, tmp_path / "troubled")
        killed_while_it_asks(server, troubled, after=3)
        killed_while_it_asks(server, troubled, after=9)
        server.faults = list(FAULTS)
        assert main(troubled) == 0
        assert set(server.paid.values()) == {1} and server.paid.total() == questions
        assert weights(tmp_path / "calm") == weights(tmp_path / "troubled")
        assert main([*arguments(server, tmp_path / "troubled"), "run.name=again"]) == 0
        assert server.paid.total() == questions, "a second run finds all answers in the store"


@pytest.fixture
def steps(tmp_path):
    """Returns the commands of jobs/demo/judge.sh, each as [SUBCOMMAND, JOB, key=value, ...]."""
    programs, log = tmp_path / ".venv/bin", tmp_path / "log"
    programs.mkdir(parents=True)
    stands_in = {
        "python": f'printf "%s\\t" "$@" >>{log}; echo >>{log}; [ "$3" != serve ] || exec sleep 9',
        "curl": f"grep -q serve {log}",
    }
    for name, does in stands_in.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    subprocess.run(["bash", ROOT / "jobs/demo/judge.sh"], cwd=tmp_path, check=True, timeout=60)
    lines = [line.rstrip("\t").split("\t") for line in log.read_text().splitlines()]
    return [line[2:] for line in lines]  # without `-m pipeline`


def test_the_jobs_of_the_demos_judge_are_valid(steps, in_root):
    verbs = [verb for verb, *_ in steps]
    assert sorted(verbs) == ["collect", "evaluate", "ppo", "rm", "serve", "sft"]
    for verb, job, *overrides in steps:
        load_job(job, overrides, verb)


@pytest.mark.slow
def test_the_demos_judge_labels_pairs_that_a_reward_model_learns(tmp_path, in_root):
    """Runs the steps of jobs/demo/judge.sh. A policy learns to judge, and another policy learns from this judge's labels."""
    assert main(["sft", "jobs/demo/sft.yaml", f"run.storage_path={tmp_path}"]) == 0
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "RUNS": str(tmp_path)}
    script = ["bash", "jobs/demo/judge.sh"]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = {
        name: json.loads((tmp_path / f"judge-{name}/result.json").read_text())
        for name in ("evaluate", "collect", "rm", "ppo")
    }
    judge = results["collect"]["inputs"]["reward.0"]
    assert judge.startswith("judge:jobs/demo/judges/right.yaml@")
    rows = [json.loads(line) for line in (tmp_path / "judge-collect/rows.jsonl").read_text().splitlines()]
    lineage = json.loads((Path(results["rm"]["adapter"]) / "lineage.json").read_text())
    assert lineage["judged_by"] == {judge: len(rows)}
    metrics = {name: result["metrics"] for name, result in results.items()}
    assert metrics["evaluate"]["eval_rm_accuracy"] > 0.9 and metrics["rm"]["eval_accuracy"] > 0.8
    assert metrics["ppo"]["eval_judge"] > metrics["ppo"]["initial_judge"] + 0.1
