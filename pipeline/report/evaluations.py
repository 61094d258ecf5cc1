"""Draws whether a score can be trusted: what `evaluate` leaves in evaluation.json, and the judge over the KL of a PPO run."""

import math
from collections.abc import Sequence
from typing import Any

from pipeline.report.panels import History
from pipeline.report.plots import COLOURS, DASHED, INK, Drawing, number

FEWEST_POINTS = 4  # evaluations that a fit of two numbers needs


def drawings(evaluation: dict[str, Any]) -> list[Drawing]:
    made = []
    if probes := evaluation.get("probes"):
        note = (
            "How far each edit of a completion moves its score, with 95 % intervals. The last edits make it worse, so the score "
            "should fall; the others should not move it."
        )
        made.append(Drawing("Probes of the reward", note, lambda axes: draw_probes(axes, probes)))
    if curve := evaluation.get("best_of_n"):
        note = (
            "The reward chooses the best of n completions. If the judge's score falls while the reward's rises, the reward is "
            "being exploited."
        )
        made.append(Drawing("Best of n", note, lambda axes: draw_best_of_n(axes, curve)))
    return made


def draw_probes(axes: Any, probes: dict[str, Any]) -> None:
    for place, one in enumerate(reversed(list(probes.values()))):
        color = COLOURS[0] if one["verdict"] == "ok" else COLOURS[1]
        axes.plot([one["low"], one["high"]], [place, place], color=color, linewidth=2)
        axes.scatter([one["effect"]], [place], s=16, color=color, linewidths=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    names = [name.replace("_", " ") for name in reversed(probes)]
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.set(title="Probes of the reward", xlabel="standard deviations of the score")


def draw_best_of_n(axes: Any, curve: list[dict[str, float]]) -> None:
    sizes = [point["n"] for point in curve]
    for name, label, color in (("proxy", "reward", COLOURS[0]), ("gold", "judge", COLOURS[1])):
        values = [point[name] - curve[0][name] for point in curve]
        axes.plot(sizes, values, color=color, linewidth=1.2, marker="o", markersize=3)
        axes.annotate(label, (sizes[-1], values[-1]), color=color, fontsize=8.5, ha="right", va="bottom")
    axes.axhline(0, **DASHED)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(int(n)) for n in sizes])
    axes.set(title="Best of n", xlabel="completions to choose from", ylabel="score above n = 1")
    axes.margins(y=0.2)


def over_optimization(history: History, before: float | None) -> list[Drawing]:
    """Returns the drawing of reward and judge over the distance of a PPO run's policy, with the fit of the judge's score.

    Args:
        before: the judge's score of the policy before training.
    """
    kls, scores, rewards = (dict(history.get(f"eval_{name}", [])) for name in ("kl", "judge", "reward"))
    steps = kls.keys() & scores.keys() & rewards.keys()
    points = sorted((kls[step], scores[step], rewards[step]) for step in steps if kls[step] > 0)
    if before is None or len(points) < FEWEST_POINTS:
        return []
    alpha, beta = fit([kl for kl, _, _ in points], [score - before for _, score, _ in points])
    title = "Judge over distance"
    note = "A dot is an evaluation: the judge's score, and as rings the reward's. The line is the fit of Gao et al. (2022), d (a - b ln d) with d = sqrt(KL)."
    if (peak := peak_kl(alpha, beta)) is None:
        note += " It has no peak: the judge's score still rises with the KL."
    else:
        beyond = ", beyond these evaluations" if peak > points[-1][0] else ""
        note += f" It peaks at a KL of {number(peak)} nats{beyond}."
    note += " It describes this run and is no early warning."

    def draw(axes: Any) -> None:
        distances = [math.sqrt(kl) for kl, _, _ in points]
        axes.scatter(distances, [score for _, score, _ in points], s=14, color=COLOURS[0], linewidths=0)
        other = axes.twinx()
        rings = [reward for _, _, reward in points]
        other.scatter(distances, rings, s=14, color="none", edgecolors=COLOURS[2])
        other.set_ylabel("reward")
        other.grid(False)
        line = [distances[-1] * i / 60 for i in range(1, 61)]
        fitted = [before + d * (alpha - beta * math.log(d)) for d in line]
        axes.plot(line, fitted, color=COLOURS[1], linewidth=1.2)
        axes.axhline(before, **DASHED)
        axes.set(title=title, xlabel="square root of the KL, in nats", ylabel="score of the judge")

    return [Drawing(title, note, draw)]


def fit(kls: Sequence[float], gains: Sequence[float]) -> tuple[float, float]:
    """Returns alpha and beta of gain = d (alpha - beta ln d), d = sqrt(KL), by least squares.

    Gao, Schulman and Hilton 2022, https://arxiv.org/abs/2210.10760, section 3.1, for reinforcement learning.
    """
    import numpy as np

    d = np.sqrt(np.array(kls, dtype=float))
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([d, -d * np.log(d)], 1), np.array(gains, dtype=float))
    return float(alpha), float(beta)


def peak_kl(alpha: float, beta: float) -> float | None:
    """Returns the KL at which d (alpha - beta ln d) is highest, d = exp(alpha / beta - 1), or None if it keeps rising."""
    return math.exp(2 * (alpha / beta - 1)) if beta > 0 and alpha < 20 * beta else None


def examples(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns for each failed probe the example whose score moved most: prompt, completion before and after, both scores."""
    return [
        {"probe": name.replace("_", " "), "verdict": one["verdict"], **one["worst"][0]}
        for name, one in evaluation.get("probes", {}).items()
        if one["verdict"] != "ok"
    ]


def benchmarks(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a table: each benchmark and its subsets with number of rows, score and 95 % interval."""
    rows = []
    for name, table in evaluation.get("benchmarks", {}).items():
        rows.append({"name": name, **table["levels"]["all"]})
        both = {**table["levels"], **table["subsets"]}
        rows += [{"name": f"{name} / {part}", **one} for part, one in both.items() if part != "all"]
    return rows
