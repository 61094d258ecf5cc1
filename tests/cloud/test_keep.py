"""Tests the backup of a head's MLflow database. The backup is complete even during writes, and the next head restores it."""

import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import keep
from running import ROOT


def rows(database):
    with closing(sqlite3.connect(database)) as one:
        return [row[0] for row in one.execute("select n from t order by n")]


def test_a_new_head_begins_where_the_last_one_ended(tmp_path):
    old, kept, new = tmp_path / "old.db", tmp_path / "bucket/mlflow/mlflow.db", tmp_path / "new.db"
    uri = f"file://{kept}"
    assert keep.restore(str(new), uri) is False  # the first head has no backup to restore
    with closing(sqlite3.connect(old)) as writer:
        writer.execute("pragma journal_mode=wal")
        writer.execute("create table t (n integer)")
        writer.execute("insert into t values (1)")
        writer.commit()
        writer.execute("insert into t values (2)")  # an open transaction, not committed
        keep.keep(str(old), uri)
        assert rows(kept) == [1]
        writer.commit()
        keep.keep(str(old), uri)
    assert keep.restore(str(new), uri) is True
    assert rows(new) == [1, 2]
    # `restore` does not overwrite an existing file.
    assert keep.restore(str(new), "file:///nowhere/at/all.db") is False
    assert not list(kept.parent.glob("*.partial"))


def test_the_watch_copies_what_changed(tmp_path):
    database, kept = tmp_path / "mlflow.db", tmp_path / "bucket/mlflow.db"
    code = "import keep, sys; keep.EVERY_SECONDS = 0.1; keep.watch(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(database), f"file://{kept}"]
    with subprocess.Popen(command, cwd=ROOT / "jobs/cloud") as watcher:
        try:
            for number in (1, 2):
                with closing(sqlite3.connect(database)) as one:
                    one.execute("create table if not exists t (n integer)")
                    one.execute("insert into t values (?)", (number,))
                    one.commit()
                for _ in range(300):
                    if kept.exists() and rows(kept) == list(range(1, number + 1)):
                        break
                    time.sleep(0.1)
                else:
                    raise AssertionError(f"row {number} was not copied within 30 s")
        finally:
            watcher.kill()
