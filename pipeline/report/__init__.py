"""A report of one run or of several: one self-contained HTML page, and the plots as PNGs.

    python -m pipeline report RUN [RUN ...]       # folders, names under runs/, or MLflow run ids

Every finished run draws its own (`run.report: true`) into its folder and into MLflow.

    write(runs, folder) -> path of the page        attach(result) -> the same, for the run that just ended
"""

import os
import tempfile
from typing import Any

from pipeline import registry
from pipeline.report.gather import Run, read
from pipeline.system import storage

PAGE = "report.html"
__all__ = ["PAGE", "Run", "attach", "read", "write"]


def write(runs: list[Run], folder: str) -> str:
    """Writes report.html and plots/*.png into `folder`, a path or a bucket; the path of the page."""
    with tempfile.TemporaryDirectory() as local:
        draw(runs, local)
        storage.store_folder(local, folder)
    return storage.join(folder, PAGE)


def draw(runs: list[Run], folder: str, table: list[list[str]] | None = None, pictures: bool = True) -> None:
    """Writes report.html into a local folder, and plots/*.png if `pictures` are wanted.

    Args:
        table: stands in front; its first line is its head.
    """
    from pipeline.report import page

    for run in runs if pictures else ():
        os.makedirs(os.path.join(folder, "plots"), exist_ok=True)
        for name, picture in page.pictures(run).items():
            stem = name if len(runs) == 1 else f"{run.name}-{name}"
            with open(os.path.join(folder, "plots", stem), "wb") as file:
                file.write(picture)
    with open(os.path.join(folder, PAGE), "w", encoding="utf-8") as file:
        file.write(page.render(runs, table))


def attach(result: dict[str, Any]) -> str | None:
    """Draws the report of the run that just ended, into its folder and onto its page in MLflow.

    Returns:
        The path of the page; None if drawing failed, which is printed and does not fail the run.
    """
    folder = result["folder"]
    try:
        with tempfile.TemporaryDirectory() as local:
            draw([read(folder)], local)
            storage.store_folder(local, folder)
            storage.write_json(os.path.join(local, "result.json"), result)
            files = [os.path.join(local, name) for name in (PAGE, "result.json")]
            plots = os.path.join(local, "plots")
            registry.log_files(
                result["tracking_uri"], result["mlflow_run_id"], files, result["samples"], plots
            )
    except Exception as error:  # hours of training are not lost to a drawing
        _print_failure(error, [folder])
        return None
    return storage.join(folder, PAGE)


def together(results: list[dict[str, Any]]) -> str | None:
    """Draws one page about several runs, into the folder of the last one. Returns its path, or None if drawing failed.

    Each run's own folder has its pictures already.
    """
    folders = [result["folder"] for result in results]
    home = storage.join(folders[-1], "report")
    try:
        with tempfile.TemporaryDirectory() as local:
            draw([read(folder) for folder in folders], local, pictures=False)
            storage.store_folder(local, home)
    except Exception as error:
        _print_failure(error, folders)
        return None
    return storage.join(home, PAGE)


def of_rounds(folder: str, runs: list[str], table: list[list[str]]) -> str | None:
    """Draws one page about the runs of an iteration, given by their folders; its path, or None if drawing failed."""
    try:
        with tempfile.TemporaryDirectory() as local:
            draw([read(one) for one in runs], local, table)
            storage.store_folder(local, folder)
    except Exception as error:
        _print_failure(error, runs)
        return None
    return storage.join(folder, PAGE)


def _print_failure(error: Exception, folders: list[str]) -> None:
    reason = (str(error).splitlines() or [""])[0][:300]
    print(
        f"   no report: {type(error).__name__}: {reason}; try again with: python -m pipeline report {' '.join(folders)}",
        flush=True,
    )
