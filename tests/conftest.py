"""What every test shares: quiet libraries, no network, one embedded Ray, and `cli`, the command line in this process."""

import importlib
import os
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_local_fs_capacity_threshold="1",  # what Ray says of a disk that others have filled is not what is tested
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",  # the tests share two cores; and sums of one thread do not depend on the machine
    PYTHONPATH=f"{ROOT}:{ROOT / 'tests/support'}",  # workers import the rewards that the tests define
)
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture(scope="session")
def embedded_ray():
    """One Ray for all tests that need one: the stages find it and use it, and the libraries that they ask first."""
    from pipeline.config import libraries
    from pipeline.on_ray.placement import ROWS
    from pipeline.on_ray.session import session

    for module in libraries.LOADED:  # else each job has a process import them
        importlib.import_module(module)

    with session(ROWS, "runs", "sqlite:///runs/mlflow.db"):
        yield


@pytest.fixture(scope="session")
def storage(tmp_path_factory):
    """Where the tests' runs and their MLflow store lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def migrated():
    """An empty MLflow store to copy."""
    from pipeline.registry import store

    return Path(store.empty_database())


@pytest.fixture(scope="module")
def models(storage):
    """Returns {name: folder} of the policy and the rewards that toy_models registers in `storage`."""
    from toy_models import registered

    return registered(storage)


@pytest.fixture(scope="module")
def engine(models):
    """The policy and the reward on one base."""
    from toy_models import Engine

    return Engine(models)


@pytest.fixture(autouse=True)
def no_credentials_of_another_test():
    """`registry.client` puts a user and password into the environment, `serve`'s build Ray's address: they end with the test."""
    yield
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "RAY_ADDRESS"):
        os.environ.pop(name, None)


@pytest.fixture
def in_root(monkeypatch):
    """The shipped jobs name their files relative to the repository."""
    monkeypatch.chdir(ROOT)


@cache
def scope_of(nodeid):
    """Files that share the embedded Ray are one scope, which one worker of pytest-xdist runs; any other file is its own."""
    file = nodeid.partition("::")[0]
    return "ray" if "embedded_ray" in (ROOT / file).read_text() else file


def pytest_collection_modifyitems(items):
    """Puts the longest scope first."""
    items.sort(key=lambda item: scope_of(item.nodeid) != "ray")


def pytest_xdist_make_scheduler(config, log):
    """Gives each worker whole scopes. `--dist loadgroup` groups nothing with the pinned pytest and pytest-xdist."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # else xdist sorts scopes by their number of tests
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope_of
    return scheduler
