"""Collects what a job needs from a cluster, for checks before a submission and for KubeRay manifests."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.input_uri import JUDGE
from pipeline.job import Job
from pipeline.planning import plan
from pipeline.planning.shape import config_of
from pipeline.settle.placement import Places
from pipeline.settle.places import places_of
from pipeline.settle.settle import sections_of
from pipeline.system import storage


@dataclass(frozen=True)
class Workload:
    """The resources, files and services that a job needs from a cluster."""

    stage: str
    source: str  # the job file
    name: str | None  # run.name
    storage_path: str
    tracking_uri: str | None  # mlflow.tracking_uri
    port: int | None  # serve.port, if the job is a server
    places: Places
    paths: list[tuple[str, str]]  # (key, local path) of the files that the job names, and of the job file
    judges: list[str]  # files that define the job's judges
    downloads: bool  # whether the base is downloaded from the Hub
    planned: Callable[[str], plan.Plan | None]  # function from a section to the memory plan of one worker


def workload_of(job: Job) -> Workload:
    """Returns what a job needs from a cluster."""
    places = places_of(job, elsewhere=True)

    def planned(section: str) -> plan.Plan | None:
        """Returns the memory plan of one worker of a section, or None if this machine cannot read the base's config.json."""
        try:
            config_of(job.model)
        except InputError:
            return None
        return plan.make_plan(sections_of(job, places), learns=section == "scaling")

    names = {
        "model.name_or_path": job.model.name_or_path,
        "model.chat_template": job.model.chat_template,
        **{key: name.removeprefix(JUDGE) for key, name in job.inputs.items()},
    }
    local = [(key, name) for key, name in names.items() if name and (os.path.exists(name) or name[0] in "/~")]
    paths = [("the job file", job.source), *job.paths, *local]
    return Workload(
        stage=job.stage,
        source=job.source,
        name=job.run.name,
        storage_path=job.run.storage_path,
        tracking_uri=job.mlflow.tracking_uri,
        port=job.serve.port if job.spec.runs_in == "serve" else None,
        places=places,
        paths=[(key, os.path.expanduser(path)) for key, path in paths if not storage.is_remote(path)],
        judges=[name.removeprefix(JUDGE) for name in job.inputs.values() if name.startswith(JUDGE)],
        downloads=not os.path.isdir(job.model.name_or_path),
        planned=planned,
    )
