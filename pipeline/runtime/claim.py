"""Who may write into a run's folder: one driver at a time, and no worker that outlived the driver before it.

    with claim(folder):               # this process is the run's driver
        wait_for_old_workers(folder)  # those of a driver that was killed
    announce_worker(folder)           # in a worker, until its process ends

Locks of the file system, which lets go of them when a process dies. A bucket has none: there, two processes with the
same run name do not notice each other.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from pipeline.errors import InputError
from pipeline.system import storage

WORKERS = ".workers"  # the file of a run's folder on which every worker holds a shared lock


@contextlib.contextmanager
def claim(path: str) -> Iterator[None]:
    """Keeps a run's folder to this process for the block.

    Raises:
        InputError: when another process has it.
    """
    if storage.is_remote(path):
        yield
        return
    try:
        os.makedirs(path, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise InputError(
            f"the folder {path} cannot be used ({error.strerror}); choose another run.name", key="run.name"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise InputError(
            f"another process is running {path} right now; wait for it, end it, or choose another run.name",
            key="run.name",
        ) from error
    try:
        yield
    finally:
        os.close(handle)


def announce_worker(run_folder: str) -> None:
    """In a worker: `wait_for_old_workers` sees it until its process ends."""
    if not storage.is_remote(run_folder):
        os.makedirs(run_folder, exist_ok=True)
        handle = os.open(os.path.join(run_folder, WORKERS), os.O_RDWR | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_SH)


def wait_for_old_workers(run_folder: str, seconds: float = 60.0) -> None:
    """Returns when no worker of an earlier driver is left: those of one that was killed live some seconds longer.

    Raises:
        InputError: when they are still there after `seconds`.
    """
    path = os.path.join(run_folder, WORKERS)
    if storage.is_remote(run_folder) or not os.path.exists(path):
        return
    give_up, told = time.monotonic() + seconds, False
    with open(path, "r+b", buffering=0, opener=storage.lockable) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise InputError(
                        f"workers of an earlier process still run in {run_folder}; end them (ps lists "
                        "them as ray::RayTrainWorker), or choose another run.name",
                        key="run.name",
                    ) from error
            if not told:
                print("waiting for the workers of a killed process to exit", flush=True)
            told = True
            time.sleep(0.2)


def clear(run_folder: str) -> None:
    """Deletes what is in the folder of a run; the folder itself may be claimed."""
    if storage.exists(run_folder):
        fs, inner = storage.filesystem(run_folder)
        fs.delete_dir_contents(inner)
