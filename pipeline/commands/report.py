"""Writes an HTML report about one or more runs: curves, samples, lineage, data and job. A failed run also gets a report.

    make report RUN=runs/ppo-...   or   python -m pipeline report RUN [RUN ...]

RUN is a run's folder, its name under runs/, or its MLflow id. The report about one run is written into the run's folder. The
report about several runs is written into `report` in the last run's folder. It draws runs of the same stage in the same plots.
"""

from pipeline import report
from pipeline.errors import InputError, summary
from pipeline.system import storage


def run(first: str, others: list[str]) -> str:
    """Writes the report on these runs. Prints and returns the report's path."""
    references = [first, *others] if first else others
    if not references:
        raise InputError(f"name a run: make report RUN=runs/NAME; the newest are {report.newest()}")
    try:
        runs = [report.read_run(one) for one in references]
        alone = runs[0].folder if len(runs) == 1 else None
        path = report.write_page(runs, alone or storage.join(runs[-1].folder or "runs", "report"))
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
