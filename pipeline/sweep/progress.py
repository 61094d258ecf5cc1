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

INTERVAL_S = 2.0  # time between two queries of the rungs


@contextlib.contextmanager
def watching(sweep: Sweep, rungs: Any, keep: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Prints what the trials report, for the block."""
    import ray

    ended, count, printed = threading.Event(), len(sweep.trials), 0
    started, before = time.monotonic(), done(ray.get(rungs.state.remote()))

    def look() -> None:
        nonlocal printed
        with contextlib.suppress(ray.exceptions.RayError):  # Ray ends before this thread
            state = ray.get(rungs.state.remote())
            if not (new := state["lines"][printed:]):
                return
            printed += len(new)
            new[-1] += f"   [{overall(state, count, time.monotonic() - started, before)}]"
            try:
                keep(state)
            except OSError as error:  # the next report writes it again, and so does the end
                new.append(f"warning: sweep.json was not written ({in_brief(error)})")
            print("\n".join(new), flush=True)

    def looks() -> None:
        while not ended.wait(INTERVAL_S):
            look()

    thread = threading.Thread(target=looks, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()


def overall(state: dict[str, Any], count: int, seconds: float, before: float) -> str:
    """Returns how many of `count` trials ended and run, and the time left at the speed since `before` were done."""
    text = f"{len(state['ended'])} of {count} ended, {len(state['running'])} running"
    new, left = done(state) - before, count - done(state)
    if new > 0 and left > 0:
        minutes, rest = divmod(int(seconds / new * left), 60)
        text += f", left {minutes}:{rest:02d}"
    return text


def done(state: dict[str, Any]) -> float:
    """Returns the finished trials, counting the running ones by their share of steps."""
    reports = {trial: reports[-1] for trial, reports in state["reports"].items() if reports}
    shares = {trial: last["step"] / last["of"] for trial, last in reports.items()}
    return sum((shares | dict.fromkeys(state["ended"], 1.0)).values())
