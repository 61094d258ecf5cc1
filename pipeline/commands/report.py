"""A page about one run, or several: curves, samples, lineage, data, job; also of a run that failed.

    make report RUN=runs/ppo-...   or   python -m pipeline report RUN [RUN ...]

A RUN is its folder, its name under runs/, or its MLflow id. One run's page goes into its folder; that of several, in
which runs of one stage are drawn over each other, into `report` in the folder of the last. An iteration's folder stands for
the runs of its rounds.
"""

import os
from pathlib import Path
from typing import Any

from pipeline import report
from pipeline.errors import InputError, summary
from pipeline.iteration import table
from pipeline.system import storage


def run(first: str, others: list[str]) -> str:
    """Writes the page about these runs and prints its path."""
    references = [first, *others] if first else others
    if not references:
        newest = sorted(Path("runs").glob("*/job.json"), key=os.path.getmtime, reverse=True)
        named = " ".join(str(path.parent) for path in newest[:5]) or "none here yet"
        raise InputError(f"which run? make report RUN=runs/NAME; the newest under runs/: {named}")
    if len(references) == 1 and (rounds := table.recorded(references[0])):
        return of_iteration(*rounds)
    runs = [report.read(reference) for reference in references]
    try:
        path = report.write(runs, folder_for(runs))
    except InputError:
        raise
    except Exception as error:  # what a value of another type, deep inside a file, does to the drawing
        raise InputError(
            f"{' '.join(references)}: no report can be drawn of it ({summary(error)}); its result.json, job.json or "
            "MLflow run is not as the run left it, or its folder cannot be written"
        ) from error
    for one in runs:
        if one.note:
            print(f"{one.name}: {one.note}")
    print(f"{path}\n{storage.join(path.rpartition('/')[0], 'plots')}/*.png")
    return path


def of_iteration(folder: str, rounds: list[dict[str, Any]]) -> str:
    """Writes the page of an iteration and says where it is."""
    if not rounds:
        raise InputError(
            f"{folder}: no round of this iteration has ended yet; make report RUN={folder}/round-1-dpo shows its run"
        )
    path = report.of_rounds(folder, table.drawn(rounds), [list(table.HEADER), *table.cells(rounds)])
    if path is None:
        raise InputError(f"{folder}: no report can be drawn of it")
    print(path)
    return path


def folder_for(runs: list[report.Run]) -> str:
    """Where the page of these runs belongs."""
    if len(runs) == 1 and runs[0].folder:
        return runs[0].folder
    return storage.join(runs[-1].folder or "runs", "report")
