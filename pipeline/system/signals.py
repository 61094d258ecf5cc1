"""Ctrl-C and SIGTERM end a run in order: workers stopped, the MLflow run closed, and an exit status of 128 + the signal.

Ctrl-C is a KeyboardInterrupt, as always in Python; SIGTERM and SIGHUP are a SystemExit. The exit status is 128 + the
signal's number, as in a shell. Ray replaces the handlers by its own: `listen` puts these back.

Of a process with a command line (`take_over`) the first signal counts. While it is obeyed further ones change nothing, up to
PATIENCE; the next one then ends the process at once.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
# Which of them this process got: the code of a SystemExit is lost inside ray.get().
received: signal.Signals | None = None
PATIENCE = 20.0  # seconds for a run to end in order
_owned = False
_since: float | None = None  # time.monotonic() of the signal that is being obeyed


def take_over() -> None:
    """For a process with a command line, once, before anything heavy is imported."""
    global _owned
    _owned = True
    if _is_main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    # The last to run, since it is the first to be registered: while Python takes itself apart its handlers are gone.
    atexit.register(_ignore)
    listen()


def resume() -> None:
    """The signal has been obeyed, and the process goes on: the next one counts again."""
    global _since
    _since = None


def listen() -> None:
    """Handles the signals that end a process, but for those that nohup or a shell told it to ignore."""
    for number in ENDING:
        if _is_main_thread() and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def _repeated(number: int) -> bool:
    """Whether another signal is being obeyed already; when that takes too long, the process ends here."""
    global _since
    if not _owned:
        return False
    now = time.monotonic()
    if _since is None:
        _since = now
        return False
    if now - _since > PATIENCE:
        os._exit(128 + number)
    return True


def _interrupt(number: int, _: Any) -> None:
    if not _repeated(number):
        raise KeyboardInterrupt


def _leave(number: int, _: Any) -> None:
    global received
    if _repeated(number):
        return
    received = signal.Signals(number)
    raise SystemExit(128 + number)


def of_ray() -> signal.Signals | None:
    """SIGTERM while Ray starts, when its own handler is the one that is there and ends the process by sys.exit(1)."""
    module = getattr(signal.getsignal(signal.SIGTERM), "__module__", None) or ""
    return signal.SIGTERM if module.startswith("ray.") else None


def deliver_again(swallowed: Any) -> None:
    """As sys.unraisablehook: what a signal raised inside a __del__ or a weakref's callback is lost there, so it comes again."""
    if issubclass(swallowed.exc_type, KeyboardInterrupt | SystemExit):
        resume()
        threading.Timer(0.1, os.kill, (os.getpid(), received or signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(swallowed)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """A block that tidies up in seconds: a second Ctrl-C does not cut it short."""
    numbers = (signal.SIGINT, *ENDING) if _is_main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def exit_with(status: int) -> None:
    """The work is done and its status known: a signal while the libraries shut down changes neither."""
    for number in (signal.SIGINT, *ENDING):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(status))


def _ignore() -> None:
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
