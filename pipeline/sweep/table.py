"""Makes the table of a sweep's results, with a row for each trial. The table is printed, and stored in sweep.json."""

import math
from typing import Any

from pipeline.run_folder import RESULT
from pipeline.sweep.space import Sweep, Trial
from pipeline.system import storage
from pipeline.text import table


def trial_rows(sweep: Sweep, state: dict[str, Any], errors: dict[str, str]) -> list[dict[str, Any]]:
    """Returns a dict for each trial: trial, values, state, figure, step, of, seconds, why, folder, mlflow_run_id.

    Args:
        state: the return value of Rungs.state.
        errors: {trial: error}, for trials whose process died more often than run.max_failures allows.
    """
    rows = []
    for trial in sweep.trials:
        last = (state["reports"].get(trial.name) or [{}])[-1]
        failure = state["failures"].get(trial.name) or errors.get(trial.name)
        why = failure or "interrupted; the same command resumes the trial"
        row: dict[str, Any] = {
            "trial": trial.name,
            "values": trial.values,
            "state": "failed" if failure else "unfinished",
        }
        row |= {key: last.get(key) for key in ("figure", "step", "of")}
        row |= {"seconds": None, "why": why, "folder": trial.job.folder, "mlflow_run_id": None}
        if result := result_of(trial):
            end = result["ended"]
            row |= {"state": "stopped" if end["early"] else "finished", "why": end["early"] or ""}
            row |= {"figure": result["metrics"].get(sweep.metric), "step": end["step"], "of": end["of"]}
            row |= {key: result[key] for key in ("seconds", "mlflow_run_id")}
        rows.append(row)
    return rows


def result_of(trial: Trial) -> dict[str, Any] | None:
    """Returns result.json of a trial, or None if the trial has not ended."""
    path = storage.join(trial.job.folder, RESULT)
    return storage.read_json(path) if storage.exists(path) else None


def best_row(sweep: Sweep, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the row with the best value of the metric, or None if no trial has finished or stopped with a value."""
    ended = [row for row in rows if row["state"] in ("finished", "stopped") and _is_number(row["figure"])]
    return (max if sweep.greater else min)(ended, key=lambda row: row["figure"], default=None)


def table_text(sweep: Sweep, rows: list[dict[str, Any]]) -> str:
    """Returns the table as text. The best trial comes first, and trials without a value come last."""
    sign = -1 if sweep.greater else 1

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        return row["state"] == "failed", sign * row["figure"] if _is_number(row["figure"]) else math.inf

    lines = []
    for row in sorted(rows, key=rank):
        steps = f"{row['step']}/{row['of']}" if row["step"] is not None else ""
        seconds = f"{row['seconds']:.0f}" if row["seconds"] is not None else ""
        figure = f"{row['figure']:.4g}" if row["figure"] is not None else ""
        why = f"{row['state']}: {row['why']}" if row["why"] else row["state"]
        lines.append([*row["values"].values(), figure, steps, seconds, why])
    return table([*sweep.keys, sweep.metric, "steps", "seconds", "ended"], lines)


def _is_number(figure: float | None) -> bool:
    return figure is not None and math.isfinite(figure)
