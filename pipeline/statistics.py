"""Computes statistics of evaluations from plain numbers: intervals, calibration, correlation, diversity."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def wilson_interval(shares: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % Wilson score interval of the mean p of n `shares`. Each share is 0, 1, or 0.5 for a tie.

    The interval is (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n) (Wilson 1927). The interval stays inside [0, 1], and is
    accurate for few rows and near 0 and 1. With ties, whose variance is below p(1-p), the interval is a little too wide.
    """
    p, n, z = mean(shares), len(shares), NormalDist().inv_cdf(0.975)
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # Clips to [0, 1], because rounding errors may exceed the range by about 1e-16.
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def sigmoid(x: float) -> float:
    """Returns the sigmoid, without overflow for large negative x."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def calibration(margins: Sequence[float]) -> tuple[float, list[dict[str, Any]]]:
    """Returns the expected calibration error and the reliability bins of a Bradley-Terry model.

    A margin is score(chosen) - score(rejected). The model's confidence in the completion that it prefers is sigmoid(|margin|),
    from 0.5 to 1. The model is right if the margin is above 0. Bins have equal widths. The error is the mean over pairs of
    |accuracy - confidence| of the pair's bin (Guo et al. 2017). `accuracy_low` and `accuracy_high` are a 95 % interval.
    """
    bins = 10
    members: list[list[float]] = [[] for _ in range(bins)]
    for margin in margins:
        members[min(int((2 * sigmoid(abs(margin)) - 1) * bins), bins - 1)].append(margin)
    error, table = 0.0, []
    for i, group in enumerate(members):
        if group:
            correct, confidence = sum(m > 0 for m in group), sum(sigmoid(abs(m)) for m in group)
            low, high = wilson_interval([m > 0 for m in group])
            error += abs(correct - confidence)
            table.append(
                {
                    "low": 0.5 + 0.5 * i / bins,
                    "high": 0.5 + 0.5 * (i + 1) / bins,
                    "pairs": len(group),
                    "confidence": confidence / len(group),
                    "accuracy": correct / len(group),
                    "accuracy_low": low,
                    "accuracy_high": high,
                }
            )
    return error / len(margins), table


def temperature(margins: Sequence[float]) -> float:
    """Returns the temperature T > 0 for which sigmoid(margin / T) has the lowest loss on pairs (Guo et al. 2017).

    If T is above 1, the scores are too confident. The loss is convex in 1 / T, so a golden-section search on [1e-3, 1e3] finds
    its minimum.
    """
    import numpy as np

    values = np.asarray(margins, dtype=float)

    def loss(scale: float) -> float:
        return float(np.logaddexp(0, -values * scale).mean())

    low, high, ratio = 1e-3, 1e3, (math.sqrt(5) - 1) / 2
    while high - low > 1e-9 * high:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return 2 / (low + high)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Returns Pearson's correlation, or None if one variable is constant."""
    x, y = mean(xs), mean(ys)
    cross_sum = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True))
    spread = math.sqrt(sum((a - x) ** 2 for a in xs) * sum((b - y) ** 2 for b in ys))
    return cross_sum / spread if spread > 0 else None


def ngrams(tokens: Sequence[Any], n: int) -> list[tuple[Any, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def repetition(text: Sequence[Any], n: int = 4) -> float:
    """Returns the share of a text's n-grams that repeat earlier n-grams. The share is near 1 if the text repeats itself."""
    grams = ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
