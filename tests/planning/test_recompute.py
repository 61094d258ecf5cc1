"""Tests that with `trainer.gradient_checkpointing: null`, workers recompute activations only if the plan requires it."""

import dataclasses
from types import SimpleNamespace

import pytest
from running import ROOT
from settled import plan_of, work_of

from pipeline.job import load_job
from pipeline.planning import plan
from pipeline.writing import memory


def job_with(stage, checkpointing):
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml")
    return dataclasses.replace(job, trainer={**job.trainer, "gradient_checkpointing": checkpointing})


@pytest.mark.parametrize("stage", ["ppo", "sft", "rm"])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("share", [0.99, 1.01])
def test_all_workers_recompute_if_one_of_them_lacks_memory(
    stage, share, elsewhere, in_root, monkeypatch, capsys
):
    kept, planned = (plan_of(job_with(stage, checkpointing)).peak for checkpointing in (False, None))
    assert planned < kept
    monkeypatch.setattr(memory, "free_bytes", lambda device: share * kept / plan.MAX_FILL)
    others = [(True, "another worker lacks memory")] if elsewhere else []
    work = work_of(job_with(stage, None))
    worker = SimpleNamespace(work=work, rank=0, device="cpu", gather=lambda mine: [mine, *others])
    assert plan.recomputes_activations(worker) is (elsewhere or share < 1)
    assert "(gradient_checkpointing: null)" in capsys.readouterr().out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_setting_of_a_job_decides_without_a_plan(checkpointing, in_root):
    worker = SimpleNamespace(work=work_of(job_with("sft", checkpointing)))
    assert plan.recomputes_activations(worker) is checkpointing
