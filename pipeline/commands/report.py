"""A page about one run or several: curves, samples, lineage, data, job. Failed runs have one too.

    make report RUN=runs/ppo-...   or   python -m pipeline report RUN [RUN ...]

A RUN is its folder, its name under runs/, or its MLflow id. The page of one run goes into its folder. The page of several
goes into `report` in the folder of the last, and draws runs of one stage over each other. An iteration's folder means the
runs of its rounds.
"""

from typing import Any

from pipeline import report
from pipeline.errors import InputError, summary
from pipeline.iteration import table
from pipeline.system import storage


def run(first: str, others: list[str]) -> str:
    """Writes the page about these runs and prints its path."""
    references = [first, *others] if first else others
    if not references:
        raise InputError(f"which run? make report RUN=runs/NAME; the newest under runs/: {report.newest()}")
    if len(references) == 1 and (rounds := table.recorded(references[0])):
        return of_iteration(*rounds)
    try:
        runs = [report.read(reference) for reference in references]
        # The page of one run goes into its folder, the page of several into the folder of the last.
        alone = len(runs) == 1 and runs[0].folder
        path = report.write(runs, alone or storage.join(runs[-1].folder or "runs", "report"))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{' '.join(references)}: no report can be drawn ({summary(error)}); its result.json, job.json or "
            "MLflow run has changed since the run, or its folder cannot be read or written"
        ) from error
    for one in runs:
        if one.note:
            print(f"{one.name}: {one.note}")
    print(f"{path}\n{storage.join(path.rpartition('/')[0], 'plots')}/*.png")
    return path


def of_iteration(folder: str, rounds: list[dict[str, Any]]) -> str:
    """Writes the page of an iteration and prints its path."""
    if not rounds:
        raise InputError(
            f"{folder}: no round of this iteration has ended yet; make report RUN={folder}/round-1-dpo shows its run"
        )
    path = report.of_several(table.drawn(rounds), folder, [table.HEADER, *table.cells(rounds)])
    if path is None:
        raise InputError(f"{folder}: no report could be drawn; the reason is above")
    print(path)
    return path
