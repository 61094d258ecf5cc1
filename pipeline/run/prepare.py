"""Prepares a run: settles its job, then reads and tokenizes its rows, on Ray if the job needs it.

with prepared(job) as (work, rows, report):     # so far, only the cache of tokenized rows is written
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from pipeline.job import Job
from pipeline.job.libraries import check_with_libraries
from pipeline.run import session
from pipeline.settle import inputs as checks
from pipeline.settle import placement
from pipeline.settle.rows import tokenize
from pipeline.settle.settle import settle
from pipeline.settle.work import Work
from pipeline.system import console, terminal

# text before a command's title; `run` numbers its stages
ALONE = "=="
heading: ContextVar[str] = ContextVar("heading", default=ALONE)


def announce(job: Job, verb: str | None = None) -> None:
    """Checks the paths of a job and prints the header of the command. Raises InputError if a path does not exist."""
    checks.check_paths(job)
    title = f"{verb}  {job.stage}" if verb else f"{job.stage}  run {job.run.name}"
    terminal.say(f"\n{heading.get()} {title}  {job.source}")


@contextlib.contextmanager
def prepared(
    job: Job, pinned: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Work, dict[str, Any], Any]]:
    """Yields the work of a job, its tokenized rows by name, and the report on them, with Ray if the job needs it.

    Its paths have been checked by `announce`. A stage without rows has no report.

    Args:
        pinned: versions of inputs that the run began with; they count even if aliases have moved.
    """
    job, versions = checks.pin_inputs(job, pinned)
    session.set_environment()
    checks.check_sampler(job.rollout_config, job.model)
    with console.waiting("checking the model"):
        work = settle(job, versions)  # before Ray starts
    if work.stage.runs_in == "here":
        placement.check_fits(work.places)
        yield work, {}, None
        return
    with session.session(work.places, work.run.storage_path, work.uri):
        tokenized = tokenize(work, _rows_session(work))
        check_with_libraries(job)  # after the rows, because it imports the libraries for seconds
        yield tokenized


def read_only(job: Job) -> Any:
    """Returns the report on the rows of another machine's job. This machine may lack GPUs and their packages."""
    job, versions = checks.pin_inputs(job)
    session.set_environment()
    with console.waiting("checking the model"):
        work = settle(job, versions)
    # Reading rows needs none of the run's resources, so this machine reads them in this process.
    places = replace(placement.ROWS, in_process=not placement.on_cluster())
    with session.session(places, work.run.storage_path, work.uri):
        work = replace(work, places=places)
        report = tokenize(work, _rows_session(work))[-1]
    if not job.scaling.get("use_gpu"):
        check_with_libraries(job)
    return report


def _rows_session(work: Work) -> Callable[[], Any] | None:
    """Returns what starts Ray if a job in process has many rows, or None for a job that runs on Ray."""
    start = partial(session.session, placement.ROWS, work.run.storage_path, work.uri)
    return start if work.places.in_process else None
