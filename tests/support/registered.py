"""Helpers for tests of the registry."""

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
    """Registers an adapter in the same way as a run of this job at its end. Returns the model version."""
    uri, gate = tracking_of(job).uri, gate_of(job)
    return registry.publish(uri, gate, job.stage, run_id, folder, metrics, facts)


def mlflow(job) -> MlflowClient:
    return registry.client(tracking_of(job).uri)


class Killed(BaseException):
    """Simulates a kill: the pipeline catches no exception of this class."""


def killed(*_, **__):
    raise Killed
