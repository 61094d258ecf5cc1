"""Prepares a run: resolves and checks its job, then reads and tokenizes its rows, on Ray if the job needs Ray.

with prepared_run(job) as (work, rows, report):     # up to here, only the cache of tokenized rows is written
    ...
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from pipeline.job import Job
from pipeline.job.libraries import check_with_libraries
from pipeline.run import session
from pipeline.settle import placement
from pipeline.settle.inputs import check_sampler
from pipeline.settle.rows import tokenize_rows
from pipeline.settle.settle import settle_job
from pipeline.settle.work import Work
from pipeline.system import console, terminal

# text before a command's title; the command `run` sets the number of the stage instead
ALONE = "=="
heading: ContextVar[str] = ContextVar("heading", default=ALONE)


def print_header(title: str) -> None:
    terminal.say(f"\n{heading.get()} {title}")


@contextlib.contextmanager
def prepared_run(
    job: Job, pinned: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Work, dict[str, Any], Any]]:
    """Starts Ray if the job needs it. Yields the job's Work, its tokenized rows by name, and the report on the rows.

    If the job reads no rows, the report is None.

    Args:
        pinned: {input: version} that the run began with. The run uses the pinned versions even if aliases have moved.
    """
    session.set_environment()
    check_sampler(job.rollout_config, job.model)
    with console.print_if_slow("checking the model"):
        work = settle_job(job, pinned)  # resolves and checks the job before Ray starts
    with session.ray_session(work.places, work.identity.storage_path, work.uri):
        rows, report = dict[str, Any](), None
        if work.spec.rows:
            work, rows, report = tokenize_rows(work, _ray_for_rows(work))
            check_with_libraries(job)  # checks last, because importing the libraries takes seconds
        yield work, rows, report


def read_only(job: Job) -> Any:
    """Returns the report on the rows of a job that may run on another machine. This machine needs no GPU and no GPU packages."""
    session.set_environment()
    with console.print_if_slow("checking the model"):
        work = settle_job(job)
    # Reading rows does not need the run's resources. Without a cluster, this process reads the rows.
    work = replace(work, places=replace(placement.ROWS, in_process=not placement.on_cluster()))
    with session.ray_session(work.places, work.identity.storage_path, work.uri):
        _, _, report = tokenize_rows(work, _ray_for_rows(work))
    if not job.scaling.get("use_gpu"):
        check_with_libraries(job)
    return report


def _ray_for_rows(work: Work) -> Any:
    """Returns a function that starts Ray for reading many rows, or None if the job runs on Ray anyway."""
    start = partial(session.ray_session, placement.ROWS, work.identity.storage_path, work.uri)
    return start if work.places.in_process else None
