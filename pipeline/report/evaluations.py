"""Draws what `evaluate` leaves in evaluation.json: the probes of a reward, and the best-of-n curve of a policy."""

from typing import Any

from pipeline.report.plots import COLOURS, FAINT, INK, Drawing


def drawings(evaluation: dict[str, Any]) -> list[Drawing]:
    """Returns drawings of what was measured."""
    made = [
        Drawing(
            "Probes of the reward",
            "How far each edit of a completion moves its score, with 95 % intervals. The last edits make it worse, so the score "
            "should fall; the others should not move it.",
            lambda axes: draw_probes(axes, evaluation["probes"]),
        ),
        Drawing(
            "Best of n",
            "The reward chooses the best of n completions. If the judge's score falls while the reward's rises, the reward is "
            "being exploited.",
            lambda axes: draw_best_of_n(axes, evaluation["best_of_n"]),
        ),
    ]
    return [one for one, key in zip(made, ("probes", "best_of_n"), strict=True) if evaluation.get(key)]


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
    axes.axhline(0, color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(int(n)) for n in sizes])
    axes.set(title="Best of n", xlabel="completions to choose from", ylabel="score above n = 1")
    axes.margins(y=0.2)


def examples(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the example of each failed probe that its edit moved most: prompt, completion before and after, both scores."""
    return [
        {"probe": name.replace("_", " "), "verdict": one["verdict"], **one["worst"][0]}
        for name, one in evaluation.get("probes", {}).items()
        if one["verdict"] != "ok"
    ]


def benchmarks(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a table: each benchmark and its subsets with number of rows, score and 95 % interval."""
    rows = []
    for name, table in evaluation.get("benchmarks", {}).items():
        rows.append({"name": name, "rows": table["rows"], "score": table["score"]})
        both = {**table["levels"], **table["subsets"]}
        rows += [{"name": f"{name} / {part}", **one} for part, one in both.items() if part != "all"]
    return rows
