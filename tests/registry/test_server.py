"""The tracking server of a job: which it is, and that it answers."""

import re
from dataclasses import replace

import pytest
from running import ROOT

from pipeline import registry
from pipeline.config import MLflow, load_job
from pipeline.errors import InputError


def test_a_server_that_does_not_answer_is_found_before_work(job):
    away = replace(job, mlflow=MLflow(tracking_uri="http://127.0.0.1:9"))
    with pytest.raises(InputError, match=r"mlflow.tracking_uri: 'http://127.0.0.1:9' does not answer"):
        registry.check(away)


def test_shipped_jobs_use_a_store_beside_the_runs(in_root, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert (
        registry.tracking_uri(load_job("jobs/demo/sft.yaml", [], "sft")) == f"sqlite:///{ROOT}/runs/mlflow.db"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://head:5000")
    assert registry.tracking_uri(load_job("jobs/demo/sft.yaml", [], "sft")) == "http://head:5000"


def test_the_clusters_server_answers_through_a_tunnel_on_any_port():
    """`make ui PORT=5001` is a tunnel to its port 5000: the browser's Host header names 5001."""

    from mlflow.server.security_utils import is_allowed_host_header

    script = (ROOT / "jobs/cloud/start-node.sh").read_text()
    [hosts] = re.findall(r'MLFLOW_SERVER_ALLOWED_HOSTS="(.*?)"', script)
    allowed = hosts.replace("$head_ip", "10.0.0.1").split(",")
    for host in ("127.0.0.1:5001", "localhost:5000", "10.0.0.1:5000"):
        assert is_allowed_host_header(allowed, host)
    assert not is_allowed_host_header(allowed, "elsewhere.example:5000")
