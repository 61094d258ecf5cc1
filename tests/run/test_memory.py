"""Tests that an out-of-memory error names its phase and the settings to change, and ends the run without a restart."""

import json
import re

import dying
import pytest
import torch
from resumed import patched
from running import ROOT
from settled import work_of

from pipeline.__main__ import main
from pipeline.errors import OutOfMemory
from pipeline.job import load_job
from pipeline.ppo.clock import Phases
from pipeline.run import memory

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB"


def training_step():
    """Raises an out-of-memory error in a function that is named like a method of transformers.Trainer."""
    raise torch.OutOfMemoryError(FULL)


def load_base():
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("stage", "phase", "expected"),
    [
        ("ppo", "update", r"per_device_train_batch_size=\d+ \(now \d+\), trainer\.gradient_checkpointing=true \(now false\)"),
        ("ppo", "rollout", r"local_rollout_forward_batch_size=32 \(now 64\); if that"),
        ("sft", training_step, r"'update'.*set, in this order, trainer\.per_device_train_batch_size=\d+.*`make plan JOB=.*` computes"),
        ("rm", load_base, r"'loading the base'.*; if that .* model\.dtype=bfloat16 \(now float32\), model\.load_in_4bit"),
        ("generate", "", r"local_rollout_forward_batch_size=\d+ \(now \d+\); if that"),
    ],
)  # fmt: skip
def test_the_message_names_phase_and_settings(stage, phase, expected):
    job = load_job(str(ROOT / f"jobs/demo/{stage}.yaml"), [], stage)
    with pytest.raises(OutOfMemory, match=expected) as raised, memory.memory_errors_explained(work_of(job)):
        if callable(phase):
            phase()
        with Phases(torch.device("cpu"))(phase):
            raise torch.OutOfMemoryError(FULL)
    assert phase == "" or str(raised.value).startswith("out of memory in phase '")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_out_of_memory_ends_without_a_restart(
    workers, storage, tmp_path, capsys, monkeypatch, in_root, request
):
    if workers:
        request.getfixturevalue("embedded_ray")
    starts = tmp_path / "starts"

    def counted(worker):
        with starts.open("a") as file:
            file.write("started\n")
        return dying.train_of("ppo")(worker)

    patched(monkeypatch, "ppo", counted)
    given = [
        "data.eval=null", "judge=null", "policy=base", "reward=python:bad_rewards:fills_the_gpu", "gate={}",
        f"run.storage_path={storage}", f"run.name=full-{workers}", "run.max_failures=2", f"scaling.num_workers={workers}", "mlflow.registered_model=null",
        "trainer.total_episodes=8", "trainer.batch_size=8", "trainer.response_length=4",
    ]  # fmt: skip
    assert main(["ppo", "jobs/demo/ppo.yaml", *given]) == 1
    errors = capsys.readouterr().err
    assert re.search(
        r"failed: out of memory in phase 'score' \(OutOfMemoryError: CUDA out of memory.*max_tokens_per_micro_batch=\d+ \(now null",
        errors,
    )
    assert "Traceback" not in errors
    failed = json.loads((storage / f"full-{workers}/failed.json").read_text())
    assert failed["error"].startswith("OutOfMemory: ")
    assert starts.read_text() == "started\n"
