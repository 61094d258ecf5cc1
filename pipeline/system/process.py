"""Runs a command: sets up its terminal output, handles signals, and returns the exit status.

    sys.exit(process.run_main(main))

Ctrl-C raises KeyboardInterrupt, as usual in Python. SIGTERM and SIGHUP raise SystemExit. The exit status is 128 plus the number
of the signal, as in a shell. Within PATIENCE_S after the first signal, further signals are ignored. A later signal ends the
process immediately.
"""

import atexit
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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 20.0  # time that a run has to clean up after the first signal
received: signal.Signals | None = (
    None  # the last SIGTERM or SIGHUP, kept here because ray.get() loses the code of a SystemExit
)
_is_command = False
_since: float | None = None  # time.monotonic() of the first signal, or None if there was none


def run_main(main: Callable[[], int]) -> int:
    """Calls `main`, and returns the exit status of this process. Sets up streams and signal handlers first."""
    global _is_command
    _is_command = True
    # Ignores signals at the end of the exit, when Python restores the default handlers
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in SIGNALS])
    terminal.wrap_streams()
    # Hides bitsandbytes' warning about a missing optional package
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    sys.unraisablehook = _deliver_again
    listen()
    status = main()
    # If a signal arrives while libraries shut down, exits with the same status
    listen(lambda *_: os._exit(status))
    if deadline.abandoned:  # a normal exit would wait minutes for threads that have timed out
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def resume() -> None:
    """Makes this process treat the next signal as the first one. Call this function if the process continues after a signal."""
    global _since
    _since = None


def _on_signal(number: int, _: Any) -> None:
    """Raises KeyboardInterrupt or SystemExit for the first signal. Ends the process if a signal arrives after PATIENCE_S."""
    global received, _since
    now = time.monotonic()
    if _is_command and _since is not None:
        if now - _since > PATIENCE_S:
            os._exit(128 + number)
        return
    _since = now
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    received = signal.Signals(number)
    raise SystemExit(128 + number)


def listen(handler: Callable[..., Any] = _on_signal) -> None:
    """Installs a handler for SIGNALS. Skips signals that this process already ignores, for example because nohup started it."""
    for number in SIGNALS:
        if _is_main_thread() and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _deliver_again(unraisable: Any) -> None:
    """Sends a signal again if its exception was raised in a __del__ or a weakref callback, where Python ignores exceptions."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
        resume()
        threading.Timer(0.1, os.kill, (os.getpid(), received or signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignores SIGNALS during the `with` block, which should take only seconds."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS if _is_main_thread()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
