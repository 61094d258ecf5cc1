"""Writes a report about one or more runs, as one self-contained HTML page.

    python -m pipeline report RUN [RUN ...]       # folders, or names under runs/

At the end of each run, the report is stored in the run's folder and in MLflow, unless run.report is false.
"""

import tempfile
from pathlib import Path
from typing import Any

from pipeline import registry, text
from pipeline.errors import error_summary
from pipeline.report.gather import ReportedRun, newest_runs, read_run
from pipeline.run.prepare import ALONE, heading
from pipeline.run_folder import REPORT, RESULT, Result
from pipeline.system import console, storage, terminal


def write_page(runs: list[ReportedRun], folder: str, result: Result | None = None) -> str:
    """Writes report.html into a folder or bucket. Returns the path of the page.

    Args:
        result: the result of a run that has just ended, or None. The report is also stored in the MLflow run of `result`.
    """
    from pipeline.report import page

    with tempfile.TemporaryDirectory() as local:
        html = Path(local, REPORT)
        html.write_text(page.render_page(runs), encoding="utf-8")
        storage.store_folder(local, folder)
        if result:
            uri, run_id, file = result["tracking_uri"], result["mlflow_run_id"], f"{local}/{RESULT}"
            registry.end_finished(uri, run_id)
            storage.write_json(file, result)
            registry.log_files(uri, run_id, [str(html), file], result["samples"])
    return storage.join(folder, REPORT)


def of_run(result: Result) -> None:
    """Stores the report of a finished run in the run's folder and in MLflow, unless the folder already contains a report."""
    folder = result["folder"]
    if storage.exists(storage.join(folder, REPORT)):
        return
    with console.print_if_slow("drawing the report"):
        path = of_several([folder], folder, result=result)
    if path and heading.get() == ALONE:  # `run` prints the path of a report about all stages
        terminal.say(text.row("report", storage.relative(path)), result=True)


def of_several(folders: list[str], folder: str, result: Result | None = None) -> str | None:
    """Writes one report about the runs in `folders` to `folder`.

    Returns the path of the report. If drawing fails, prints a message and returns None, so that the run still succeeds.
    """
    try:
        return write_page([read_run(path) for path in folders], folder, result=result)
    except Exception as error:  # a report must not end a run that trained for hours
        advice = f"try again with: python -m pipeline report {' '.join(folders)}"
        print(f"   no report: {error_summary(error)}; {advice}", flush=True)
        return None
