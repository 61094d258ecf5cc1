"""Copies the database of a cluster's MLflow to a bucket, so that runs and versions outlive the head.

    python keep.py restore mlflow.db s3://BUCKET/mlflow/mlflow.db      # fetches the copy, if there is no database here
    python keep.py watch   mlflow.db s3://BUCKET/mlflow/mlflow.db      # copies the database after each change, forever
    python keep.py keep    mlflow.db s3://BUCKET/mlflow/mlflow.db      # copies the database once

start-node.sh runs these commands on the head. SQLite makes the copies, so that a copy is consistent even while the server writes.
If a head ends without `make down`, the last minute of changes is lost. If you have a database server, set MLFLOW_BACKEND instead.
"""

import os
import sqlite3
import sys
import tempfile
import time
from contextlib import closing

import pyarrow.fs as pafs

EVERY_SECONDS = 60


def restore(database: str, uri: str) -> bool:
    """Fetches the copy in the bucket, unless the file `database` exists. Returns whether it fetched the copy."""
    fs, inner = pafs.FileSystem.from_uri(uri)
    if os.path.exists(database) or not fs.get_file_info(inner).is_file:
        return False
    pafs.copy_files(inner, f"{database}.partial", source_filesystem=fs)
    os.replace(f"{database}.partial", database)
    return True


def keep(database: str, uri: str) -> None:
    """Copies `database` to `uri`. An interrupted copy leaves the earlier copy unchanged."""
    fs, inner = pafs.FileSystem.from_uri(uri)
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "copy.db")
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(copy)) as sink:
            source.backup(sink)
        if fs.type_name == "local":
            fs.create_dir(os.path.dirname(inner))
        pafs.copy_files(copy, f"{inner}.partial", destination_filesystem=fs)
        fs.move(f"{inner}.partial", inner)


def changed(database: str) -> float:
    """Returns the time of the last change of the database, or 0 if it does not exist."""
    parts = [part for part in (database, f"{database}-wal") if os.path.exists(part)]
    return max((os.stat(part).st_mtime for part in parts), default=0.0)


def watch(database: str, uri: str) -> None:
    """Copies the database after each change, forever. Prints an error if a copy fails, and tries again."""
    kept = 0.0
    while True:
        if (now := changed(database)) > kept:
            try:
                keep(database, uri)
                kept = now
            except (OSError, sqlite3.Error) as error:
                print(f"cannot copy the database, trying again in {EVERY_SECONDS} s: {error}", flush=True)
        time.sleep(EVERY_SECONDS)


if __name__ == "__main__":
    verb, *where = sys.argv[1:]
    {"restore": restore, "keep": keep, "watch": watch}[verb](*where)
