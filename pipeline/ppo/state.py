"""The state of a PPO run in a folder, read back so that the run continues bit for bit (on a CPU).

No pickle is ever loaded: tensors are safetensors, or torch.save read with weights_only; everything else is JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.ppo.batch import world

if TYPE_CHECKING:
    from pipeline.ppo.trainer import PPOTrainer

STATE_FILE = "ppo_state.json"


def save_state(trainer: PPOTrainer, folder: str | Path) -> None:
    """Rank 0 writes adapters, optimizer and state; every rank its random state. Not atomic: the caller commits it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, workers = world()
    torch.save(rng_state(), folder / f"rng_{rank}_of_{workers}.pt")
    if rank != 0:
        return
    for role in trainer.stored_roles():
        trainer.shared.save(role, folder / role)
    torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")
    state = {
        "update": trainer.update,
        "kl_coef": trainer.kl_coef,
        "returns": vars(trainer.moments),
        "skipped_steps": trainer.skipped_steps,
        "scheduler": trainer.scheduler.state_dict(),
        "history": trainer.history,
        "decoding": {"workers": workers, "rows": trainer.sampler.rows},
    }
    if trainer.versions:
        trainer.versions.save(folder, trainer.update)
    (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")


def restore_state(trainer: PPOTrainer, folder: str | Path) -> None:
    """Continue from `folder`. Random states, which only rewards in evaluations draw from, need the same number of workers."""
    folder = Path(folder)
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    for role in trainer.stored_roles():
        trainer.shared.load(role, folder / role)
    device = trainer.shared.device
    trainer.optimizer.load_state_dict(
        torch.load(folder / "optimizer.pt", weights_only=True, map_location=device)
    )
    trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.update = state["update"]
    trainer.kl_coef = state["kl_coef"]
    vars(trainer.moments).update(state["returns"])
    trainer.skipped_steps = state["skipped_steps"]
    trainer.history = state["history"]
    rank, workers = world()
    # How many rows are decoded at once decides the rounding: what is free now must not, unless it is less.
    rows, now = state["decoding"]["rows"], trainer.sampler.rows
    if (
        rows
        and now
        and state["decoding"]["workers"] == workers
        and not trainer.args.local_rollout_forward_batch_size
    ):
        trainer.sampler.rows = min(rows, now)
    if trainer.versions:
        trainer.versions.load(folder)
    random_state = folder / f"rng_{rank}_of_{workers}.pt"
    if random_state.exists():
        set_rng_state(torch.load(random_state, weights_only=True))


def rng_state() -> dict[str, Any]:
    """States of the global generators of Python, numpy and torch, in types that a weights_only load accepts.

    Of the GPUs that the process sees, that of the current one alone: the others are other workers', and another node may
    have fewer.
    """
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    kind, keys, position, has_gauss, cached = numpy
    return {
        "python": [version, list(words), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


@contextmanager
def kept_rng_state() -> Iterator[None]:
    """Restores the global generators after the block, so that numbers drawn in it do not change what follows."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
