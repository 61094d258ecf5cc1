"""The results of a sweep: a row for each trial, on the terminal, in sweep.json, as CSV and Markdown, and a plot."""

import contextlib
import csv
import functools
import math
import tempfile
from pathlib import Path
from typing import Any

from pipeline import registry
from pipeline.report import plots
from pipeline.report.panels import History, Panel
from pipeline.sweep.space import Sweep, Trial
from pipeline.system import storage
from pipeline.text import table

FILE = "sweep.json"
MAX_CURVES = 6  # curves in the plot; more lines look the same


def rows(sweep: Sweep, state: dict[str, Any], died: dict[str, str]) -> list[dict[str, Any]]:
    """Returns a dict for each trial: trial, values, state, figure, step, of, seconds, why, folder, mlflow_run_id.

    Args:
        state: what Rungs.state returns.
        died: {trial: why its process died more often than run.max_failures allows}.
    """
    made = []
    for trial in sweep.trials:
        last = (state["reports"].get(trial.name) or [{}])[-1]
        failure = state["failures"].get(trial.name) or died.get(trial.name)
        why = failure or "interrupted: the same command continues it"
        row: dict[str, Any] = {
            "trial": trial.name,
            "values": trial.values,
            "state": "failed" if failure else "unfinished",
        }
        row |= {key: last.get(key) for key in ("figure", "step", "of")}
        row |= {"seconds": None, "why": why, "folder": trial.job.folder, "mlflow_run_id": None}
        if result := result_of(trial):
            ended = result["ended"]
            row |= {"state": "stopped" if ended["early"] else "finished", "why": ended["early"] or ""}
            row |= {"figure": result["metrics"].get(sweep.metric), "step": ended["step"], "of": ended["of"]}
            row |= {key: result[key] for key in ("seconds", "mlflow_run_id")}
        made.append(row)
    return made


def result_of(trial: Trial) -> dict[str, Any] | None:
    """Returns result.json of a trial, or None if the trial has not ended."""
    path = storage.join(trial.job.folder, "result.json")
    return storage.read_json(path) if storage.exists(path) else None


def best(sweep: Sweep, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the row with the best value, the first of equal ones, or None if no trial left an adapter."""
    left = [row for row in rows if row["state"] in ("finished", "stopped") and _is_number(row["figure"])]
    return (max if sweep.greater else min)(left, key=lambda row: row["figure"], default=None)


def text(sweep: Sweep, rows: list[dict[str, Any]]) -> str:
    header, *lines = _cells(sweep, rows)
    return table(header, lines)


def _cells(sweep: Sweep, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Returns header and lines, best first, then trials without a value."""
    sign = -1 if sweep.greater else 1

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        return row["state"] == "failed", sign * row["figure"] if _is_number(row["figure"]) else math.inf

    lines = [[*sweep.keys, sweep.metric, "steps", "seconds", "ended"]]
    for row in sorted(rows, key=rank):
        steps = f"{row['step']}/{row['of']}" if row["step"] is not None else ""
        seconds = f"{row['seconds']:.0f}" if row["seconds"] is not None else ""
        figure = f"{row['figure']:.4g}" if row["figure"] is not None else ""
        why = f"{row['state']}: {row['why']}" if row["why"] else row["state"]
        lines.append([*row["values"].values(), figure, steps, seconds, why])
    return lines


def attach(sweep: Sweep, summary: dict[str, Any]) -> None:
    """Writes table.csv, table.md and plots/sweep.png into the sweep's folder, and onto its page in MLflow.

    Args:
        summary: the content of sweep.json.
    """
    cells = _cells(sweep, summary["trials"])
    ruled = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    markdown = [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in ruled]
    with tempfile.TemporaryDirectory() as folder:
        local, plot = Path(folder), Path(folder, "plots")
        with open(local / "table.csv", "w", encoding="utf-8", newline="") as sheet:
            csv.writer(sheet).writerows(cells)
        (local / "table.md").write_text("".join(markdown), encoding="utf-8")
        plot.mkdir()
        (plot / "sweep.png").write_bytes(plots.png(_draws(sweep, summary)))
        storage.store_folder(folder, sweep.folder)
        storage.write_json(str(local / FILE), summary)
        files = [str(local / name) for name in (FILE, "table.csv", "table.md")]
        registry.log_files(summary["tracking_uri"], summary["mlflow_run_id"], files, [], str(plot))


def _draws(sweep: Sweep, summary: dict[str, Any]) -> list[plots.Draw]:
    """Returns the curves of the best trials, and the metric against each key that varies."""
    numbered = [row for row in summary["trials"] if _is_number(row["figure"])]
    ordered = sorted(numbered, key=lambda row: row["figure"], reverse=sweep.greater)[:MAX_CURVES]
    curves: dict[str, History] = {}
    for row in ordered:
        reports = summary["reports"].get(row["trial"], [])
        curves[row["trial"]] = {sweep.metric: [(one["step"], one["figure"]) for one in reports]}
    panel = Panel("Held-out figure", sweep.metric, {sweep.metric: "held-out"}, "")
    drawn = plots.curve(panel, curves, "step")

    def against(key: str, axes: Any) -> None:
        rows = numbered
        with contextlib.suppress(ValueError):  # values that are not numbers stay in the order of the trials
            rows = sorted(numbered, key=lambda row: float(row["values"][key]))
        values, figures = [row["values"][key] for row in rows], [row["figure"] for row in rows]
        axes.scatter(values, figures, s=14, color=plots.COLOURS[0])
        axes.set(title=key, ylabel=sweep.metric)

    return [*([drawn] if drawn else []), *(functools.partial(against, key) for key in sweep.keys)]


def _is_number(figure: float | None) -> bool:
    return figure is not None and math.isfinite(figure)
