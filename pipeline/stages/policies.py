"""Computes the length-controlled win rate of a policy, and its best-of-n curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

import numpy as np

from pipeline.statistics import mean

RESAMPLES = 200  # number of bootstrap samples
STRENGTH = 100.0  # inverse of the l1 penalty, as in AlpacaEval's fit without cross-validation


def length_controlled(wins: Sequence[float], differences: Sequence[float]) -> tuple[float, float, float]:
    """Returns the win rate at equal lengths of the completions, with the ends of its 95 % interval.

    The method is AlpacaEval 2's (https://arxiv.org/abs/2404.04475), without the term for the difficulty of prompts, which only
    AlpacaEval's prompts have. The method fits a logistic regression of the wins on tanh(length difference / its standard
    deviation) and a constant. The win rate is the sigmoid of the constant. The interval comes from a bootstrap over the prompts.

    Args:
        wins: for each prompt 1 for a win, 0.5 for a tie, or 0 for a loss.
        differences: for each prompt the length of the policy's completion minus the length of the baseline's.
    """
    spread = stdev(differences) if len(differences) > 1 else 0.0
    features = np.array([[math.tanh(d / spread) if spread else 0.0, 1.0] for d in differences])
    shares = np.array(wins, dtype=float)
    resamples = np.random.default_rng(0).integers(0, len(shares), (RESAMPLES, len(shares)))
    rates = sorted(_at_equal_length(features[rows], shares[rows]) for rows in resamples)
    low, high = (rates[int(q * (RESAMPLES - 1))] for q in (0.025, 0.975))
    return _at_equal_length(features, shares), low, high


def _at_equal_length(features: np.ndarray, shares: np.ndarray) -> float:
    """Fits the logistic regression, and returns the sigmoid of its constant.

    As in AlpacaEval, each row enters the fit twice: as a win with the weight in `shares`, and as a loss with 1 minus this weight.
    """
    from sklearn.linear_model import LogisticRegression

    weights = np.concatenate([shares, 1 - shares])
    labels = np.repeat([1, 0], len(shares))
    is_used = weights > 0
    if len(set(labels[is_used])) < 2:
        return float(shares[0] > 0.5)  # only wins or only losses, so there is nothing to fit
    options = {"l1_ratio": 1.0, "solver": "liblinear", "C": STRENGTH, "tol": 1e-10, "max_iter": 10_000}
    model = LogisticRegression(**options, fit_intercept=False, random_state=123)
    model.fit(np.concatenate([features, features])[is_used], labels[is_used], sample_weight=weights[is_used])
    return 1 / (1 + math.exp(-float(model.coef_[0, 1])))


def best_of_n(proxy: Sequence[float], gold: Sequence[float], n: int) -> float:
    """Returns the expected gold score of the completion with the highest proxy score among n completions.

    The estimate is unbiased, because it is the mean over all subsets of n from a prompt's N >= n completions. The estimate is the
    sum over i = n..N of C(i-1, n-1) / C(N, n) times the gold score of the i-th completion by ascending proxy score (Nakano et al.
    2021, https://arxiv.org/abs/2112.09332, appendix I).
    """
    ranked = [g for _, g in sorted(zip(proxy, gold, strict=True), key=lambda pair: pair[0])]
    total = math.comb(len(ranked), n)
    return sum(math.comb(i, n - 1) / total * score for i, score in enumerate(ranked) if i >= n - 1)


def best_of_curve(
    proxy: Sequence[Sequence[float]], gold: Sequence[Sequence[float]]
) -> list[dict[str, float]]:
    """Returns for n = 1, 2, 4, ... the mean proxy and gold scores of best-of-n, and an upper bound of its KL from the policy.

    The bound is ln n - (n - 1) / n nats per completion (https://arxiv.org/abs/2401.01879).
    """
    largest = min(map(len, proxy))
    sizes = [2**k for k in range(largest.bit_length()) if 2**k < largest] + [largest]
    return [
        {
            "n": n,
            "kl_bound": math.log(n) - (n - 1) / n,
            "proxy": mean([best_of_n(p, p, n) for p in proxy]),
            "gold": mean([best_of_n(p, g, n) for p, g in zip(proxy, gold, strict=True)]),
        }
        for n in sizes
    ]
