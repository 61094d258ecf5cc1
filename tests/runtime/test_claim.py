"""One driver at a time in a run's folder, and no worker of the driver before it."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from running import ROOT

from pipeline.errors import InputError
from pipeline.runtime.claim import WORKERS, claim, wait_for_old_workers
from pipeline.system import storage


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    return folder


def test_two_processes_cannot_run_the_same_name(run):
    with claim(str(run)):
        with (
            pytest.raises(InputError, match=r"run\.name: another process is running .*another run\.name"),
            claim(str(run)),
        ):
            pass
    with claim(str(run)):
        pass


def test_a_killed_process_lets_go(run):
    program = f"""
        import os, signal
        from pipeline.runtime.claim import claim
        with claim({str(run)!r}):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert (
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, check=False).returncode
        == -9
    )
    with claim(str(run)):
        shutil.rmtree(run)


def test_a_new_driver_waits_for_the_workers_of_a_killed_one(run, capsys):
    program = f"""
        import time
        from pipeline.runtime.claim import announce_worker
        announce_worker({str(run)!r})
        print("there", flush=True)
        time.sleep(1.0)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"there\n"
        with pytest.raises(InputError, match=r"run\.name: workers of an earlier process still run in"):
            wait_for_old_workers(str(run), seconds=0)
        wait_for_old_workers(str(run))
        assert worker.poll() is not None or worker.wait(5) == 0
    assert "waiting for the workers of a killed process to exit" in capsys.readouterr().out


def test_a_pipe_in_a_run_folder_is_not_waited_for(run):
    os.makedirs(run, exist_ok=True)
    for name in ("job.json", WORKERS, "mlflow.db", "mlflow.db.lock"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    for read in (storage.read_json, lambda path: list(storage.read_lines(path))):
        with pytest.raises(OSError, match=r"job\.json is not a regular file"):
            read(str(run / "job.json"))
    wait_for_old_workers(str(run))
