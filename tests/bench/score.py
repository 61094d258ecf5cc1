"""What both sides of the part `score` share: a Python reward on the text of a completion, the settings, and the goal."""

import json
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

KIND = {"good", "pleasure", "thank", "happy", "help", "helps", "hope", "nice", "please"}
GRUFF = {"obviously", "everybody", "look", "why", "who", "cares"}


@dataclass(frozen=True)
class Goal:
    """How long a size learns, and what is read off its curve."""

    updates: int
    score: float  # updates and samples until it is reached
    kl: float  # nats per completion: the score where it is reached


# `large` writes random tokens: no text to score
GOALS = {
    "toy": Goal(2, -1.0, 0.0),
    "demo": Goal(24, 2.0, 6.0),
}
# What is not here is the same by default (clip ranges 0.2, vf_coef 0.1, gamma 1, lam 0.95, whitened advantages)
SETTINGS: dict[str, Any] = {
    "num_ppo_epochs": 4,
    "num_mini_batches": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "kl_coef": 0.05,
    "temperature": 1.0,
}
# The optimizer is variants.OPTIMIZER_OF_TRL


def courtesy(completion: str) -> float:
    """Kind words less gruff ones."""
    words = re.findall(r"[a-z]+", completion.lower())
    return float(sum((word in KIND) - (word in GRUFF) for word in words))


def write(curve: list[tuple[float, float]]) -> None:
    """(mean score, KL) of each update, to where the parent asked for it."""
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps({"curve": curve}))


def reached(curve: list[tuple[float, float]], score: float) -> float | None:
    """Updates until the mean score of one is at least `score`; None: it never was."""
    return next((float(n) for n, (mean, _) in enumerate(curve, 1) if mean >= score), None)


def score_at(curve: list[tuple[float, float]], kl: float) -> float | None:
    """The mean score where the KL first reaches `kl`, between two updates; None: it never did."""
    for (score, before), (next_score, after) in pairwise(curve):
        if after >= kl:
            return score + (next_score - score) * (kl - before) / max(after - before, 1e-9)
    return None
