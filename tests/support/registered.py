"""Helpers of the registry's tests: the store of a job, and the lineage of an adapter."""

from mlflow import MlflowClient

from pipeline import registry
from pipeline.settle.identity import gate_of, tracking_of

LINEAGE = {
    "stage": "sft",
    "base": {"name_or_path": "b", "digest": "sha256:1"},
    "parents": {},
    "data": {},
    "versions": {},
}


def published(job, run_id, folder, metrics, facts):
    """Registers an adapter like the end of a run of this job. Returns the version."""
    uri, gate = tracking_of(job).uri, gate_of(job)
    return registry.publish(uri, gate, job.stage, run_id, folder, metrics, facts)


def mlflow(job) -> MlflowClient:
    return registry.client(tracking_of(job).uri)


class Killed(BaseException):
    """Simulates a kill: no code of the process runs after it."""


def killed(*_, **__):
    raise Killed
