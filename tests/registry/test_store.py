"""Tests the MLflow store of a job: a SQLite file that is damaged, locked or has an unusual name, and a server that fails."""

import contextlib
import itertools
import os
import re
import shutil
import sqlite3
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from forked import in_processes
from registered import LINEAGE, published
from running import ROOT
from servers import answering

from pipeline import registry
from pipeline.errors import Failure, InputError
from pipeline.job import load_job
from pipeline.registry import store
from pipeline.registry.lineage import folder_digests
from pipeline.settle.identity import tracking_of
from pipeline.system import deadline, storage


def test_an_unusable_file_is_reported_at_once(job, tmp_path, monkeypatch):
    """By default MLflow would retry for more than a minute."""
    monkeypatch.setattr(deadline, "SECONDS", 0.5)
    monkeypatch.setattr(time, "sleep", lambda seconds: 1 / 0)
    file, said = tmp_path / "mlflow.db", r"mlflow\.tracking_uri: 'sqlite:.*mlflow\.db' does not answer \(.*"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match=said + "database is locked"):
            registry.check_store(tracking_of(job))
    file.write_bytes(b"<html>" * 500)
    with pytest.raises(InputError, match=said + "not a database"):
        registry.check_store(tracking_of(job))
    shutil.copy(store.empty_database(), file)
    with contextlib.closing(sqlite3.connect(file)) as other, other:
        # Database schema of another MLflow version.
        other.execute("UPDATE alembic_version SET version_num = 'bda7b8c39065'")
    with pytest.raises(
        InputError, match=said + r"schema.*\); install the MLflow version that wrote the file, or"
    ):
        registry.check_store(tracking_of(job))


@pytest.mark.parametrize("name", ["a%20b?c=d#e", """it's "both" ü😀 \\[a]*;$HOME"""])
def test_a_folder_with_an_unusual_name_can_hold_a_registry(name, migrated, adapter, tmp_path, in_root):
    """MLflow puts paths into filters and URIs, where quotes and percent signs have a special meaning."""
    home = tmp_path / "home" / name
    home.mkdir(parents=True)
    job = load_job("jobs/demo/sft.yaml", ["gate={}", "run.name=one"], "sft")
    job = replace(job, run=replace(job.run, storage_path=str(home)))
    shutil.copy(migrated, home / "mlflow.db")
    registry.check_store(tracking_of(job))
    uri = tracking_of(job).uri
    with pytest.raises(KeyError), registry.mlflow_run(tracking_of(job), {}) as cut_short:
        raise KeyError
    with registry.mlflow_run(tracking_of(job), {}) as run_id:
        published(job, run_id, adapter, {}, LINEAGE)
    assert run_id == cut_short == registry.find_run(uri, job.folder)
    fetched = registry.fetch(registry.pin("models:/rlhf-sft@champion", uri), uri)
    assert folder_digests(fetched) == folder_digests(adapter)
    assert fetched.startswith(str(home)) and os.listdir(tmp_path / "home") == [name]


def first_run(rank, folder):
    job = load_job("jobs/demo/sft.yaml", [f"run.storage_path={folder}", f"run.name=one-{rank}"], "sft")
    storage.require_writable(job.run.storage_path)
    registry.check_store(tracking_of(job))
    with registry.mlflow_run(tracking_of(job), {}):
        pass


def test_first_runs_that_start_at_the_same_time_create_one_store(tmp_path, monkeypatch, in_root):
    """Without a lock, one of two runs that create MLflow's tables at the same time would fail."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    printed = in_processes(first_run, str(tmp_path / "new"), processes=2)
    assert not re.search("Traceback|INFO", "".join(printed))
    mlflow = registry.client(f"sqlite:///{tmp_path}/new/mlflow.db")
    (experiment,) = [e for e in mlflow.search_experiments() if e.name == "rlhf"]
    statuses = [run.info.status for run in mlflow.search_runs([experiment.experiment_id])]
    assert statuses == ["FINISHED"] * 2
    assert sorted(os.listdir(tmp_path / "new")) == ["artifacts", "mlflow.db", "mlflow.db.lock"]


def test_the_clusters_server_answers_through_a_tunnel_on_any_port():
    """`make ui PORT=5001` tunnels to the server's port 5000, so the browser's Host header names port 5001."""
    from mlflow.server.security_utils import is_allowed_host_header

    script = (ROOT / "jobs/cloud/start-node.sh").read_text()
    [hosts] = re.findall(r'MLFLOW_SERVER_ALLOWED_HOSTS="(.*?)"', script)
    allowed = hosts.replace("$head_ip", "10.0.0.1").split(",")
    for host in ("127.0.0.1:5001", "localhost:5000", "10.0.0.1:5000"):
        assert is_allowed_host_header(allowed, host)
    assert not is_allowed_host_header(allowed, "elsewhere.example:5000")


@pytest.mark.parametrize(("status", "tries"), [(503, 2), (404, 1)])
def test_only_an_unreachable_server_is_retried(status, tries, job, monkeypatch):
    """Uses a server that answers each request with an error, and a server that does not answer."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    clock = itertools.count()
    monkeypatch.setattr(store, "WAIT_S", 1.5)
    slept = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(store, "time", slept)
    with answering(status, "<html>", "text/html") as address:
        for place in (address, "127.0.0.1:9"):
            asked = []

            def call(place=place, asked=asked):
                asked.append(place)
                registry.client(f"http://{place}").get_run("1")

            with pytest.raises(Exception, match="API request"):
                store.call_persistently(f"http://{place}", job.folder, call)
            assert len(asked) == (tries if place == address else 2)


def test_a_store_that_is_deleted_during_a_run_is_reported(job, tmp_path, capfd):
    """MLflow can still write into the deleted file without an error."""
    mlflow = registry.client(tracking_of(job).uri)
    mlflow.search_experiments()

    def call():
        (tmp_path / "mlflow.db").unlink()
        mlflow.search_experiments()

    with pytest.raises(Failure, match=r"/mlflow\.db was deleted by another process"):
        store.call_persistently(tracking_of(job).uri, job.folder, call)
    assert capfd.readouterr() == ("", "")
