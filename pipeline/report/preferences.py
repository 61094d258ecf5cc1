"""Computes and draws margins, calibration and length bias of a reward model from its scores of held-out pairs.

The stage rm writes pairs.json: [{"chosen": score, "rejected": score, "chosen_tokens": length, "rejected_tokens": length}, ...]
"""

import math
from functools import partial
from typing import Any

from pipeline.report import plots
from pipeline.report.plots import COLORS, DASHED, INK, Drawing
from pipeline.statistics import calibration, correlation, mean
from pipeline.text import number

Pair = dict[str, float]


def margins_of(pairs: list[Pair]) -> list[float]:
    return [pair["chosen"] - pair["rejected"] for pair in pairs]


def length_differences(pairs: list[Pair]) -> list[float]:
    """Returns the length of the chosen completion minus the length of the rejected one, in tokens, for each pair."""
    return [pair["chosen_tokens"] - pair["rejected_tokens"] for pair in pairs]


def preference_numbers(pairs: list[Pair]) -> dict[str, float | None]:
    """Returns {name: value} for the numbers in the drawings. A value is None if the pairs do not suffice to compute it."""
    values = margins_of(pairs)
    sides = list(zip(values, length_differences(pairs), strict=True))
    shorter_won, longer_won = [m > 0 for m, n in sides if n < 0], [m > 0 for m, n in sides if n > 0]
    return {
        "accuracy": mean([m > 0 for m in values]),
        "margin": mean(values),
        "calibration error": calibration(values)[0],
        "margin to length, correlation": correlation(values, length_differences(pairs)),
        "accuracy where the chosen completion is shorter": mean(shorter_won) if shorter_won else None,
        "accuracy where the chosen completion is longer": mean(longer_won) if longer_won else None,
    }


def preference_drawings(pairs: list[Pair]) -> list[Drawing]:
    return [Drawing(title, note, partial(draw, pairs=pairs)) for title, note, draw in DRAWINGS]


def preference_png(pairs: list[Pair], title: str) -> bytes:
    """Returns the drawing with this title as a PNG."""
    return plots.figure_png([plot.draw for plot in preference_drawings(pairs) if plot.title == title])


def draw_margins(axes: Any, pairs: list[Pair]) -> None:
    values = margins_of(pairs)
    low, high = min(values), max(values)
    width = max((high - low) / 30, 1e-6)
    # Puts a bin edge at 0, so that no bar mixes correct and wrong pairs.
    edges = [i * width for i in range(math.floor(low / width), math.floor(high / width) + 2)]
    _, _, bars = axes.hist(values, bins=edges)
    for bar in bars:
        bar.set_facecolor(COLORS[1] if bar.get_x() < -width / 2 else COLORS[0])
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(title="Margins of the held-out pairs", xlabel="chosen - rejected score", ylabel="pairs")
    axes.margins(y=0.2)
    _remark(axes, f"{preference_numbers(pairs)['accuracy']:.1%} correct", top=True)


def draw_calibration(axes: Any, pairs: list[Pair]) -> None:
    error, bins = calibration(margins_of(pairs))
    axes.plot([0.5, 1], [0.5, 1], **DASHED)
    confidence, accuracy = [bucket["confidence"] for bucket in bins], [bucket["accuracy"] for bucket in bins]
    axes.plot(confidence, accuracy, color=COLORS[0], linewidth=1)
    bounds = [[bucket[f"accuracy_{bound}"] for bucket in bins] for bound in ("low", "high")]
    axes.vlines(confidence, *bounds, color=COLORS[0], linewidth=0.8, alpha=0.5)
    sizes = [14 + 80 * bucket["pairs"] / len(pairs) for bucket in bins]
    axes.scatter(confidence, accuracy, s=sizes, color=COLORS[0], linewidths=0)
    axes.set(title="Calibration", xlabel="confidence", ylabel="accuracy")
    axes.set(xlim=(0.48, 1.02), ylim=(min(0.45, *accuracy) - 0.04, 1.04))
    _remark(axes, f"calibration error {error:.1%}")


def draw_lengths(axes: Any, pairs: list[Pair]) -> None:
    axes.axhline(0, **DASHED)
    # More than 500 dots are drawn as a bitmap, because the SVG would have one element per dot.
    dots = {"s": 9, "alpha": 0.5, "color": COLORS[0], "linewidths": 0, "rasterized": len(pairs) > 500}
    axes.scatter(length_differences(pairs), margins_of(pairs), **dots)
    axes.set(title="Length bias", xlabel="chosen longer by, tokens", ylabel="margin")
    axes.margins(y=0.2)
    _remark(
        axes, f"correlation {number(preference_numbers(pairs)['margin to length, correlation']) or 'none'}"
    )


def _remark(axes: Any, text: str, top: bool = False) -> None:
    position = {"xy": (0.98, 0.95 if top else 0.06), "va": "top" if top else "baseline"}
    axes.annotate(text, xycoords="axes fraction", ha="right", color=COLORS[0], fontsize=8.5, **position)


DRAWINGS = (
    ("Margins of the held-out pairs",
     "Chosen minus rejected score of each pair. Left of 0, the model prefers the rejected completion.", draw_margins),
    ("Calibration",
     "Confidence in the preferred completion against accuracy. Larger dots stand for more pairs. Above the diagonal, the model "
     "is underconfident; below the diagonal, it is overconfident.", draw_calibration),
    ("Length bias",
     "Each dot is a pair. x: tokens by which the chosen completion is longer; y: margin. A slope means that length itself "
     "is rewarded.", draw_lengths),
)  # fmt: skip
