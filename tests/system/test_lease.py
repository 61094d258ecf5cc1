"""Tests that only one process at a time may write into a folder, and that a process that lost its lease stops writing."""

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gcs
import pytest
from resumed import touched
from running import NO_EVAL, ROOT, stage
from s3 import mock_s3

from pipeline.errors import InputError, LeaseLost
from pipeline.system import lease, storage

S = 1.6  # duration of a lease in seconds
MINUTE = 60.0


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(lease, "SECONDS", S)
    monkeypatch.setattr(lease, "POLL_S", 0.05)


@pytest.fixture(params=["folder", "memory", "s3", "gs"])
def folder(request, tmp_path, monkeypatch):
    """Returns a run's folder on the local disk, in fsspec's memory, in a mock of S3, or in a fake of Google Cloud Storage."""
    with contextlib.ExitStack() as stack:
        if request.param == "s3":
            pytest.importorskip("moto", reason="needs the extra `mock`")
            stack.enter_context(mock_s3(monkeypatch))
        if request.param == "gs":
            pytest.importorskip("google.cloud.storage", reason="needs the extra `cloud`")
            stack.enter_context(gcs.gcs(monkeypatch))
        places = {"folder": str(tmp_path), "memory": f"memory://{tmp_path.name}", "s3": "s3://bucket"}
        places["gs"] = "gs://anonymous@bucket"
        yield f"{places[request.param]}/{tmp_path.name}/one"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Returns a function that makes this process act like a process on another machine."""

    def move(name="elsewhere"):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))

    return move


def history(folder):
    names = sorted(storage.names(f"{folder}/lease"))
    return [storage.read_json(f"{folder}/lease/{name}") for name in names]


def killed(folder):
    """Acquires a folder's lease and leaves it as a killed process would: no process renews it, and its lock is free."""
    mine, _, handle = lease._acquire(folder)
    os.close(handle)
    return mine


def test_attempts_are_numbered_and_one_owns_the_folder(folder, elsewhere, capsys):
    with lease.held(folder) as first:
        with pytest.raises(
            InputError, match=r"run\.name: another process is running .*/one right now \(attempt 1 on"
        ):
            lease.held(folder).__enter__()
        elsewhere()
        with pytest.raises(InputError, match=r"another process is running .* process \d+, since 20"):
            lease.held(folder).__enter__()  # the renewed lease still excludes other processes
        first.require()
    capsys.readouterr()
    with lease.held(folder) as second:
        assert "waiting" not in capsys.readouterr().out, "the first attempt has ended"
        assert (first.attempt, second.attempt) == (1, 2)
    assert [(one["attempt"], bool(one["ended"])) for one in history(folder)] == [(1, True), (2, True)]


def test_only_one_of_many_threads_creates_a_file(folder):
    for number in range(4):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda one, n=number: storage.create(f"{folder}/{n}", one), range(8)))
        assert sum(made) == 1 and storage.read_json(f"{folder}/{number}") == made.index(True)


@pytest.mark.parametrize("ahead", [-MINUTE, MINUTE], ids=str)
def test_the_lease_of_another_machine_expires_whatever_its_clock_says(
    folder, ahead, elsewhere, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        time_of = lease._time
        patch.setattr(lease, "_time", lambda later=0.0: time_of(later + ahead))
        before = killed(folder)
    if not storage.is_remote(folder):  # in a shared file system, file times come from another machine's clock
        then = os.path.getmtime(before.file) + ahead
        os.utime(before.file, (then, then))
    elsewhere()
    began = time.monotonic()
    with lease.held(folder) as after:
        assert S <= time.monotonic() - began < S + 3 and after.attempt == 2
        with pytest.raises(
            LeaseLost, match=r"/one belongs to attempt 2 on .*; this process, attempt 1, stops"
        ):
            before.require()
    assert "a lease to expire: attempt 1 on" in capsys.readouterr().out
    assert history(folder)[0]["ended"].endswith("taken over by attempt 2")


def test_a_killed_process_of_this_machine_has_no_lease_once_its_workers_have_ended(tmp_path, capsys):
    folder = str(tmp_path / "one")
    before = killed(folder)
    record = storage.read_json(before.file)
    gone = subprocess.Popen(["true"])
    gone.wait()
    storage.write_json(before.file, record | {"pid": gone.pid})
    began = time.monotonic()
    worker = lease.hold(before)
    threading.Timer(1.5, os.close, [worker]).start()
    with lease.held(folder) as second:
        assert 1.4 < time.monotonic() - began and second.attempt == 2
    assert "waiting for the workers of a killed process to exit" in capsys.readouterr().out
    killed(folder)
    began = time.monotonic()
    with lease.held(folder):
        assert time.monotonic() - began < S
    before = killed(folder)  # marks the lease as held for a cluster, whose workers may run on other nodes
    storage.write_json(before.file, storage.read_json(before.file) | {"cluster": True})
    with lease.held(folder):
        assert time.monotonic() - began > S


def test_workers_that_do_not_end_are_named(tmp_path, monkeypatch):
    before = killed(folder := str(tmp_path / "one"))
    worker = lease.hold(before)
    monkeypatch.setattr(storage, "LOCK_POLL_S", 0.5)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    left = storage.read_json(before.file) | {"pid": 2**22 + 1}
    message = r"run\.name: workers of a killed process .* are running .*attempt 1 on"
    with pytest.raises(InputError, match=message):
        lease._wait_until_expired(folder, before.file, left)
    os.close(worker)


WRITER = """
    import sys, time
    from pipeline.errors import LeaseLost
    from pipeline.system import lease
    with lease.held(sys.argv[1]) as mine:
        print("started", flush=True)
        number = 0
        while True:
            try:
                mine.require()
            except LeaseLost as lost:
                print("stops:", lost, flush=True)
                break
            with open(sys.argv[2], "a") as file:
                file.write(f"{mine.attempt}\\n")
            number += 1
            time.sleep(0.01)
"""


def test_a_process_that_was_suspended_for_longer_than_its_lease_writes_nothing_more(tmp_path, elsewhere):
    (tmp_path / "other").mkdir()
    written = tmp_path / "written"
    env = os.environ | {"TMPDIR": str(tmp_path / "other"), "PIPELINE_LEASE_S": str(S)}
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "one"), str(written)]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "started\n"
        time.sleep(2 * S)
        writer.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        elsewhere()
        with lease.held(str(tmp_path / "one")) as mine:
            lines = len(written.read_text().split())
            writer.send_signal(signal.SIGCONT)
            output = writer.stdout.read()  # waits until the writing process has ended
            assert "stops:" in output and "belongs to attempt 2" in output, output
            # at most one more line, because the writer may have been suspended between its check and its write
            assert len(written.read_text().split()) - lines <= 1
            time.sleep(S)
            mine.require()
    assert [one["attempt"] for one in history(str(tmp_path / "one"))] == [1, 2]
    assert "taken over by attempt 2" in history(str(tmp_path / "one"))[0]["ended"]


def test_a_process_whose_folder_was_deleted_writes_nothing_more(tmp_path):
    folder = tmp_path / "one"
    with lease.held(str(folder)) as mine:
        for file in (folder / "lease").iterdir():
            file.unlink()
        with pytest.raises(LeaseLost, match="/one was deleted; this process, attempt 1, stops"):
            mine.require()
        time.sleep(S / 2)
        assert not list((folder / "lease").iterdir()), "the lease must not be renewed"
        with lease.held(str(folder)) as other:  # another process has started the run again
            assert other.attempt == 1
            with pytest.raises(LeaseLost, match=f"belongs to attempt 1 on .*, process {os.getpid()}, since"):
                mine.require()


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".txt"}


@pytest.mark.parametrize("step", [3, pytest.param(None, marks=pytest.mark.slow)], ids=["mid", "end"])
def test_a_run_without_its_lease_commits_no_checkpoint_and_registers_nothing(
    step, tmp_path, monkeypatch, capsys
):
    run, left = tmp_path / "one", {}

    def taken_over():
        (attempt,) = (run / "lease").iterdir()
        record = json.loads(attempt.read_text()) | {"attempt": 2, "id": "another", "host": "elsewhere"}
        assert storage.create(str(run / "lease/000002.json"), record)
        left.update(everything(run))

    # With long leases, the process has not yet noticed that it lost its lease.
    monkeypatch.setattr(lease, "SECONDS", 600.0)
    touched(monkeypatch, "sft", step, tmp_path / "once", taken_over)
    steps = ["trainer.max_steps=4", "trainer.save_strategy=steps", "trainer.save_steps=2"]
    stage("sft", tmp_path, "one", *steps, *NO_EVAL, "scaling.num_workers=0", "run.max_failures=3", status=1)
    printed = capsys.readouterr()
    assert "failed: " in printed.err and "belongs to attempt 2 on elsewhere" in printed.err, printed.err
    assert "continues from" not in printed.out
    now = everything(run)
    assert {path for path in left if now.get(path) != left[path]} == set(), "it has changed files"
    assert {path.parent.name for path in now.keys() - left} <= {"lease"}, "it has written nothing"


def test_the_scratch_folders_of_killed_processes_are_deleted(tmp_path, elsewhere):
    elsewhere()
    for name in ("held", "killed", "young"):
        os.close(lease.hold(lease.Lease(id=name)))
    for name in ("held", "killed"):
        os.utime(os.path.join(storage.scratch("runs", name), lease.HELD), (1, 1))
    other = lease.hold(lease.Lease(id="held"))
    lease.remove_abandoned()
    os.close(other)
    assert sorted(os.listdir(storage.scratch("runs"))) == ["held", "young"]
    with lease.held(str(tmp_path / "one")) as mine:
        assert os.path.isdir(mine.scratch)
    assert not os.path.exists(mine.scratch)


def test_a_full_disk_leaves_no_empty_lease(tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"), monkeypatch.context() as patch:
        patch.setattr(storage, "open", Full, raising=False)
        storage.create(str(tmp_path / "lease/000001.json"), {})
    assert list((tmp_path / "lease").iterdir()) == []
