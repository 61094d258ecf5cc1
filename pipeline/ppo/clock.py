"""Measures seconds and peak memory of each phase of an update."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from pipeline.errors import OutOfMemory, in_brief, is_out_of_memory


class Phases:
    """Adds up the seconds of each phase, and records its peak memory: `with phases("rollout"): ...`.

    On a GPU, memory is the memory that torch allocated. On a CPU, memory is the process's resident set.
    Each phase resets the operating system's peak, so getrusage does not report the peak of the whole run. The metric
    `memory/peak` reports the peak of the whole run. If memory runs out, raises OutOfMemory with the phase's name.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.highest = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        reset_peak(self.device)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(name, in_brief(error)) from error
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # waits until all kernels of the phase have run
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), peak_bytes(self.device))

    def metrics(self) -> dict[str, float]:
        """Returns time/<phase> in seconds and memory/<phase> in GiB since the last call, and memory/peak since the start."""
        metrics = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        metrics |= {f"memory/{name}": peak / 2**30 for name, peak in self.peak_bytes.items()}
        self.highest = max(self.highest, *self.peak_bytes.values(), 0)
        metrics["memory/peak"] = self.highest / 2**30
        self.seconds, self.peak_bytes = {}, {}
        return metrics


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory since the last reset, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def reset_peak(device: torch.device) -> None:
    """Resets the peak of this process's memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # If a container forbids resetting the peak, the peak since the process started is an upper bound.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # "reset the peak resident set size" (proc(5))
