"""The tracking server of a job: which it is, how it is spoken to, and whether it answers."""

import logging
import os
import time
from typing import Any

from pipeline.config import Job
from pipeline.errors import InputError
from pipeline.registry import database
from pipeline.system import deadline, storage
from pipeline.system.credentials import has_credentials, user_and_password, without_credentials


def tracking_uri(job: Job) -> str:
    """The tracking server of a job: its own, else the environment's, else a SQLite file in run.storage_path."""
    return uri_of(job.mlflow.tracking_uri, job.run.storage_path)


def uri_of(given: str | None, storage_path: str) -> str:
    """The tracking server for a job's `mlflow.tracking_uri` and `run.storage_path`, without credentials: `client` takes
    those from the environment.

    Raises:
        InputError: when the runs lie in a bucket and no server is named.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        return without_credentials(uri)
    if storage.is_remote(storage_path):
        raise InputError(
            f"missing; with run.storage_path={storage_path} there is no local folder for "
            "a SQLite file. Name a tracking server, e.g. mlflow.tracking_uri=http://HEAD:5000",
            key="mlflow.tracking_uri",
        )
    return database.uri_of_file(f"{storage.absolute(storage_path)}/mlflow.db")


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

    uri = _signed_in(uri)
    # Not mlflow.set_tracking_uri: it sets MLFLOW_TRACKING_URI for this process and all jobs after this one.
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _signed_in(uri: str) -> str:
    """The URI to connect with: the environment's where it is the same server, since only that has the credentials.

    Those of an HTTP server go into the variables that MLflow reads, because its errors quote the URI that it was given.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not has_credentials(given) or without_credentials(given) != uri:
        return uri
    if not given.startswith(("http://", "https://")):
        return given
    user, password = user_and_password(given)
    os.environ.update(MLFLOW_TRACKING_USERNAME=user, MLFLOW_TRACKING_PASSWORD=password)
    return uri


def check(job: Job) -> None:
    """Proves before any work that the tracking server answers, or that the SQLite file is, or becomes, one of MLflow's.

    Raises:
        InputError: when it does not, or its experiment was deleted, with what to type next.
    """
    uri, name = tracking_uri(job), job.mlflow.experiment
    _check_kind(uri)
    file = database.file_of_uri(uri)
    try:
        if file is None:
            experiment = deadline.answer(_ask, uri, name)
        else:
            import mlflow  # noqa: F401  (takes seconds, for which no other process has to wait)

            with database.prepared(file):
                experiment = client(uri).get_experiment_by_name(name)
    except Exception as error:  # whatever the store's driver raises: it is the address that is wrong
        remedy = "start the server, or" if file is None else "move that file away, name another store, or"
        raise InputError(
            f"{uri!r} does not answer ({first_line(error)}); {remedy} leave the key out to use a "
            "SQLite file in run.storage_path",
            key="mlflow.tracking_uri",
        ) from error
    if experiment and experiment.lifecycle_stage == "deleted":
        raise InputError(
            f"{name!r} was deleted in {uri}; name another one, e.g. mlflow.experiment={name}-2, or type "
            f"mlflow experiments restore --experiment-id {experiment.experiment_id}",
            key="mlflow.experiment",
        )


def _check_kind(uri: str) -> None:
    """Refuses a path: MLflow 3 no longer writes to its stores of plain files, and takes seconds to say so."""
    if uri.startswith("file:") or not ("://" in uri or uri.startswith("databricks")):
        path = os.path.abspath(uri.removeprefix("file:"))
        file = os.path.join(path, "mlflow.db") if os.path.isdir(path) else path
        raise InputError(
            f"found {uri!r}, a path; expected the address of a server, e.g. http://HEAD:5000, or of a "
            f"SQLite file: mlflow.tracking_uri={database.uri_of_file(file)}",
            key="mlflow.tracking_uri",
        )


def look(uri: str) -> None:
    """Checks that a store can be read, without creating, locking or migrating it.

    Raises:
        Exception: of any type, saying why nothing can be read there.
    """
    _check_kind(uri)
    file = database.file_of_uri(uri)
    if file is None:
        deadline.answer(_ask, uri, "Default")
    else:
        database.check(file)


def _ask(uri: str, experiment: str) -> Any:
    """One request, retried once: MLflow's default retries with backoff take longer than a first contact may."""
    tries = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    usual = os.environ.get(tries)
    os.environ[tries] = "0" if usual == "0" else "1"
    try:
        stored = client(uri).get_experiment_by_name(experiment)
        if stored and stored.name != experiment:
            raise ValueError(
                f"asked for experiment {experiment!r}, it answered {stored.name!r}: no MLflow server"
            )
        return stored
    finally:
        if usual is None:
            del os.environ[tries]
        else:
            os.environ[tries] = usual


def first_line(error: BaseException) -> str:
    """Type and first line of what a store's driver raised, on one line of a message."""
    lines = without_credentials(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


def wait_for_server(job: Job, minutes: float = 10.0) -> None:
    """Waits until the tracking server answers, at most `minutes`; then the next request fails and says why."""
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


def like(field: str, value: str) -> str:
    """A search filter for a field's value. MLflow's have no escapes: a quote stands for any one character there, so that
    the caller has to compare what comes back."""
    plain = value.translate(dict.fromkeys(map(ord, "'\"\\"), "_"))
    return f"{field} {'=' if plain == value else 'LIKE'} '{plain}'"


def metric_key(name: str) -> str:
    """A name that MLflow takes: other characters become underscores."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
