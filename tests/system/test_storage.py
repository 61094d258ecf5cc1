"""A file appears whole or not at all, and a lock is waited for with a limit."""

import pyarrow.fs
import pytest

from pipeline.system import storage


def broken():
    yield "one"
    raise RuntimeError("the second line cannot be made")


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_cannot_be_finished_leaves_the_old_one(remote, tmp_path, monkeypatch):
    if remote:  # as a bucket is written to, on a file system that can be looked at
        monkeypatch.setattr(storage, "is_remote", lambda path: True)
        monkeypatch.setattr(storage, "filesystem", lambda path: (pyarrow.fs.LocalFileSystem(), path))
    path = str(tmp_path / "rows.jsonl")
    storage.write_lines(path, ["old"])
    with pytest.raises(RuntimeError):
        storage.write_lines(path, broken())
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    assert list(storage.read_lines(path)) == ["old"]


def test_whoever_waits_for_a_lock_says_so_and_not_for_ever(tmp_path, capsys):
    path = str(tmp_path / "lock")
    with storage.locked(path, "nobody"), pytest.raises(TimeoutError, match="waited 1 s for another process"):
        with storage.locked(path, "another process", seconds=1.2):
            raise AssertionError("two at once")
    assert capsys.readouterr().out == "waiting for another process\n"
    with storage.locked(path, "nobody"):
        pass
