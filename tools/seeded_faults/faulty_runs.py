"""Runs a stage with a planted fault, and collects the messages of failed self-checks.

The runs use the demo's model and rows and the real trainers, in this process: two updates of PPO, one step of the other stages,
and the reload of the saved adapter. The adapters with which dpo, kto and ppo start are trained once, for a few steps.
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
from forked import in_processes
from known_faults import FAULTS, Fault

from pipeline.stages import ppo as ppo_stage

RUNS = ("ppo", "pair", "sft", "rm", "dpo", "kto")
TRAINED = ["trainer.max_steps=30", "trainer.warmup_steps=0", "trainer.logging_steps=30"]


@functools.cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="seeded-faults-"))


@functools.cache
def adapters() -> dict[str, str]:
    """Returns the folders of two policies and a reward model that were trained without a fault."""

    def trained(stage: str, rate: str, *settings: str) -> str:
        return alone.train(stage, folder(), *TRAINED, f"trainer.learning_rate={rate}", *settings)["adapter"]

    return {
        "policy": trained("sft", "3e-3"),
        "reward.0": trained("rm", "3e-3"),
        "other": trained("sft", "1e-3", "trainer.seed=7"),
    }


def messages(run: str, *settings: str, fault: Fault | None = None) -> list[str]:
    """Returns the messages of a run with the planted fault, if any."""
    inputs = adapters()
    if run == "pair":
        name = fault.name if fault else None
        results = [str(Path(tempfile.mkdtemp(dir=folder())) / "said") for _ in range(2)]
        in_processes(_worker, name, settings, inputs, results)
        return [line for path in results for line in Path(path).read_text().split("\0") if line]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            fault.plant(patch)
        if run == "ppo":
            settings = ("trainer.num_mini_batches=1", "trainer.total_episodes=128", *settings)
            with _heard(said):
                ppo_stage.train(alone.worker("ppo", folder(), *settings, inputs=inputs))
        else:
            needed = {"policy": inputs["policy"]} if run in ("dpo", "kto") else {}
            settings = ("trainer.logging_steps=1", "trainer.warmup_steps=0", *settings)
            with _heard(said):
                alone.train(run, folder(), *settings, inputs=needed)
    return said


def _worker(rank, name, settings, inputs, results):
    """Runs in each of two PPO workers. Both workers have the fault."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{results[0]}-group", rank=rank, world_size=2)
    said = []
    with pytest.MonkeyPatch.context() as patch, _heard(said):
        alone.Alone.rank, alone.Alone.world = rank, 2
        worker = alone.worker("ppo", Path(results[rank]).parent, *settings, inputs=inputs)
        for fault in FAULTS:
            if fault.name == name:
                fault.plant(patch)
        ppo_stage.train(worker)
    Path(results[rank]).write_text("\0".join(said))
    os._exit(0)  # does not wait for the other worker, which may hang in a collective


@contextlib.contextmanager
def _heard(said: list[str]):
    """If an error ends the `with` block, adds the error's message to `said`."""
    try:
        yield
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
