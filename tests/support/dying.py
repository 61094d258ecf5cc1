"""Faults for tests of recovery. Each fault happens once, on rank 0, at a given step of a stage."""

import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil


def train_of(stage: str) -> Any:
    """Returns the function `train` of a stage. Each worker runs this function."""
    return importlib.import_module(f"pipeline.stages.{stage}").train


def at_step(stage: str, step: int | None, once: str, fault: Callable[[], None]) -> Any:
    """Returns the stage's `train`, changed so that it calls `fault()` after `step`.

    Args:
        step: If `step` is None, `fault()` is called after the last step, before the adapter is saved.
        once: file that records the call, so that a restarted stage does not call `fault()` again.
    """

    def touched(worker: Any) -> Any:
        poll, finish = worker.notice.poll, worker.finish

        def reached(current: int | None) -> None:
            if current == step and worker.rank == 0 and not os.path.exists(once):
                with open(once, "x", encoding="utf-8"):
                    pass
                fault()

        worker.notice.poll = lambda current: (reached(current), poll(current))[1]
        worker.finish = lambda *args, **options: (reached(None), finish(*args, **options))[1]
        return train_of(stage)(worker)

    return touched


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill(folder: str) -> None:
    """Writes a file into a folder until the folder's disk is full."""
    with open(os.path.join(folder, "filler"), "wb") as file:
        try:
            while True:
                file.write(b"\0" * 65536)
                file.flush()
        except OSError:
            return


def swap(folder: str) -> None:
    """Replaces a folder with a file, so that writing into the folder fails, as after a lost mount."""
    os.rename(folder, folder + "-gone")
    with open(folder, "x", encoding="utf-8"):
        pass


def rollout_workers() -> list[psutil.Process]:
    """Returns the processes of rollout workers on this node."""
    process = psutil.Process()
    parent = process.parent() if process.name().startswith("ray::") else process
    return [child for child in parent.children(recursive=True) if child.name().startswith("ray::RolloutWork")]


def has_loaded(rollout_worker: psutil.Process) -> bool:
    """Returns whether the worker has loaded its models. The title of a Ray process is its current task."""
    return not rollout_worker.cmdline()[0].endswith(("__init__", ".load"))


def a_rollout_worker_killed_and_one_stopped() -> None:
    deadline = time.monotonic() + 120
    while len(workers := [*filter(has_loaded, rollout_workers())]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    for process, action in zip(workers, (signal.SIGKILL, signal.SIGSTOP), strict=True):
        process.send_signal(action)


def rollout_workers_killed() -> None:
    for process in rollout_workers():
        process.send_signal(signal.SIGKILL)
