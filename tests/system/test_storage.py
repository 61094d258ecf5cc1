"""Tests atomic files, locks, private folders, and the messages about unusable buckets."""

import os
import stat
import sys
import tempfile

import pyarrow.fs
import pytest

from pipeline.errors import InputError
from pipeline.system import storage

OTHER = 65534  # uid of another user


def broken():
    yield "one"
    raise RuntimeError("no second line")


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_cannot_be_completed_does_not_replace_the_old_file(remote, tmp_path, monkeypatch):
    if remote:  # a local file system acts as a bucket
        monkeypatch.setattr(storage, "is_remote", lambda path: True)
        monkeypatch.setattr(storage, "filesystem", lambda path: (pyarrow.fs.LocalFileSystem(), path))
    path = str(tmp_path / "rows.jsonl")
    storage.write_lines(path, ["old"])
    with pytest.raises(RuntimeError):
        storage.write_lines(path, broken())
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    assert list(storage.read_lines(path)) == ["old"]


def test_a_wait_for_a_lock_is_printed_and_has_a_time_limit(tmp_path, capsys):
    path = str(tmp_path / "lock")
    with storage.locked(path, "nobody"), pytest.raises(TimeoutError, match="waited 1 s for another process"):
        with storage.locked(path, "another process", seconds=1.2):
            raise AssertionError("two at once")
    assert capsys.readouterr().out == "waiting for another process\n"
    with storage.locked(path, "nobody"):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of another user")
@pytest.mark.parametrize("planted", ["folder", "their link to our folder"])
def test_a_folder_of_another_user_is_refused(planted, tmp_path):
    """The folder's owner could replace a run's files, for example an adapter after it is checked and before it is registered."""
    if planted == "folder":
        (tmp_path / "mine").mkdir(mode=0o777)
        os.chown(tmp_path / "mine", OTHER, OTHER)
    else:
        (tmp_path / "target").mkdir()
        (tmp_path / "mine").symlink_to("target")
        os.chown(tmp_path / "mine", OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(
        InputError, match=r"TMPDIR: cannot use .*/mine \(the folder belongs to another user\); export TMP"
    ):
        storage.private(str(tmp_path), "mine", "TMPDIR")


@pytest.mark.parametrize("kind", ["scratch", "cache"])
def test_only_this_user_can_enter_its_folders(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = tmp_path / ("rlhf-pipeline" if kind == "cache" else f"rlhf-{os.getuid()}")
    name.mkdir(mode=0o777)
    name.chmod(0o777)
    path = getattr(storage, kind)("versions", "one")
    assert path == str(name / "versions/one") and stat.S_IMODE(name.stat().st_mode) == 0o700


def test_a_bucket_without_exclusive_creation_is_refused(tmp_path, monkeypatch):
    place = f"memory://{tmp_path.name}"
    storage.require_writable(place)
    monkeypatch.setitem(storage.CREATE, "memory", lambda bucket, key, content: True)
    with pytest.raises(
        InputError, match=r"run\.storage_path: .*the storage lets a process overwrite a file that must"
    ):
        storage.require_writable(place)


def test_missing_packages_of_a_bucket_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        ImportError, match=r"s3:// needs packages \(.*boto3.*\): pip install -e '\.\[cloud\]'"
    ):
        storage.create("s3://bucket/one.json", {})
