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
    spans, seconds, update = timeline["spans"], timeline["seconds"], timeline.get("update")
    names = sorted({span["who"] for span in spans}, key=_place)
    rows = {name: row for row, name in enumerate(names[: 1 + MOST_WORKERS])}
    for span in spans:
        if span["who"] not in rows:
            continue
        what, begin, width, row = span["what"], span["begin"], span["end"] - span["begin"], rows[span["who"]]
        colour = {"waiting": GRID, "lost": INK}.get(what) or COLOURS[PHASES.get(what, 3)]
        if what.startswith("update "):  # a chunk is lighter if it belongs to a later update
            colour = COLOURS[0] if what == f"update {update}" else COLOURS[5]
        # Bars are pale, because names are written on them; the edge separates them.
        axes.barh(row, width, 0.7, begin, color=(colour, 0.4), edgecolor=colour, linewidth=0.6)
        if width >= NARROW * seconds:
            axes.annotate(what, (begin + width / 2, row), color=INK, ha="center", va="center", fontsize=7)
    axes.set_title(TITLE + (f": update {update}" if update else ""))
    more = len(names) - len(rows)
    axes.set_xlabel(f"seconds; and {more} more workers" if more else "seconds")
    axes.set_xlim(0, seconds)
    axes.set_ylim(max(len(rows), 3) - 0.5, -0.5)  # rows from the top; a bar takes at most a third
    axes.set_yticks(list(rows.values()), list(rows))
    axes.grid(False)


def _place(who: str) -> tuple[bool, int, str]:
    """Returns a sort key: the trainer first, then the workers by number."""
    number = who.rpartition(" ")[2]
    return who != "trainer", int(number) if number.isdecimal() else 0, who
