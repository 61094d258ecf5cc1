"""Saves and restores the random states of Python, numpy and torch. `torch.load(weights_only=True)` can load the saved states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Returns the states of the global generators. Includes only the current GPU, because other GPUs belong to other workers."""
    numpy_state: Any = np.random.get_state()
    kind, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


@contextmanager
def kept_rng_state() -> Iterator[None]:
    """Restores the random states after the `with` block, so that random numbers drawn in the block do not affect later ones."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
