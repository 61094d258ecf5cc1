"""Tests that the driver reports the libraries' own errors with the key, before a worker starts, from this or another process."""

import importlib
import subprocess
import sys
from dataclasses import replace

import pytest
from running import ROOT

from pipeline.errors import InputError
from pipeline.job import JOBS, libraries, load_job
from pipeline.job.stages import STAGE

SHIPPED = [path for path in sorted((ROOT / "jobs").glob("*/*.yaml")) if path.stem in JOBS]


def job(stage, *overrides):
    base = ["policy=base"] if stage in ("dpo", "kto") else []
    return load_job(ROOT / f"jobs/demo/{stage}.yaml", [*base, *overrides], stage)


@pytest.fixture
def loaded(monkeypatch):
    """Sets up a process that has the libraries loaded, like a notebook, and no earlier answers."""
    for module in libraries.LOADED:
        importlib.import_module(module)

    monkeypatch.setattr(libraries, "_asked", set())
    monkeypatch.setattr(subprocess, "Popen", None)  # no process is needed


REFUSED = [
    ("sft", ["trainer.optim_args=foo"], r"trainer\.optim_args: found 'foo'; SFTConfig says: not enough values"),
    ("sft", ["trainer.lr_scheduler_type=warmup_stable_decay"], r"trainer\.lr_scheduler_type: found 'warmup_stable_decay'"),
    ("sft", ["trainer.use_liger_kernel=true"], r"trainer\.use_liger_kernel: found true; SFTConfig says: the package liger_kernel"),
    ("ppo", ["lora.layers_pattern=h", "lora.target_modules=[q_proj]"], r"lora\.layers_pattern: found 'h'; peft\.LoraConfig says: When `layers_pattern`"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "overrides", "says"), REFUSED, ids=[case[1][0] for case in REFUSED])
def test_a_refusal_names_the_key(stage, overrides, says, loaded):
    with libraries.asked(job(stage, *overrides)) as check, pytest.raises(InputError, match=says) as caught:
        check()
    assert str(caught.value).startswith(f"{ROOT}/jobs/demo/{stage}.yaml: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_jobs_are_taken_also_where_there_are_no_gpus(path, loaded, in_root):
    shipped = load_job(path)
    tf32 = {"tf32": True} if STAGE[path.stem].trl and shipped.scaling.get("use_gpu") else {}
    with libraries.asked(replace(shipped, trainer=shipped.trainer | tf32)) as check:
        check()


def test_a_process_of_its_own_answers_for_several_jobs(monkeypatch):
    """The driver has not loaded the libraries. The first job to ask gets the errors of all jobs."""
    monkeypatch.setattr(libraries, "LOADED", ("no_such_module",))
    monkeypatch.setattr(libraries, "_asked", set())
    ray = "scaling.num_workers=1"
    jobs = job("sft", ray), job("rm", ray), job("dpo", ray, "trainer.optim_args=foo")
    begun = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: begun.append(real(*a, **k)) or begun[-1])
    with pytest.raises(InputError, match=r"dpo\.yaml: trainer\.optim_args: found 'foo'"):
        with libraries.asked(*jobs) as check, libraries.asked(jobs[0]):
            check()
    assert len(begun) == 1 and begun[0].poll() is not None and not libraries._asked
    monkeypatch.setattr(sys, "executable", "/bin/false")  # a failed process gives no answer
    with pytest.raises(RuntimeError, match="exit status 1"), libraries.asked(jobs[0]) as check:
        check()
    with libraries.asked(jobs[1]):  # an error elsewhere leaves no process behind
        pass
    assert len(begun) == 3 and begun[2].poll() is not None
