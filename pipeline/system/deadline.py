"""Deadlines for what might never end: the first contact with a bucket, a hub or a server, and code that a job names."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

SECONDS = 10.0
left_behind: list[threading.Thread] = []  # with calls that nobody waits for any more


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """`call(*arguments)`. Libraries retry for up to minutes and not all of them can be told otherwise; a call that takes
    longer is left behind in its thread, which does not keep the process from ending.

    Raises:
        TimeoutError: when there is no answer within SECONDS.
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, daemon=True, name="first contact")
    thread.start()
    try:
        return future.result(timeout=SECONDS)
    except TimeoutError:
        if future.done():
            raise  # the call's own
        left_behind.append(thread)
        raise TimeoutError(f"no answer within {SECONDS:.0f} seconds") from None


@contextmanager
def limited(seconds: float, late: Exception) -> Iterator[None]:
    """Raises `late` inside the block once it has taken so long: an import, or a regular expression, that does not end.

    In the main thread, the only one that signals reach; elsewhere the block takes as long as it takes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
