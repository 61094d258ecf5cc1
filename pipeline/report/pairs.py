"""What the scores of held-out pairs say about a reward model beyond its accuracy: margins, calibration, length bias.

A pair is {"chosen": score, "rejected": score, "chosen_tokens": length, "rejected_tokens": length}, as the `rm` stage
writes them to pairs.json. The figures are plain arithmetic; the drawings take a matplotlib axes.
"""

import itertools
import math
from typing import Any

from pipeline.report.plots import COLOURS, FAINT, INK, Draw, number

Pair = dict[str, float]


def margins(pairs: list[Pair]) -> list[float]:
    return [pair["chosen"] - pair["rejected"] for pair in pairs]


def accuracy(pairs: list[Pair]) -> float:
    return sum(margin > 0 for margin in margins(pairs)) / len(pairs)


def calibration(pairs: list[Pair], bins: int = 8) -> list[tuple[float, float, int]]:
    """[(predicted, observed, pairs)] in bins of equal size, the least certain pairs first.

    A Bradley-Terry model gives the reply that it prefers the probability sigmoid(|margin|) of being the better one
    (Bradley and Terry, 1952). Observed is the share of the pairs in which it was.
    """
    ordered = sorted(margins(pairs), key=abs)
    edges = [round(i * len(ordered) / bins) for i in range(bins + 1)]
    found = []
    for start, end in itertools.pairwise(edges):
        if part := ordered[start:end]:
            predicted = sum(1 / (1 + math.exp(-abs(m))) for m in part) / len(part)
            found.append((predicted, sum(m > 0 for m in part) / len(part), len(part)))
    return found


def calibration_error(pairs: list[Pair], bins: int = 8) -> float:
    """Expected calibration error: |predicted - observed|, averaged over the pairs (Guo et al., arXiv 1706.04599)."""
    return sum(abs(p - o) * n for p, o, n in calibration(pairs, bins)) / len(pairs)


def length_bias(pairs: list[Pair]) -> dict[str, float]:
    """Does the model prefer length?

    `correlation` (Pearson) of the difference in tokens with the difference in score; accuracy where the chosen reply is
    the shorter one, and where it is the longer one, with the number of pairs of each.
    """
    lengths = [pair["chosen_tokens"] - pair["rejected_tokens"] for pair in pairs]
    found = {"correlation": _correlation(lengths, margins(pairs))}
    for name, sign in (("shorter", -1), ("longer", 1)):
        part = [pair for pair, length in zip(pairs, lengths, strict=True) if length * sign > 0]
        found[f"pairs_{name}"] = len(part)
        found[f"accuracy_{name}"] = accuracy(part) if part else math.nan
    return found


def _correlation(xs: list[float], ys: list[float]) -> float:
    """Pearson's; 0 where one side does not vary."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    spread = math.sqrt(sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys))
    return covariance / spread if spread else 0.0


# ---------------------------------------------------------------------------------------------------- drawings


def drawings(pairs: list[Pair]) -> dict[str, tuple[Draw, str]]:
    """{title: (drawing, how to read it)} of the held-out pairs of a reward model."""
    return {
        "Margins of the held-out pairs": (
            lambda axes: draw_margins(axes, pairs),
            "Chosen minus rejected score of each pair. Left of 0 the model prefers the wrong reply.",
        ),
        "Calibration": (
            lambda axes: draw_calibration(axes, pairs),
            "How sure the model is of its preference, against how often it is right. On the diagonal it knows what it does not know.",
        ),
        "Length bias": (
            lambda axes: draw_lengths(axes, pairs),
            "Each dot a pair: how much longer the chosen reply is, and its margin. A slope means that length itself is rewarded.",
        ),
    }


def draw_margins(axes: Any, pairs: list[Pair]) -> None:
    found = margins(pairs)
    low, high = min(found), max(found)
    # Bins that meet at 0, so that no bar is half right.
    width = max((high - low) / 30, 1e-6)
    edges = [i * width for i in range(math.floor(low / width), math.floor(high / width) + 2)]
    _, _, bars = axes.hist(found, bins=edges)
    for bar in bars:
        bar.set_facecolor(COLOURS[1] if bar.get_x() < -width / 2 else COLOURS[0])
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(title="Margins of the held-out pairs", xlabel="chosen - rejected score", ylabel="pairs")
    right = f"{accuracy(pairs):.1%} right"
    axes.annotate(
        right, (0.98, 0.96), xycoords="axes fraction", ha="right", va="top", color=COLOURS[0], fontsize=8.5
    )


def draw_calibration(axes: Any, pairs: list[Pair]) -> None:
    bins = calibration(pairs)
    axes.plot([0.5, 1], [0.5, 1], color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.plot([p for p, _, _ in bins], [o for _, o, _ in bins], color=COLOURS[0], marker="o", markersize=4)
    axes.set(title="Calibration", xlabel="how sure the model is", ylabel="how often it is right")
    axes.set(xlim=(0.48, 1.02), ylim=(min(0.45, min(o for _, o, _ in bins) - 0.05), 1.03))
    axes.annotate(
        f"off by {calibration_error(pairs):.1%} on average",
        (0.98, 0.06), xycoords="axes fraction", ha="right", color=COLOURS[0], fontsize=8.5,
    )  # fmt: skip


def draw_lengths(axes: Any, pairs: list[Pair]) -> None:
    lengths = [pair["chosen_tokens"] - pair["rejected_tokens"] for pair in pairs]
    axes.axhline(0, color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
    # As a picture inside the SVG where there are many: each dot would be an element of the page.
    axes.scatter(
        lengths, margins(pairs), s=9, alpha=0.5, color=COLOURS[0], linewidths=0, rasterized=len(pairs) > 500
    )
    axes.set(title="Length bias", xlabel="chosen longer by, tokens", ylabel="margin")
    axes.annotate(
        f"correlation {number(length_bias(pairs)['correlation'])}",
        (0.98, 0.06), xycoords="axes fraction", ha="right", color=COLOURS[0], fontsize=8.5,
    )  # fmt: skip
