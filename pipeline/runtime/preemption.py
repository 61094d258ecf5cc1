"""Notices that a node is about to be taken away: Ray's drain notice, as a spot reclaim or `ray drain-node` gives it."""

import os
import time

EVERY_S = float(os.environ.get("PIPELINE_NOTICE_EVERY_S", "5"))  # seconds; spot nodes give 30 to 120 of them


class PreemptionNotice:
    """What the workers know of nodes that are about to go. Every rank calls `poll` after every step.

    Asking Ray is a barrier of a few milliseconds, and all ranks have to ask at the same step. They agree on the next one
    whenever they ask, so that it comes about every EVERY_S seconds.
    """

    def __init__(self) -> None:
        self.active = False  # a notice was given; the run commits one checkpoint for it
        self._next, self._step, self._asked = 0, 0, time.monotonic()

    def poll(self, step: int) -> bool:
        """Returns True once: at the first step that knows of a notice."""
        if self.active or step < self._next:
            return False
        import ray.train.collective

        from pipeline.models.fsdp_sync import catch_up

        now = time.monotonic()
        step_s = (now - self._asked) / max(1, step - self._step)
        gap = max(1, int(EVERY_S / max(step_s, 1e-3))) if self._step else 1
        catch_up()
        gap = ray.train.collective.broadcast_from_rank_zero(gap)
        self._next, self._step, self._asked = step + gap, step, now
        self.active = ray.train.get_preemption_info() is not None
        return self.active
