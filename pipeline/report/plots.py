"""Draws a panel as an inline SVG with the page's colors, or a group of panels as a PNG.

Color-blind readers can distinguish these colors (Okabe and Ito). Each line has a label at its end, so there is no legend.
"""

import io
import itertools
import re
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from pipeline.report.panels import HELD_OUT, History, Panel, Points
from pipeline.text import number

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, FAINT, GRID = "#1f2328", "#6e7781", "#d8dee4"
# {color: CSS variable that replaces this color in an SVG}, so that the page can use different colors in dark mode
VARIABLES = {color: f"c{i}" for i, color in enumerate(COLORS)} | {INK: "ink", FAINT: "faint", GRID: "grid"}
# {label of a line: its color in all panels}
FIXED = dict(zip(("rollout", HELD_OUT, "update", "values", "score"), COLORS, strict=False))
SIZE = (3.9, 2.15)  # width and height of one panel in inches
SMOOTH_FROM = 60  # lines with at least this many points are drawn pale, with their running mean on top
# style of a reference line
DASHED: Any = {
    "color": FAINT,
    "linewidth": 0.8,
    "linestyle": (0, (2, 2)),
    "zorder": 1,
}
Draw = Callable[[Any], None]  # function that draws into matplotlib axes


class Drawing(NamedTuple):
    """One picture of a report, with its title and explanation."""

    title: str
    note: str  # text that explains how to read the picture
    draw: Draw


STYLE: Any = {
    "font.size": 8.5,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # writes labels as text, not as paths, so that users can search them, and they have the page's font
    "text.parse_math": False,  # otherwise dollar signs in the name of a run would start a formula
    "svg.hashsalt": "report",  # makes the ids in an SVG reproducible
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def draw_figure(draws: list[Draw]) -> Any:
    """Returns a matplotlib figure with the panels in up to three columns. Does not use pyplot, which has global state."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if len(draws) == 4 else min(3, len(draws))
    rows = -(-len(draws) // columns)
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
        FigureCanvasAgg(drawing)
        for index, draw in enumerate(draws, 1):
            draw(drawing.add_subplot(rows, columns, index))
    return drawing


def figure_png(draws: list[Draw]) -> bytes:
    file = io.BytesIO()
    draw_figure(draws).savefig(file, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return file.getvalue()


def panel_svg(draw: Draw, prefix: str, label: str) -> str:
    """Returns one panel as an <svg> element.

    Args:
        prefix: prefix for the ids in the element. The prefix must be unique on the page.
        label: text for screen readers.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        draw_figure([draw]).savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    # Removes the XML prologue, metadata, comments and unused ids, and replaces colors by CSS variables.
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    ids = set(re.findall(r'(?:href="|url\()#([\w-]+)', text))
    text = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in ids else "", text)
    text = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", text)
    for color, variable in VARIABLES.items():
        text = re.sub(color, f"var(--{variable})", text, flags=re.IGNORECASE)
    view_box = re.search(r'viewBox="[^"]*"', text)
    head = f'<svg {view_box[0] if view_box else ""} role="img" aria-label="{escape(label)}">'
    return re.sub(r"<svg[^>]*>", head, text, count=1)


# ------------------------------------------------------------------------------------------------ what to draw


def curve_drawer(panel: Panel, runs: dict[str, History], axis: str, best: int | None = None) -> Draw | None:
    """Returns a function that draws a panel, or None if there is nothing to draw.

    If there are several runs, the panel has one line per run, and panels with bands or stacks are not drawn.

    Args:
        runs: {name: curves} for one run, or for several runs of the same stage.
        axis: label of the horizontal axis, `step` or `update`.
        best: step of the best evaluation, which is marked on the lines of eval metrics.
    """
    drawable = {name: lines for name, history in runs.items() if (lines := panel.select(history))}
    if not drawable or (len(runs) > 1 and panel.kind != "lines"):
        return None
    curves = next(iter(drawable.values()))
    if len(drawable) > 1:
        # If several runs share a panel, each run gets one line: its eval metric if it has one, or else its first metric.
        main_label = next((name for name in (HELD_OUT, "highest so far") if name in panel.lines.values()), "")
        curves = {run: lines.get(main_label) or next(iter(lines.values())) for run, lines in drawable.items()}
    held_out = [points for label, points in curves.items() if label in panel.held_out]
    marks = [(step, value) for points in held_out for step, value in points if step == best]

    def draw(axes: Any) -> None:
        _frame(axes, panel, axis)
        _mark(axes, marks)
        {"lines": _lines, "stack": _stack, "band": _band}[panel.kind](axes, panel, curves)

    return draw


def colors_of(names: list[str]) -> list[str]:
    """Returns one color per line: the color in FIXED, or else a color that no line of the panel has in FIXED."""
    free = itertools.cycle([color for color in COLORS if color not in map(FIXED.get, names)])
    return [FIXED.get(name) or next(free) for name in names]


def _frame(axes: Any, panel: Panel, axis: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=panel.title, xlabel=axis, ylabel=panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if panel.level is not None:
        axes.axhline(panel.level, **DASHED)


def _mark(axes: Any, marks: Points) -> None:
    for step, value in marks:
        axes.axvline(step, **DASHED)
        axes.plot([step], [value], marker="o", markersize=8, markerfacecolor="none", color=INK, linewidth=0)
        transform = axes.get_xaxis_transform()  # x is in steps; y is a fraction of the panel's height
        axes.annotate(f"kept: step {step}", (step, 0.04), (4, 0), transform, "offset points", color=FAINT)


def _lines(axes: Any, panel: Panel, lines: History) -> None:
    ends = []
    for (name, points), color in zip(lines.items(), colors_of(list(lines)), strict=True):
        steps, values = [step for step, _ in points], [value for _, value in points]
        if len(values) >= SMOOTH_FROM:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            width = max(5, len(values) // 20)  # each point becomes the mean of the last `width` values
            windows = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
            values = [sum(window) / len(window) for window in windows]
        axes.plot(steps, values, color=color, marker="o" if len(values) < 8 else None, markersize=3.2)
        ends.append((f"{name} {number(values[-1])}" if name == HELD_OUT else name, values[-1], color))
    if panel.zero:
        axes.set_ylim(0, 1.08 * max(v for points in lines.values() for _, v in points) or 1)
    _name_ends(axes, ends if len(lines) > 1 else [(number(ends[0][1]), *ends[0][1:])])


def _band(axes: Any, panel: Panel, lines: History) -> None:
    (low, lowest), (_, mean), (high, highest) = lines.items()
    steps, color = [step for step, _ in mean], COLORS[0]
    edges = ([value for _, value in points] for points in (lowest, highest))
    axes.fill_between(steps, *edges, color=color, alpha=0.15, linewidth=0)
    axes.plot(steps, [value for _, value in mean], color=color)
    axes.axhline(0, **DASHED)
    ends = [(low, lowest[-1][1], FAINT), ("mean", mean[-1][1], color), (high, highest[-1][1], FAINT)]
    _name_ends(axes, ends)


def _stack(axes: Any, panel: Panel, lines: History) -> None:
    steps = [step for step, _ in next(iter(lines.values()))]
    values = [[dict(points).get(step, 0.0) for step in steps] for points in lines.values()]
    colors = colors_of(list(lines))
    axes.stackplot(steps, values, colors=colors, alpha=0.75, linewidth=0)
    # Limits the axis to 2.5 times the median, because one slow update (often the first) would flatten all other updates.
    totals = sorted(map(sum, zip(*values, strict=True)))
    axes.set_ylim(0, min(totals[-1], 2.5 * totals[len(totals) // 2]) * 1.05 or 1)
    floor, ends = 0.0, []
    for (name, _), column, color in zip(lines.items(), values, colors, strict=True):
        ends.append((name, floor + column[-1] / 2, color))
        floor += column[-1]
    _name_ends(axes, ends)


def _name_ends(axes: Any, ends: list[tuple[str, float, str]]) -> None:
    """Writes each line's label to the right of the line's last point. Moves labels apart if they would overlap."""
    low, high = axes.get_ylim()
    labels = sorted(
        [min(1.0, max(0.0, (y - low) / (high - low or 1))), name, color] for name, y, color in ends
    )
    for lower, upper in itertools.pairwise(labels):
        upper[0] = max(upper[0], lower[0] + 0.1)
    overshoot = max(0.0, labels[-1][0] - 1.0)
    for y, name, color in labels:
        position = (1.015, y - overshoot)
        axes.annotate(str(name), position, xycoords="axes fraction", color=color, va="center", fontsize=8)
