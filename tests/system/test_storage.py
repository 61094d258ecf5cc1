"""Tests that files are written atomically, and that waiting for a lock has a time limit."""

import errno
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
    raise RuntimeError("the second line cannot be made")


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_that_cannot_be_finished_leaves_the_old_one(remote, tmp_path, monkeypatch):
    if remote:  # an fsspec file system stands for a bucket
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of another user")
@pytest.mark.parametrize("planted", ["folder", "link to his", "link to ours"])
def test_a_folder_that_another_user_made_is_refused(planted, tmp_path):
    """The folder's owner could exchange files of a run: an adapter between its check and its registration."""
    if planted == "folder":
        (tmp_path / "mine").mkdir(mode=0o777)
        os.chown(tmp_path / "mine", OTHER, OTHER)
    else:
        (tmp_path / "target").mkdir()
        (tmp_path / "mine").symlink_to("target")
        whose = tmp_path / ("target" if planted == "link to his" else "mine")
        os.chown(whose, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(
        InputError, match=r"TMPDIR: cannot use .*/mine \(it belongs to another user\); export TMP"
    ):
        storage.private(str(tmp_path), "mine", "TMPDIR")


@pytest.mark.parametrize("of", ["scratch", "cache"])
def test_only_this_user_can_enter_its_folders(of, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = tmp_path / ("rlhf-pipeline" if of == "cache" else f"rlhf-{os.getuid()}")
    name.mkdir(mode=0o777)
    name.chmod(0o777)  # as an earlier version, or a loose umask, would create it
    path = getattr(storage, of)("versions", "one")
    assert path == str(name / "versions/one") and stat.S_IMODE(name.stat().st_mode) == 0o700


def test_a_private_folder_may_be_on_a_disk_that_is_read_only(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "mine").mkdir(mode=0o700)
    monkeypatch.setattr(os, "chmod", refuse)
    assert storage.private(str(tmp_path), "mine", "TMPDIR") == str(tmp_path / "mine")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000])
def test_json_that_is_nested_too_deep_is_damaged_like_any_other(content, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="nested too deep"):
        storage.read_json(str(tmp_path / "x.json"))


def test_a_bucket_that_lets_a_second_process_overwrite_a_new_file_is_refused(tmp_path, monkeypatch):
    place = f"memory://{tmp_path.name}"
    storage.require_writable(place)
    monkeypatch.setitem(storage.CREATE, "memory", lambda bucket, key, content: True)
    with pytest.raises(
        InputError, match=r"run\.storage_path: .*it lets a process overwrite a file that must"
    ):
        storage.require_writable(place)


def test_a_bucket_names_the_packages_that_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        ImportError, match=r"s3:// needs packages \(.*boto3.*\): pip install -e '\.\[cloud\]'"
    ):
        storage.create("s3://bucket/one.json", {})
