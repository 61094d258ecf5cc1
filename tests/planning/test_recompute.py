"""Tests `trainer.gradient_checkpointing: null`: a worker recomputes activations only if they would not fit by the plan."""

import dataclasses
from types import SimpleNamespace

import pytest
from running import ROOT
from settled import plan_of, work_of

from pipeline.job import load_job
from pipeline.planning import plan
from pipeline.writing import memory


@pytest.fixture(params=["ppo", "sft", "rm", "dpo", "kto"])
def job(in_root, request):
    return load_job(ROOT / f"jobs/demo/{request.param}.yaml", ["trainer.gradient_checkpointing=null"])


def test_the_plan_without_recomputation_decides(job):
    kept, recomputed = (
        plan_of(dataclasses.replace(job, trainer={**job.trainer, "gradient_checkpointing": on})).peak
        for on in (False, True)
    )
    assert plan_of(job).peak == recomputed < kept  # the peak with gradient_checkpointing: null
    enough = kept / plan.MAX_FILL
    work = work_of(job)
    assert plan.is_needed(work, enough * 1.01) == (False, plan.is_needed(work, enough * 1.01)[1])
    needed, why = plan.is_needed(work, enough * 0.99)
    assert needed and "recomputed (gradient_checkpointing: null): keeping all needs" in why


@pytest.mark.parametrize("free", [1 << 20, 1 << 40])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_all_workers_do_what_the_smallest_needs(job, free, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    others = [(True, "another has no room")] if elsewhere else []
    worker = SimpleNamespace(
        work=work_of(job), rank=0, device="cpu", gather=lambda mine: [mine, *others],
    )  # fmt: skip
    assert plan.recomputes(worker) is (elsewhere or free == 1 << 20)
    assert "gradient_checkpointing: null" in capsys.readouterr().out or elsewhere
    for given in (True, False):  # no other worker is queried
        worker.work = work_of(
            dataclasses.replace(job, trainer={**job.trainer, "gradient_checkpointing": given})
        )
        worker.gather = None
        assert plan.recomputes(worker) is given
