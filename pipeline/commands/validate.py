"""Checks the data of a job without training: rows read, kept, dropped and truncated, and three as the model sees them.

    python -m pipeline validate jobs/demo/sft.yaml [section.key=value ...]

The run that follows reads the tokenized rows from the cache. Nothing is trained, so GPUs, packages and starting models of the
run may be missing here.
"""

from dataclasses import replace
from typing import Any

from pipeline.errors import InputError
from pipeline.job import Job
from pipeline.job.rules import find_warnings
from pipeline.job.stages import INPUTS
from pipeline.run.prepare import announce, read_only
from pipeline.settle import placement
from pipeline.settle.identity import named
from pipeline.settle.inputs import pin_inputs
from pipeline.settle.places import places_of
from pipeline.system import storage


def run(job: Job) -> dict[str, Any]:
    if job.facts.rows is None:
        raise InputError(f"`{job.stage}` reads no rows: there is nothing to validate", key="stage")
    # Without the name, because runs of that name do not matter here.
    job = named(replace(job, run=replace(job.run, name=None)))
    storage.require_writable(job.run.storage_path)
    announce(job, "validate")
    for warning in find_warnings(job):
        print(f"warning: {warning}", flush=True)
    try:
        placement.check_fits(places_of(job))
    except InputError as error:
        print(f"note: the run itself cannot start here: {error}", flush=True)
    job = without_absent_models(job)
    report = read_only(job)
    print(report.render(), flush=True)
    return report.to_dict()


def without_absent_models(job: Job) -> Job:
    """Returns the job without the models that do not exist yet, after a note about each."""
    none: dict[str, Any] = dict.fromkeys(INPUTS)
    for name in INPUTS:
        try:
            pin_inputs(replace(job, **{**none, name: getattr(job, name)}))
        except InputError as error:
            if name in job.functions:
                raise  # a Python function that is not here is nowhere
            print(f"note: {error}; the rows are read without it, with the template of the base", flush=True)
            job = replace(job, **{name: None})  # type: ignore[arg-type]
    return job
