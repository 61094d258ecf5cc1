"""The SQLite file of an embedded registry: its URI, and whether MLflow can use it.

MLflow retries for more than a minute whatever is wrong with the file, creates its tables in any application's database,
and two processes that create them at the same time fail: so the file is checked first, under a lock.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from urllib.parse import quote, unquote

from pipeline.system import deadline, storage

LARGEST = 256 << 20  # bytes that are read through for damage, in about a second


def uri_of_file(path: str) -> str:
    """The SQLAlchemy URI of a SQLite file. SQLAlchemy decodes %20 and ends the path at `?`: a path with % or ? is quoted.

    Its slashes too: else MLflow 3.17 makes an empty folder of the quoted name (store/db/utils._make_parent_dirs_if_sqlite).
    """
    return f"sqlite:///{quote(path, safe='') if set(path) & set('%?') else path}"


def file_of_uri(uri: str) -> str | None:
    """The SQLite file of a tracking URI; None for the address of a server."""
    return unquote(uri.partition(":///")[2].partition("?")[0]) if uri.startswith("sqlite:") else None


@contextlib.contextmanager
def prepared(path: str) -> Iterator[None]:
    """A block in which MLflow may open the file for writing, and create or migrate its tables.

    Raises:
        sqlite3.Error, OSError, ValueError: when the file is no store, or cannot be written.
    """
    if not path or path == ":memory:":
        raise ValueError("a database in memory is not shared with the workers")
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    with storage.locked(f"{path}.lock", f"another process to set up {path}"):
        check(path, "BEGIN IMMEDIATE")
        yield


def check(path: str, begin: str = "BEGIN") -> None:
    """Refuses a file that is damaged, locked, another application's, or of a newer MLflow.

    Raises:
        sqlite3.Error, OSError, ValueError: saying what it is.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    if begin == "BEGIN" and not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {path}")
    with contextlib.closing(
        sqlite3.connect(path, timeout=deadline.SECONDS, isolation_level=None)
    ) as database:
        database.execute(begin)
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "experiments" not in tables:
            names = ", ".join(sorted(tables)[:5])
            raise ValueError(f"it belongs to another application: its tables are {names}")
        if os.path.getsize(path) < LARGEST:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"the file is damaged: {' '.join(verdict.split())}")
        if "alembic_version" in tables:
            for (revision,) in database.execute("SELECT version_num FROM alembic_version"):
                _check_revision(revision)
        database.execute("ROLLBACK")


def _check_revision(revision: str) -> None:
    """Refuses a schema that the installed MLflow has no migration of."""
    import mlflow

    migrations = os.path.join(os.path.dirname(mlflow.__file__), "store", "db_migrations", "versions")
    if not any(name.startswith(f"{revision}_") for name in os.listdir(migrations)):
        raise ValueError(
            f"its schema {revision} is unknown to the installed MLflow {mlflow.__version__}, so a newer one wrote it"
        )
