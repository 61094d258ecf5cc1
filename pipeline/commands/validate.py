"""Checks the data of a job without training: rows read, kept, dropped and truncated, and three as the model sees them.

    python -m pipeline validate jobs/demo/sft.yaml [section.key=value ...]

The tokenised rows stay in the cache: the run that follows does not make them again.
"""

from dataclasses import replace
from typing import Any

from pipeline.config import Job, rules
from pipeline.runtime import driver
from pipeline.runtime.preparation import announce, prepared
from pipeline.system import storage


def run(job: Job) -> dict[str, Any]:
    # Without the name: it looks at rows, whatever was begun or has ended under it.
    job = driver.name_run(replace(job, run=replace(job.run, name=None)))
    storage.require_writable(job.run.storage_path)
    announce(job, "validate")
    for warning in rules.warnings(job):
        print(f"warning: {warning}", flush=True)
    # A job for GPUs may be looked at where not all of its packages are.
    with prepared(job, ask_libraries=not job.scaling.get("use_gpu")) as run:
        print(run.report.render(), flush=True)
    return run.report.to_dict()
