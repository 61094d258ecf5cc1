"""The process of a command: its terminal, its signals, its exit status.

sys.exit(process.run(main))

Ctrl-C is a KeyboardInterrupt, as always in Python; SIGTERM and SIGHUP are a SystemExit. The exit status is 128 + the signal's
number, as in a shell. Ray installs its own handlers; `listen` restores these.

The first signal counts: while it is handled, others change nothing for PATIENCE_S. After that, the next one ends the process
immediately.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.system import deadline, terminal

ENDING = (signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 20.0  # time that a run has to end in order
received: signal.Signals | None = None  # a signal of ENDING; ray.get() loses the code of a SystemExit
_is_command = False
_since: float | None = None  # time.monotonic() of the signal that is being handled


def run(main: Callable[[], int]) -> int:
    """Runs `main` as the work of this process, and returns its exit status."""
    global _is_command
    _is_command = True
    terminal.wrap_streams()
    # At import, it warns that an optional package is missing
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _deliver_again
    listen()
    status = main()
    for number in (signal.SIGINT, *ENDING):  # a signal while the libraries shut down changes no status
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(status))
    if deadline.abandoned:  # else the exit would wait for it: pyarrow does, for minutes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def listen() -> None:
    """Handles the signals that end a process, except those that nohup or a shell told it to ignore."""
    for number in ENDING:
        if _is_main_thread() and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def resume() -> None:
    """Makes the next signal count again, because the process continues after this one."""
    global _since
    _since = None


def _repeated(number: int) -> bool:
    """Returns True if another signal is already being handled. Ends the process if that takes too long."""
    global _since
    if not _is_command:
        return False
    now = time.monotonic()
    if _since is None:
        _since = now
        return False
    if now - _since > PATIENCE_S:
        os._exit(128 + number)
    return True


def _interrupt(number: int, _: Any) -> None:
    if not _repeated(number):
        raise KeyboardInterrupt


def _leave(number: int, _: Any) -> None:
    global received
    if not _repeated(number):
        received = signal.Signals(number)
        raise SystemExit(128 + number)


def of_ray() -> signal.Signals | None:
    """Returns SIGTERM if Ray's own handler is active, which it is while Ray starts: it ends the process by sys.exit(15)."""
    module = getattr(signal.getsignal(signal.SIGTERM), "__module__", None) or ""
    return signal.SIGTERM if module.startswith("ray.") else None


def _deliver_again(swallowed: Any) -> None:
    """Repeats a signal whose exception Python dropped in a weakref's callback or a __del__: SQLAlchemy and MLflow have many."""
    if issubclass(swallowed.exc_type, KeyboardInterrupt | SystemExit):
        resume()
        threading.Timer(0.1, os.kill, (os.getpid(), received or signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(swallowed)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignores signals in the block, which cleans up within seconds."""
    numbers = (signal.SIGINT, *ENDING) if _is_main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
