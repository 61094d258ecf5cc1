"""Tests the storage backends of a cluster's MLflow server: PostgreSQL, and a fake Google Cloud Storage bucket."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from glob import glob
from pathlib import Path

import pytest
from servers import Handler, listening

from tools.chaos.runs import answers, free_port, until

SERVER = max(glob("/usr/lib/postgresql/*/bin"), default="")


def needs(*modules):
    """Skips a test if a module of the extra `cloud` is not installed."""
    try:
        found = all(importlib.util.find_spec(module) for module in modules)
    except ModuleNotFoundError:  # raised by find_spec if the parent package of a module is missing
        found = False
    return pytest.mark.skipif(not found, reason=f"needs {', '.join(modules)}")


@pytest.fixture
def postgres():
    """Starts PostgreSQL. Returns the address of an empty database."""
    if not SERVER:
        pytest.skip("needs PostgreSQL's server")
    # a short path, because the length of socket paths is limited
    folder, port = Path(tempfile.mkdtemp(prefix="pg")), free_port()
    as_user = []
    if os.geteuid() == 0:  # PostgreSQL's server refuses to run as root
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        shutil.chown(folder, "nobody", "nogroup")
    how = {"check": True, "capture_output": True, "cwd": folder}
    subprocess.run([*as_user, f"{SERVER}/initdb", "-D", folder / "data", "-U", "me", "-A", "trust"], **how)
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    pg = [*as_user, f"{SERVER}/pg_ctl", "-D", folder / "data", "-w"]
    subprocess.run(
        [*pg, "-l", folder / "log", "-o", options, "start"], check=True, cwd=folder, stdout=subprocess.DEVNULL
    )
    yield f"postgresql://me@127.0.0.1:{port}/postgres"
    subprocess.run([*pg, "-m", "immediate", "stop"], **how)
    shutil.rmtree(folder)


@contextlib.contextmanager
def serving(folder, *options, **environment):
    """Runs an MLflow server with the given options until the `with` block ends. Yields the server's address."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *options]
    how = {"cwd": folder, "env": os.environ | environment, "start_new_session": True}
    with open(folder / "log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log, **how) as server:
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/health"), "MLflow", patience=120, every=0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.slow
@needs("psycopg")
def test_mlflow_serves_from_postgresql(postgres, tmp_path):
    """Uses a database address in the format of cluster.yaml, and the PostgreSQL driver of the extra `cloud`."""
    import mlflow

    with serving(tmp_path, "--backend-store-uri", postgres) as address:
        client = mlflow.MlflowClient(address)
        client.create_registered_model("policy")
        assert [one.name for one in client.search_registered_models()] == ["policy"]


class Bucket(Handler):
    """A fake Google Cloud Storage, which stores uploads in memory."""

    def do_POST(self):
        self.server.objects.append((self.path.partition("?")[0], self.body()))
        self.send(200, json.dumps({"name": "a"}).encode(), "application/json")


@pytest.mark.slow
@needs("google.cloud.storage")
def test_mlflow_stores_artifacts_on_google_cloud(tmp_path):
    with listening(Bucket, objects=[]) as bucket:
        database = f"sqlite:///{tmp_path}/mlflow.db"
        options = ["--backend-store-uri", database, "--artifacts-destination", "gs://my-bucket/mlflow"]
        with serving(tmp_path, *options, STORAGE_EMULATOR_HOST=bucket.address) as address:
            path = f"{address}/api/2.0/mlflow-artifacts/artifacts/1/adapter"
            request = urllib.request.Request(path, data=b"weights", method="PUT")
            assert urllib.request.urlopen(request, timeout=60).status == 200, (tmp_path / "log").read_text()[
                -2000:
            ]
        [(path, body)] = bucket.objects
        assert path == "/upload/storage/v1/b/my-bucket/o"
        assert b"weights" in body and b"mlflow/1/adapter" in body
