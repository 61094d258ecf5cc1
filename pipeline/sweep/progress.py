"""Prints the progress of a sweep, and keeps sweep.json up to date for a driver that is killed.

with watching(sweep, rungs, keep):
    ...                                 # keep(state) is called after each change
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import in_brief
from pipeline.sweep.space import Sweep

INTERVAL_S = 2.0  # between two queries of the rungs


@contextlib.contextmanager
def watching(sweep: Sweep, rungs: Any, keep: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Prints what the trials report, for the block."""
    import ray

    ended = threading.Event()
    lines = Lines(sweep, ray.get(rungs.state.remote()))

    def look() -> None:
        while not ended.wait(INTERVAL_S):
            _look()

    def _look() -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # Ray ends before this thread
            state = ray.get(rungs.state.remote())
            if new := lines.about(state):
                try:
                    keep(state)
                except OSError as error:  # the next report writes it again, and so does the end
                    new.append(f"warning: sweep.json was not written ({in_brief(error)})")
                print("\n".join(new), flush=True)

    thread = threading.Thread(target=look, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _look()


class Lines:
    """Describes what changed between two states of the rungs, with the time left."""

    def __init__(self, sweep: Sweep, state: dict[str, Any]):
        self.sweep, self.state = sweep, state
        self.started, self.done = time.monotonic(), self._done(state)

    def about(self, state: dict[str, Any]) -> list[str]:
        before, self.state = self.state, state
        lines = [f"{trial}  begins" for trial in state["running"] if trial not in before["running"]]
        for trial, reports in state["reports"].items():
            for report in reports[len(before["reports"].get(trial, [])) :]:
                figure = f"{self.sweep.metric} {report['figure']:.4g}"
                lines.append(f"{trial}  step {report['step']}/{report['of']}  {figure}")
                lines += [f"{trial}  stops: {report['stop']}"] if report["stop"] else []
        for trial in before["running"]:
            if trial not in state["running"]:
                why = state["failures"].get(trial)
                lines.append(f"{trial}  failed: {why}" if why else f"{trial}  ended")
        if lines:
            lines[-1] += f"   [{self._overall(state)}]"
        return lines

    def _overall(self, state: dict[str, Any]) -> str:
        count = len(self.sweep.trials)
        done = self._done(state)
        overall = f"{len(state['ended'])} of {count} ended, {len(state['running'])} running"
        since, new = time.monotonic() - self.started, done - self.done
        if new > 0 and done < count:
            left = since / new * (count - done)
            overall += f", left {int(left // 60)}:{int(left % 60):02d}"
        return overall

    def _done(self, state: dict[str, Any]) -> float:
        """Returns the finished trials, counting the running ones by their share of steps."""
        shares = {
            trial: reports[-1]["step"] / reports[-1]["of"]
            for trial, reports in state["reports"].items()
            if reports
        }
        return sum((shares | dict.fromkeys(state["ended"], 1.0)).values())
