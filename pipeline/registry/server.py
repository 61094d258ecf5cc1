"""The tracking server of a job: which it is, how it is spoken to, and whether it answers."""

import logging
import os
import time
from typing import Any

from pipeline import storage
from pipeline.config import Job
from pipeline.errors import InputError


def tracking_uri(job: Job) -> str:
    """The tracking server of a job: its own, the environment's, or a SQLite file beside the runs."""
    return uri_of(job.mlflow.tracking_uri, job.run.storage_path)


def uri_of(given: str | None, storage_path: str) -> str:
    """The same from the two keys of a job that decide it.

    Raises:
        InputError: when the runs lie in a bucket and no server is named.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        return uri
    if storage.is_remote(storage_path):
        raise InputError(
            f"mlflow.tracking_uri: missing; with run.storage_path={storage_path} there is no local folder for "
            "a SQLite file. Name a tracking server, e.g. mlflow.tracking_uri=http://HEAD:5000"
        )
    return f"sqlite:///{storage.absolute(storage_path)}/mlflow.db"


def client(uri: str) -> Any:
    """An MlflowClient that gives up within seconds instead of minutes, and whose migrations do not fill the log."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # its import sets its logger's level from this
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    # Not mlflow.set_tracking_uri: it sets MLFLOW_TRACKING_URI for this process and all jobs after this one.
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def check(job: Job) -> None:
    """Proves before any work that the tracking server answers.

    Raises:
        InputError: when it does not, with what to type next.
    """
    uri = tracking_uri(job)
    try:
        if uri.startswith("sqlite:///"):
            os.makedirs(os.path.dirname(uri.removeprefix("sqlite:///")), exist_ok=True)
        client(uri).search_experiments(max_results=1)
    except Exception as error:  # whatever the store's driver raises: it is the address that is wrong
        reason = str(error).splitlines()[0][:300]
        raise InputError(
            f"mlflow.tracking_uri: {uri!r} does not answer ({type(error).__name__}: {reason}); start the server, or "
            "leave the key out to use a SQLite file in run.storage_path"
        ) from error


def wait_for_server(job: Job, minutes: float = 10.0) -> None:
    """Returns as soon as the tracking server answers; after `minutes` whatever follows says what is wrong."""
    give_up, pause = time.monotonic() + 60 * minutes, 1.0
    while True:
        try:
            client(tracking_uri(job)).search_experiments(max_results=1)
            return
        except Exception as error:  # whatever the store's driver raises
            if time.monotonic() > give_up:
                return
            if pause == 1.0:
                print(
                    f"MLflow at {tracking_uri(job)} does not answer ({type(error).__name__}); waiting up to "
                    f"{minutes:.0f} minutes to register. The adapter is safe in {job.folder}",
                    flush=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """{"data": {"train": 1}} as [("data.train", 1)], without what is None: MLflow's parameters, tags and tables are flat."""
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flatten(item, f"{prefix}{key}.")]
    return [] if value is None else [(prefix.rstrip("."), value)]


def metric_key(name: str) -> str:
    """A name that MLflow takes: other characters become underscores."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
