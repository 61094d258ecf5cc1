"""Notices that a node is about to be taken away: Ray's drain notice (a spot reclaim, a drained node) and SIGTERM to a worker.

Asking is a barrier of a few milliseconds, and all ranks have to ask at the same step: they agree on the next one when
they ask, so that it comes about every EVERY seconds, whatever a step takes.
"""

import os
import signal
import time
from typing import Any

EVERY = float(os.environ.get("PIPELINE_NOTICE_EVERY_S", "5"))  # seconds; spot nodes give 30 to 120 of them
_got_sigterm = False


def listen() -> None:
    """In the main thread of a worker, before training: SIGTERM asks for a checkpoint; a second one ends the process."""

    def note(*_: Any) -> None:
        global _got_sigterm
        _got_sigterm = True
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, note)


class Notice:
    """What this worker knows of nodes that are about to go; all ranks agree after each check."""

    def __init__(self, world: int):
        self.world = world
        self.next, self.asked = 0, time.monotonic()
        self.step = 0
        self.given = self.terminated = False

    def arrived(self, step: int) -> bool:
        """Whether a notice has been given, checked every EVERY seconds. Every rank calls this after every step."""
        # Also after a first notice: SIGTERM may follow the notice of a node that is drained.
        if step >= self.next and not self.terminated:
            self._ask(step)
        return self.given

    def _ask(self, step: int) -> None:
        import ray.train

        now = time.monotonic()
        pace = (now - self.asked) / max(1, step - self.step)  # seconds per step
        gap = max(1, int(EVERY / max(pace, 1e-3))) if self.step else 1
        gap, terminated = self._agree([gap, int(_got_sigterm)])
        self.next, self.step, self.asked = step + gap, step, now
        self.terminated = bool(terminated)
        self.given = self.given or self.terminated or ray.train.get_preemption_info() is not None

    def _agree(self, mine: list[int]) -> list[int]:
        """The largest of each number over the ranks."""
        if self.world == 1:
            return mine
        import ray.train.torch
        import torch

        from pipeline.models.lockstep import catch_up

        numbers = torch.tensor(mine, device=ray.train.torch.get_device())
        catch_up()
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
        return numbers.tolist()
