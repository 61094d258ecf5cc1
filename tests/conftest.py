"""Settings and fixtures of all tests: quiet libraries, no network, and one embedded Ray."""

import contextlib
import os
import sqlite3
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_local_fs_capacity_threshold="1",  # silences Ray's warning about a full disk
    TOKENIZERS_PARALLELISM="false",
    # Tests share two cores, and with one thread, sums are bit-identical on every machine.
    OMP_NUM_THREADS="1",
    PYTHONPATH=f"{ROOT}:{ROOT / 'tests/support'}",  # workers import rewards from the tests
)
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="session")
def embedded_ray():
    """Starts an embedded Ray, which all tests that need Ray share."""
    from pipeline.run.session import ray_session
    from pipeline.settle.placement import ROWS

    with ray_session(ROWS, "runs", "sqlite:///runs/mlflow.db"):
        yield


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """Returns a storage path for runs and their MLflow store. All tests share the path."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def migrated():
    """Returns the database file of an empty MLflow store, which tests copy."""
    from pipeline.registry import store

    return Path(store.empty_database())


@pytest.fixture(scope="module")
def models(storage):
    """Registers a policy and two reward models in `storage`. Returns {name: folder}."""
    from toy_models import registered

    return registered(storage)


@pytest.fixture(scope="module")
def engine(models):
    """Returns a policy and a reward model on one base."""
    from toy_models import Engine

    return Engine(models)


@pytest.fixture(scope="session", autouse=True)
def databases_that_do_not_wait_for_the_disk():
    """Keeps SQLite from waiting for the disk at each commit. The waits are slow, and protect only against a power failure."""
    from sqlalchemy import Engine, event

    def without_waiting(connection, _):
        with contextlib.suppress(sqlite3.Error):  # a test may open a damaged database file
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", without_waiting)


@pytest.fixture(autouse=True)
def no_credentials_of_another_test():
    """Removes environment variables that the pipeline sets: MLflow's user and password, and Ray's address."""
    yield
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "RAY_ADDRESS"):
        os.environ.pop(name, None)


@pytest.fixture
def in_root(monkeypatch):
    """Runs the test in the root of the repository, because the shipped jobs have relative paths."""
    monkeypatch.chdir(ROOT)


@cache
def scope_of(nodeid):
    """Returns "ray" if the file of a test uses Ray, otherwise the file. One pytest-xdist worker runs all tests of a scope."""
    file = nodeid.partition("::")[0]
    return "ray" if "embedded_ray" in (ROOT / file).read_text() else file


def pytest_collection_modifyitems(items):
    """Runs the tests that use Ray first, because these tests take the longest."""
    items.sort(key=lambda item: scope_of(item.nodeid) != "ray")


def pytest_xdist_make_scheduler(config, log):
    """Assigns each scope to one pytest-xdist worker. In the pinned version, `--dist loadgroup` of pytest-xdist splits scopes."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # xdist then keeps the order in which the tests are sorted
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler
