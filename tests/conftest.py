"""Fixtures of all tests: quiet libraries, no network, one embedded Ray, and `cli`, the command line in this process."""

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
    RAY_local_fs_capacity_threshold="1",  # silences Ray about a disk that other programs have filled
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",  # tests share two cores, and sums of one thread do not depend on the machine
    PYTHONPATH=f"{ROOT}:{ROOT / 'tests/support'}",  # workers import rewards from the tests
)
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="session")
def embedded_ray():
    """Starts one Ray for all tests that need one."""
    from pipeline.run.session import session
    from pipeline.settle.placement import ROWS

    with session(ROWS, "runs", "sqlite:///runs/mlflow.db"):
        yield


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """Returns the storage path of the tests' runs and their MLflow store."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def migrated():
    """Returns an empty MLflow store to copy."""
    from pipeline.registry import store

    return Path(store.empty_database())


@pytest.fixture(scope="module")
def models(storage):
    """Returns {name: folder} of the policy and the rewards that toy_models registers in `storage`."""
    from toy_models import registered

    return registered(storage)


@pytest.fixture(scope="module")
def engine(models):
    """Returns the policy and the reward on one base."""
    from toy_models import Engine

    return Engine(models)


@pytest.fixture(scope="session", autouse=True)
def databases_that_do_not_wait_for_the_disk():
    """MLflow commits often, and each commit waits for the disk. No test is about a power failure."""
    from sqlalchemy import Engine, event

    def without_waiting(connection, _):
        with contextlib.suppress(sqlite3.Error):  # a damaged file
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", without_waiting)


@pytest.fixture(autouse=True)
def no_credentials_of_another_test():
    """Removes variables after each test: `registry.client` sets user and password, and `serve`'s build sets Ray's address."""
    yield
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "RAY_ADDRESS"):
        os.environ.pop(name, None)


@pytest.fixture
def in_root(monkeypatch):
    """The shipped jobs name their files relative to the repository."""
    monkeypatch.chdir(ROOT)


@cache
def scope_of(nodeid):
    """Returns the scope of a test. All files that use the embedded Ray share one scope and so one worker of pytest-xdist."""
    file = nodeid.partition("::")[0]
    return "ray" if "embedded_ray" in (ROOT / file).read_text() else file


def pytest_collection_modifyitems(items):
    """Puts the longest scope first."""
    items.sort(key=lambda item: scope_of(item.nodeid) != "ray")


def pytest_xdist_make_scheduler(config, log):
    """Gives each worker complete scopes. `--dist loadgroup` groups nothing with the pinned pytest and pytest-xdist."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # otherwise xdist sorts scopes by their number of tests
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler
