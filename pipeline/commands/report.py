"""Writes an HTML report about one or more runs: curves, samples, lineage, data and job. A failed run also gets a report.

    make report RUN=runs/ppo-...   or   python -m pipeline report RUN [RUN ...]

RUN is a run's folder, or its name under runs/. The report about one run is written into the run's folder. The report about
several runs is written into `report` in the last run's folder. Runs of the same stage are drawn in the same plots.
"""

from pipeline import report
from pipeline.errors import InputError, error_summary
from pipeline.system import storage


def run(name: str, others: list[str]) -> str:
    """Writes a report about runs. Prints and returns the report's path."""
    references = [name, *others] if name else others
    if not references:
        raise InputError(
            f"no run given; use make report RUN=runs/NAME. The newest runs: {report.newest_runs()}"
        )
    try:
        runs = [report.read_run(reference) for reference in references]
        folder = runs[-1].folder
        path = report.write_page(runs, folder if len(runs) == 1 else storage.join(folder, "report"))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{' '.join(references)}: cannot draw a report ({error_summary(error)}). The run's result.json, job.json or "
            "MLflow run was changed after the run, or the run's folder cannot be read or written"
        ) from error
    for record in runs:
        if record.note:
            print(f"{record.name}: {record.note}")
    print(path)
    return path
