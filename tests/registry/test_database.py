"""The SQLite file of an embedded registry: damaged, locked, somebody else's, under any name. Real MLflow on SQLite."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from registered import LINEAGE
from running import ROOT

from pipeline import registry
from pipeline.config import load_job
from pipeline.errors import InputError
from pipeline.registry.lineage import folder_digests
from pipeline.system import deadline


def damaged(path, how):
    whole = Path(path).read_bytes()
    if how == "a folder":
        os.remove(path)
        os.mkdir(path)
        return
    if how in STATEMENTS:
        if how == "of another application":
            os.remove(path)
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute(STATEMENTS[how])
            database.commit()
        return
    middle = len(whole) // 2
    contents = {
        "no database": b"<html>" * 500,
        "cut off": whole[:middle],
        "spoilt": whole[:middle] + os.urandom(8192) + whole[middle + 8192 :],
    }
    Path(path).write_bytes(contents[how])


STATEMENTS = {
    "of another application": "CREATE TABLE users (name)",
    "of a newer MLflow": "UPDATE alembic_version SET version_num = 'ffffffffffff'",
    "of an older MLflow": "UPDATE alembic_version SET version_num = '0a8213491aaa'",
}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("a folder", "is a folder"),
        ("no database", "not a database"),
        ("cut off", "malformed"),
        ("spoilt", "the file is damaged|malformed"),
        ("of another application", "belongs to another application: its tables are users"),
        ("of a newer MLflow", "schema ffffffffffff is unknown .*a newer one"),
        ("of an older MLflow", "out-of-date"),
    ],
)
def test_a_file_that_is_no_store_is_named_at_once(how, says, job, tmp_path, monkeypatch):
    """MLflow would try again for more than a minute, or make its tables in it."""
    damaged(tmp_path / "mlflow.db", how)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(
        InputError, match=rf"mlflow\.tracking_uri: 'sqlite:.*mlflow\.db' does not answer \(.*{says}"
    ):
        registry.check(job)
    assert not slept


def test_a_store_that_another_process_holds(job, tmp_path, monkeypatch):
    monkeypatch.setattr(deadline, "SECONDS", 0.5)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match="database is locked"):
            registry.check(job)


@pytest.mark.parametrize(
    "name", ["plain", "a%20b", "a%", "a?b=c", "a#b", "it's", 'it\'s "both"', "back\\slash", " ü😀 ", "a;b&c", "[a]*", "$HOME"]
)  # fmt: skip
def test_any_folder_can_hold_a_registry(name, migrated, adapter, tmp_path, in_root):
    """Paths reach MLflow as filters and URIs, whose quotes and percents mean something."""
    home = tmp_path / "home" / name
    home.mkdir(parents=True)
    plain = load_job("jobs/demo/sft.yaml", ["gate={}", "run.name=one"], "sft")
    named = replace(plain.mlflow, registered_model="it's")
    job = replace(plain, run=replace(plain.run, storage_path=str(home)), mlflow=named)
    shutil.copy(migrated, home / "mlflow.db")
    registry.check(job)
    uri = registry.tracking_uri(job)
    with pytest.raises(KeyError), registry.mlflow_run(job, {}) as cut_short:
        raise KeyError
    with registry.mlflow_run(job, {}) as run_id:
        registry.publish(job, run_id, adapter, {}, LINEAGE)
    assert run_id == cut_short == registry.find_run(uri, job.folder)
    with pytest.raises(InputError, match="newest is models:/it's/1"):
        registry.pin("models:/it's@nobody", uri)
    folder = registry.fetch(registry.pin("models:/it's@champion", uri), uri)
    assert folder_digests(folder) == folder_digests(adapter)
    assert folder.startswith(str(home)) and os.listdir(tmp_path / "home") == [name]


FIRST = """
import sys, time
from pipeline import registry
from pipeline.system import storage
from pipeline.config import load_job
job = load_job("jobs/demo/sft.yaml", [f"run.storage_path={sys.argv[1]}", f"run.name=one-{sys.argv[2]}"], "sft")
import mlflow
sys.stdin.readline()
storage.require_writable(job.run.storage_path)
registry.check(job)
with registry.mlflow_run(job, {}):
    pass
"""


def test_four_first_runs_at_once_make_one_store(tmp_path):
    """Of two that create MLflow's tables at the same time, one fails in the other's migration."""
    others = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST, str(tmp_path / "new"), str(i)], cwd=ROOT, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for i in range(4)
    ]  # fmt: skip
    for one in others:
        one.stdin.write("go\n")
    said = [one.communicate(timeout=120)[0] for one in others]
    assert [one.returncode for one in others] == [0] * 4, said
    assert "Traceback" not in "".join(said)
    store = registry.client(f"sqlite:///{tmp_path}/new/mlflow.db")
    (experiment,) = [e for e in store.search_experiments() if e.name == "rlhf"]
    statuses = [run.info.status for run in store.search_runs([experiment.experiment_id])]
    assert statuses == ["FINISHED"] * 4
    assert sorted(os.listdir(tmp_path / "new")) == ["artifacts", "mlflow.db", "mlflow.db.lock"]
