"""The precision of fp32 products in the workers of a run: chosen once, the same in all of them, and kept when the run goes on."""

import json
import math
from dataclasses import replace

import pytest
import torch
from running import ROOT

from pipeline.config import load_job
from pipeline.errors import InputError
from pipeline.runtime import matmul

EXACT, ROUNDED = 9e-7, 2.7e-3  # errors of "medium"


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    before = torch.get_float32_matmul_precision()
    yield load_job("jobs/demo/sft.yaml", [f"run.storage_path={tmp_path}", "run.name=run"], "sft")
    torch.set_float32_matmul_precision(before)


def settled(job, error, *others, rank=0, bf16_speedup=0.4):
    """The precision after an attempt in which this worker of `rank` has that error, and the `others` gave what they gathered."""
    torch.set_float32_matmul_precision("highest")

    def gather(mine):
        return [mine, *others] if rank == 0 else [*others, mine]

    matmul.settle(job, rank, gather, lambda: error, lambda: bf16_speedup)
    return torch.get_float32_matmul_precision()


def recorded(job):
    with open(f"{job.folder}/{matmul.FILE}", encoding="utf-8") as file:
        return json.load(file)["precision"]


def test_a_later_attempt_keeps_what_the_first_one_chose(job, capsys):
    assert settled(job, EXACT) == recorded(job) == "medium"
    assert settled(job, EXACT) == recorded(job) == "medium"
    assert capsys.readouterr().out.splitlines()[1] == 'fp32 products at precision "medium", as this run began'


def test_what_was_not_taken_at_first_is_not_taken_later(job):
    assert settled(job, ROUNDED) == recorded(job) == "highest"
    assert settled(job, EXACT) == recorded(job) == "highest"


def test_a_run_that_moves_to_a_processor_that_rounds_says_so_once_and_stays_at_the_default(job, capsys):
    settled(job, EXACT)
    assert settled(job, ROUNDED) == recorded(job) == "highest"
    assert "no longer to the bit" in capsys.readouterr().out
    assert settled(job, EXACT) == "highest"
    assert "no longer" not in capsys.readouterr().out


def test_all_workers_take_the_same_and_one_that_rounds_has_a_veto(job, capsys):
    assert settled(job, EXACT, (None, ROUNDED, math.inf)) == "highest"
    assert settled(job, ROUNDED, (None, EXACT, math.inf), rank=1) == "highest"
    assert settled(job, EXACT, (None, EXACT, math.inf), rank=1) == "medium"
    # Rank 0 alone reads what the run began with.
    assert settled(job, EXACT, ("medium", EXACT, math.inf), rank=1) == "medium"
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_job_for_gpus_is_left_alone_and_says_so(job, capsys):
    def error():
        raise AssertionError("measured")

    job.scaling["use_gpu"] = True
    matmul.settle(job, error=error)
    assert torch.get_float32_matmul_precision() == "highest"
    assert 'precision "highest", on a GPU without TF32' in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_an_error(job):
    settled(job, EXACT)
    with open(f"{job.folder}/{matmul.FILE}", "w", encoding="utf-8") as file:
        file.write('{"precision": ')
    with pytest.raises(InputError, match=r"float32_matmul\.json cannot be read"):
        settled(job, EXACT)


def test_bf16_is_refused_where_the_processor_only_imitates_it(job, capsys):
    bf16 = replace(job, trainer={**job.trainer, "bf16": True})
    with pytest.raises(
        InputError, match=r"imitates them in 2\.5x the time of float32; type trainer\.bf16=false"
    ):
        settled(bf16, EXACT)
    with pytest.raises(InputError, match="imitates"):  # all workers end, though rank 0 alone is slow
        settled(bf16, EXACT, (None, EXACT, 0.4), rank=1, bf16_speedup=3.0)
    assert settled(bf16, ROUNDED, bf16_speedup=3.0) == "highest"
    assert settled(bf16, ROUNDED) == "highest"  # it has begun elsewhere, and its settings cannot change
    assert "warning: this processor has no products in bfloat16" in capsys.readouterr().out
