"""Draws plots that show how reliable a reward is, from the tables that `evaluate` writes to evaluation.json."""

from typing import Any

from pipeline.report.plots import COLORS, DASHED, INK, Drawing


def evaluation_drawings(evaluation: dict[str, Any]) -> list[Drawing]:
    drawings = []
    if probes := evaluation.get("probes"):
        note = (
            "Mean change of a completion's score by each edit, with 95 % intervals. The last edits make the completion worse, so "
            "the score should fall; the other edits should not move the score."
        )
        drawings.append(Drawing("Probes of the reward", note, lambda axes: draw_probes(axes, probes)))
    if curve := evaluation.get("best_of_n"):
        note = (
            "The reward chooses the best of n completions. If the judge's score falls while the reward's score rises, the reward "
            "is being exploited."
        )
        drawings.append(Drawing("Best of n", note, lambda axes: draw_best_of_n(axes, curve)))
    return drawings


def draw_probes(axes: Any, probes: dict[str, Any]) -> None:
    for position, probe in enumerate(reversed(list(probes.values()))):
        color = COLORS[0] if probe["verdict"] == "ok" else COLORS[1]
        axes.plot([probe["low"], probe["high"]], [position, position], color=color, linewidth=2)
        axes.scatter([probe["effect"]], [position], s=16, color=color, linewidths=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    names = [name.replace("_", " ") for name in reversed(probes)]
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.set(title="Probes of the reward", xlabel="standard deviations of the score")


def draw_best_of_n(axes: Any, curve: list[dict[str, float]]) -> None:
    sizes = [point["n"] for point in curve]
    for name, label, color in (("proxy", "reward", COLORS[0]), ("gold", "judge", COLORS[1])):
        values = [point[name] - curve[0][name] for point in curve]
        axes.plot(sizes, values, color=color, linewidth=1.2, marker="o", markersize=3)
        axes.annotate(label, (sizes[-1], values[-1]), color=color, fontsize=8.5, ha="right", va="bottom")
    axes.axhline(0, **DASHED)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(int(n)) for n in sizes])
    axes.set(title="Best of n", xlabel="completions to choose from", ylabel="score above n = 1")
    axes.margins(y=0.2)


def probe_examples(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one example for each failed probe: the completion whose score changed most, before and after the probe's edit."""
    return [
        {"probe": name.replace("_", " "), "verdict": probe["verdict"], **probe["worst"][0]}
        for name, probe in evaluation.get("probes", {}).items()
        if probe["verdict"] != "ok"
    ]


def benchmark_rows(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns table rows for the benchmarks and their subsets, with the number of rows, the score, and its 95 % interval."""
    rows = []
    for name, table in evaluation.get("benchmarks", {}).items():
        rows.append({"name": name, **table["levels"]["all"]})
        parts = {**table["levels"], **table["subsets"]}
        rows += [{"name": f"{name} / {part}", **score} for part, score in parts.items() if part != "all"]
    return rows
