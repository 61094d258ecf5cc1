"""Draws the timeline of one PPO update: a row for the trainer and for each rollout worker, a bar for each task.

It is `timeline` of result.json (pipeline/ppo/timeline.py): the update of median length.
"""

from typing import Any

from pipeline.report.plots import COLOURS, GRID, INK, Drawing

TITLE = "An update of median length"
NOTE = (
    "Who did what when. A rollout worker's bar is a chunk that it sampled and scored, named by the update that learns from it. Pale: "
    "the trainer waits. Gaps are time without work."
)
MOST_WORKERS = 8
PHASES = {"rollout": 0, "score": 4, "values": 2, "update": 1, "evaluate": 3, "publish": 5}  # phase -> color
NARROW = 0.15  # share of the width; narrower bars have no name


def drawings(timeline: dict[str, Any] | None) -> list[Drawing]:
    """Returns the drawing of a timeline, or [] if it is empty."""
    if not timeline or not timeline.get("spans") or not timeline.get("seconds"):
        return []
    return [Drawing(TITLE, NOTE, lambda axes: draw(axes, timeline))]


def draw(axes: Any, timeline: dict[str, Any]) -> None:
    spans, seconds = timeline["spans"], timeline["seconds"]
    names = sorted({span["who"] for span in spans}, key=_place)
    rows = {name: row for row, name in enumerate(names[: 1 + MOST_WORKERS])}
    for span in spans:
        if span["who"] in rows:
            _bar(axes, span, rows[span["who"]], seconds, timeline.get("update"))
    axes.set_title(TITLE + (f": update {timeline['update']}" if timeline.get("update") else ""))
    axes.set_xlabel(
        "seconds" if len(rows) == len(names) else f"seconds; and {len(names) - len(rows)} more workers"
    )
    axes.set_xlim(0, seconds)
    axes.set_ylim(max(len(rows), 3) - 0.5, -0.5)  # rows from the top; a bar takes at most a third
    axes.set_yticks(list(rows.values()), list(rows))
    axes.grid(False)


def _place(who: str) -> tuple[bool, int, str]:
    """Returns a sort key: the trainer first, then the workers by number."""
    number = who.rpartition(" ")[2]
    return who != "trainer", int(number) if number.isdecimal() else 0, who


def _bar(axes: Any, span: dict[str, Any], row: int, seconds: float, update: float | None) -> None:
    what, width = span["what"], span["end"] - span["begin"]
    colour = _colour(what, update)
    # Bars are pale, because names are written on them; the edge separates them.
    axes.barh(row, width, 0.7, span["begin"], color=(colour, 0.4), edgecolor=colour, linewidth=0.6)
    if width >= NARROW * seconds:
        axes.annotate(what, (span["begin"] + width / 2, row), color=INK, ha="center", va="center", fontsize=7)


def _colour(what: str, update: float | None) -> str:
    if what == "waiting":
        return GRID
    if what == "lost":
        return INK
    if what.startswith("update "):  # a chunk is lighter if it belongs to a later update
        return COLOURS[0] if what == f"update {update}" else COLOURS[5]
    return COLOURS[PHASES.get(what, 3)]
