"""A page about one run or several: curves, samples, lineage, data, job. Failed runs have one too.

    make report RUN=runs/ppo-...   or   python -m pipeline report RUN [RUN ...]

A RUN is its folder, its name under runs/, or its MLflow id. The page of one run goes into its folder. The page of several
goes into `report` in the folder of the last, and draws runs of one stage over each other.
"""

from pipeline import report
from pipeline.errors import InputError, summary
from pipeline.system import storage


def run(first: str, others: list[str]) -> str:
    """Writes the page about these runs and prints its path."""
    references = [first, *others] if first else others
    if not references:
        raise InputError(f"name a run: make report RUN=runs/NAME; the newest under runs/: {report.newest()}")
    alone = len(references) == 1
    try:
        runs = [report.read(one) for one in references]
        home = (alone and runs[0].folder) or storage.join(runs[-1].folder or "runs", "report")
        path = report.write(runs, home)
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
    print(path)
    return path
