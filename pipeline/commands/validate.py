"""Reads a job's rows without training. Counts kept, dropped and truncated rows, and shows three rows as the model sees them.

    python -m pipeline validate jobs/demo/sft.yaml [section.key=value ...]

A later run reads the tokenized rows from the cache. `validate` does not need the GPUs, packages and models that the run needs.
"""

from dataclasses import replace
from typing import Any

from pipeline.errors import InputError
from pipeline.job import Job
from pipeline.job.rules import find_warnings
from pipeline.job.stages import INPUTS
from pipeline.run.prepare import print_header, read_only
from pipeline.settle import placement
from pipeline.settle.identity import with_run_name
from pipeline.settle.inputs import check_paths, pin_inputs
from pipeline.settle.places import places_of
from pipeline.system import storage


def run(job: Job) -> dict[str, Any]:
    if job.spec.rows is None:
        raise InputError(f"`{job.stage}` reads no rows, so there is nothing to validate", key="stage")
    # Removes run.name, because an existing run with this name would raise an error.
    job = with_run_name(replace(job, run=replace(job.run, name=None)))
    storage.require_writable(job.run.storage_path)
    check_paths(job)
    print_header(f"validate  {job.stage}  {job.source}")
    for warning in find_warnings(job):
        print(f"warning: {warning}", flush=True)
    try:
        placement.check_fits(places_of(job))
    except InputError as error:
        print(f"note: the run cannot start on this machine: {error}", flush=True)
    # Removes models that do not exist yet from the job.
    no_inputs: dict[str, Any] = dict.fromkeys(INPUTS)
    for name in INPUTS:
        try:
            pin_inputs(replace(job, **{**no_inputs, name: getattr(job, name)}))
        except InputError as error:
            if name in job.functions:
                raise  # unlike a model, a missing Python function is not created by an earlier stage
            print(f"note: {error}; using the base's chat template instead of this model's", flush=True)
            job = replace(job, **{name: None})  # type: ignore[arg-type]
    report = read_only(job)
    print(report.render(), flush=True)
    return report.to_dict()
