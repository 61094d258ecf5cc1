"""Runs of each kind, and the messages about them: the checks that fail, and the error that ends the run.

Real models, rows and trainers of the demo, in this process: `doctor`, two updates of PPO, one step of sft, rm, dpo and kto, and
the reload of what they save. The adapters that dpo, kto and ppo start from are trained here for a few steps, once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from pathlib import Path

import alone
import pytest
import torch
import torch.multiprocessing as mp

from pipeline.commands import doctor
from pipeline.stages import ppo as ppo_stage

TRAINED = [
    "trainer.max_steps=30",
    "trainer.learning_rate=3e-3",
    "trainer.warmup_steps=0",
    "trainer.logging_steps=30",
]
ONE = ["trainer.logging_steps=1", "trainer.warmup_steps=0"]


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="seeded-faults-"))


@functools.cache
def adapters() -> dict[str, str]:
    """Folders of a policy and a reward that were trained for some steps by unharmed code."""
    sft = alone.train("sft", folder(), *TRAINED)["adapter"]
    rm = alone.train("rm", folder(), *TRAINED)["adapter"]
    other = alone.train("sft", folder(), *TRAINED, "trainer.seed=7", "trainer.learning_rate=1e-3")["adapter"]
    return {"policy": sft, "reward.0": rm, "other": other}


def of_ppo(*settings: str, inputs: dict[str, str]) -> list[str]:
    settings = ("trainer.num_mini_batches=1", "trainer.total_episodes=128", *settings)
    said = []
    with _heard(said):
        outcome = doctor.train(alone.worker("ppo", folder(), *settings, inputs=inputs))
        findings = outcome["samples"][0]["findings"]
        said += [f"{f['check']}: {f['found']}" for f in findings if f["holds"] is False]
    with _heard(said):
        ppo_stage.train(alone.worker("ppo", folder(), *settings, inputs=inputs))
    return said


def of_stage(stage: str, *settings: str, inputs: dict[str, str]) -> list[str]:
    said = []
    needed = {"policy": inputs["policy"]} if stage in ("dpo", "kto") else {}
    with _heard(said):
        alone.train(stage, folder(), *ONE, *settings, inputs=needed)
    return said


def of_pair(number: int, *settings: str, inputs: dict[str, str]) -> list[str]:
    """PPO on two workers; `number` is that of the fault that is planted in both, -1 for none."""
    results = [str(Path(tempfile.mkdtemp(dir=folder())) / "said") for _ in range(2)]
    mp.spawn(_worker, (number, settings, inputs, results), nprocs=2)
    return [line for path in results for line in Path(path).read_text().split("\0") if line]


def _worker(rank, number, settings, inputs, results):
    import known_faults

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{results[0]}-group", rank=rank, world_size=2)
    said = []
    with pytest.MonkeyPatch.context() as patch, _heard(said):
        alone.Alone.rank, alone.Alone.world = rank, 2
        worker = alone.worker("ppo", Path(results[rank]).parent, *settings, inputs=inputs)
        if number >= 0:
            known_faults.FAULTS[number].plant(patch)
        ppo_stage.train(worker)
    Path(results[rank]).write_text("\0".join(said))
    os._exit(0)  # the other may wait in a collective for this one


@contextlib.contextmanager
def _heard(said: list[str]):
    """What ends the block is added to `said`."""
    try:
        yield
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")


def visit(fault, number: int) -> list[str]:
    """Returns the messages about the fault's run."""
    inputs = adapters()
    if fault.run == "pair":
        return of_pair(number, *fault.settings, inputs=inputs)
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        if fault.run == "ppo":
            return of_ppo(*fault.settings, inputs=inputs)
        return of_stage(fault.run, *fault.settings, inputs=inputs)
