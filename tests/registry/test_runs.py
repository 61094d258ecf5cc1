"""Tests which MLflow run a job opens, and with which status the run ends. Uses real MLflow on SQLite."""

import getpass
import subprocess

import pytest
from registered import Killed, mlflow

from pipeline import registry
from pipeline.settle.identity import tracking_of


def status(job, run_id):
    return mlflow(job).get_run(run_id).info.status


def test_the_same_name_continues_its_run_unless_it_is_finished_or_overwritten(job):
    endings = {KeyError: "FAILED", KeyboardInterrupt: "KILLED", SystemExit: "KILLED", Killed: "KILLED"}
    opened = []
    for ending, expected in endings.items():
        with pytest.raises(ending), registry.mlflow_run(tracking_of(job), {}) as first:
            assert status(job, first) == "RUNNING"
            raise ending
        assert status(job, first) == expected
        opened.append(first)
    assert set(opened) == {first}
    # If the driver is killed, the MLflow run keeps the status RUNNING.
    mlflow(job).update_run(first, status="RUNNING")
    with registry.mlflow_run(tracking_of(job), {}, new_run=True) as second:
        assert second != first and status(job, first) == "KILLED"
    with registry.mlflow_run(tracking_of(job), {}) as third:
        assert third != second and status(job, second) == "FINISHED"


def test_a_run_records_its_user_and_source(job):
    """A run gets the tags that MLflow's start_run sets. The MLflow UI opens the list of runs, because training has no traces."""
    with registry.mlflow_run(tracking_of(job), {}) as run_id:
        pass
    tags = mlflow(job).get_run(run_id).data.tags
    assert (tags["mlflow.user"], tags["mlflow.source.name"]) == (getpass.getuser(), "jobs/demo/sft.yaml")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert tags.get("mlflow.source.git.commit", head) == head
    experiment = mlflow(job).get_experiment_by_name("rlhf")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
