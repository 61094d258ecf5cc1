"""Finds the MLflow store of a job, which is a server or a SQLite file, and checks that it can be used."""

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, unquote

from pipeline.errors import Failure, InputError, causes_of, error_summary
from pipeline.job.identity import Identity
from pipeline.system import deadline, storage, terminal
from pipeline.system.credentials import has_credentials, user_and_password, without_credentials

WAIT_S = 600  # time that the end of a run waits for an unreachable server


@dataclass(frozen=True)
class Tracking:
    """The MLflow store, experiment and other trackers that record a run."""

    uri: str  # tracking URI of MLflow
    experiment: str
    trackers: list[str]  # other trackers that get the same metrics
    identity: Identity
    sources: dict[str, str]  # {split, e.g. train: paths of its rows}


def uri_of(tracking_uri: str | None, storage_path: str) -> str:
    """Returns the tracking URI: `tracking_uri` (from the job), or MLFLOW_TRACKING_URI, or a SQLite file in run.storage_path.

    Credentials are removed (see `client`).
    """
    if uri := tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return without_credentials(uri)
    if storage.is_remote(storage_path):
        raise InputError(
            f"missing; a bucket (run.storage_path={storage_path}) cannot hold a SQLite file. Name a tracking server, "
            "e.g. mlflow.tracking_uri=http://HEAD:5000",
            key="mlflow.tracking_uri",
        )
    path = f"{storage.absolute(storage_path)}/mlflow.db"
    # Quotes % and ?, because SQLAlchemy decodes %20 and ends a path at `?`. Then also quotes slashes, because otherwise
    # MLflow 3.17 would create a folder with the quoted name.
    return f"sqlite:///{quote(path, safe='') if set(path) & set('%?') else path}"


def file_of_uri(uri: str) -> str | None:
    """Returns the path of the SQLite file in a tracking URI, or None if the URI is the address of a server."""
    return unquote(uri.partition(":///")[2].partition("?")[0]) if uri.startswith("sqlite:") else None


def import_mlflow() -> None:
    """Imports MLflow, reduces its log messages, and sets short timeouts."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # minimum level of MLflow's log messages
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # 3 retries would take 13 s
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient  # noqa: F401

    for library in ("mlflow", "alembic"):
        logging.getLogger(library).setLevel(logging.WARNING)
    # MLflow logs each database error with traceback and SQL before it raises the error
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def client(uri: str) -> Any:
    """Returns an MlflowClient. If the server does not answer, the client's calls fail within seconds instead of minutes.

    If MLFLOW_TRACKING_URI names the same server with credentials, the client uses them. Credentials of an HTTP server are
    passed in environment variables instead of the URI, because MLflow's error messages quote the URI.
    """
    import_mlflow()
    from mlflow import MlflowClient

    env_uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if has_credentials(env_uri) and without_credentials(env_uri) == uri:
        if env_uri.startswith(("http://", "https://")):
            user, password = user_and_password(env_uri)
            os.environ.update(MLFLOW_TRACKING_USERNAME=user, MLFLOW_TRACKING_PASSWORD=password)
        else:
            uri = env_uri
    # mlflow.set_tracking_uri would set MLFLOW_TRACKING_URI for this process and all later jobs.
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def check_store(tracking: Tracking) -> None:
    """Raises InputError if the tracking server or SQLite file cannot be used. Creates the file if it is missing."""
    uri, name = tracking.uri, tracking.experiment
    file = file_of_uri(uri)
    import_mlflow()  # imports MLflow before the time limit and the lock, because the import is slow
    try:
        if file is None:
            experiment = deadline.call_with_deadline(lambda: client(uri).get_experiment_by_name(name))
        else:
            with _created(file):
                experiment = client(uri).get_experiment_by_name(name)
    except Exception as error:  # the database driver raises many types of errors
        fix = "start the server, or" if file is None else "move that file away, name another store, or"
        fix += " remove the key to use a SQLite file in run.storage_path"
        if file and "database schema" in str(error):
            fix = "install the MLflow version that wrote the file, or copy the file and run the migration that MLflow proposes"
        problem = f"{uri!r} does not answer ({error_summary(error)}); {fix}"
        raise InputError(problem, key="mlflow.tracking_uri") from error
    if experiment and experiment.lifecycle_stage == "deleted":
        raise InputError(
            f"{name!r} was deleted in {uri}; name another experiment, e.g. mlflow.experiment={name}-2, or run "
            f"mlflow experiments restore --experiment-id {experiment.experiment_id}",
            key="mlflow.experiment",
        )


def check_reachable(uri: str) -> None:
    """Raises an error (of any type) if the store cannot be read. Does not create or change the store."""
    if file := file_of_uri(uri):
        _try(file, "ro", "BEGIN")
    else:
        import_mlflow()  # imports MLflow first, because the import is slow
        deadline.call_with_deadline(lambda: client(uri).get_experiment_by_name("Default"))


@contextlib.contextmanager
def _created(path: str) -> Iterator[None]:
    """Creates the SQLite file if it is missing. During the `with` block, no other process can set up the store."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with storage.locked(f"{path}.lock", f"another process to set up {path}"):
        if not os.path.exists(path):
            partial = f"{path}.partial"
            # If copying fails, MLflow creates the tables itself, which takes seconds
            with contextlib.suppress(Exception):
                shutil.copyfile(empty_database(), partial)
                os.replace(partial, path)
        _try(path, "rwc", "BEGIN IMMEDIATE")
        yield


def empty_database() -> str:
    """Returns the path of an empty database with MLflow's tables. The file is cached per user and MLflow version."""
    path = storage.cache(f"mlflow-{version('mlflow')}.db")
    if not os.path.exists(path):
        import_mlflow()
        from mlflow.store.db import utils

        with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
            new_path = os.path.join(folder, "mlflow.db")
            engine = utils.create_sqlalchemy_engine(f"sqlite:///{new_path}")
            utils._initialize_tables(engine)  # private in mlflow 3.17
            engine.dispose()
            os.replace(new_path, path)
    return path


def _try(path: str, mode: str, statement: str) -> None:
    """Raises sqlite3.Error if the file is not a SQLite database, or is locked. MLflow itself would retry for more than a minute.

    Args:
        mode: the mode of a SQLite URI (ro or rwc).
        statement: the SQL statement to try. BEGIN IMMEDIATE fails if the file cannot be written.
    """
    uri = f"file:{quote(os.path.abspath(path))}?mode={mode}"
    connection = sqlite3.connect(uri, deadline.SECONDS, isolation_level=None, uri=True)
    with contextlib.closing(connection) as database:
        database.execute(statement)
        database.execute("SELECT name FROM sqlite_master").fetchall()


def call_persistently(uri: str, folder: str, call: Callable[[], Any]) -> Any:
    """Returns the result of `call`. Retries for up to WAIT_S while the server is unreachable or the SQLite file is locked.

    Raises Failure if the SQLite file was deleted. MLflow may report no error, because it still has the deleted file open.

    Args:
        folder: the run's folder. A message tells the user that the adapter is in this folder.
    """
    give_up, pause = time.monotonic() + WAIT_S, 1.0
    while True:
        error: Exception | None = None
        try:
            result = call()
        except Exception as caught:  # the database driver raises many types of errors
            error = caught
        file = file_of_uri(uri)
        if file and not (os.path.exists(file) and os.path.getsize(file)):
            raise Failure(
                f"{file} was deleted by another process. Run the same command again to create a new file"
            ) from error
        if error is None:
            return result
        if time.monotonic() > give_up or not _is_away(uri, error):
            raise error
        if pause == 1.0:
            terminal.say(
                f"MLflow at {uri} does not answer ({error_summary(error)}); waiting up to {WAIT_S // 60} minutes to register. "
                f"The adapter is safe in {folder}"
            )
        time.sleep(pause)
        pause = min(2 * pause, 30.0)


def _is_away(uri: str, error: Exception) -> bool:
    """Returns True if the error means that the server is unreachable or failed (HTTP 5xx), or that the SQLite file is locked."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException

    for cause in causes_of(error):
        if file_of_uri(uri) and "database is locked" in str(cause):
            return True
        if isinstance(cause, MlflowException) and not file_of_uri(uri):
            return cause.get_http_status_code() >= 500  # MLflow sets status 500 if a request got no answer
        if isinstance(cause, RequestException):  # raised by the artifact store
            return cause.response is None or cause.response.status_code >= 500
    return False


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens a nested dict: {"data": {"train": 1}} becomes {"data.train": 1}. Omits values that are None."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flatten(item, f"{prefix}{key}.").items()}
    return {} if value is None else {prefix.rstrip("."): value}


def search_filter(field: str, value: str) -> str:
    """Returns an MLflow search filter for entries whose `field` has the value `value`.

    MLflow's filters cannot escape quotes. A quote in the value becomes the wildcard `_`, so other values may match. The caller
    must compare each result with the value.
    """
    plain = value.translate(dict.fromkeys(map(ord, "'\"\\"), "_"))
    return f"{field} {'=' if plain == value else 'LIKE'} '{plain}'"


def metric_key(name: str) -> str:
    """Replaces characters that MLflow does not accept in a metric's name by `_`."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
