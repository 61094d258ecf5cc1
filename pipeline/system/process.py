"""The process of a command: its terminal, its signals, its exit status.

sys.exit(process.run(main))

Ctrl-C is a KeyboardInterrupt, as always in Python; SIGTERM and SIGHUP are a SystemExit. The exit status is 128 + the signal's
number, as in a shell. The first signal counts: while it is handled, others change nothing for PATIENCE_S. After that, the next
one ends the process immediately.
"""

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.errors import Failure
from pipeline.system import deadline, terminal

_exit = os._exit
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 20.0  # time that a run has to end in order
received: signal.Signals | None = None  # SIGTERM or SIGHUP; ray.get() loses the code of a SystemExit
_is_command = False
_since: float | None = None  # time.monotonic() of the signal that is being handled


def run(main: Callable[[], int]) -> int:
    """Runs `main` as the work of this process, and returns its exit status."""
    global _is_command
    _is_command = True
    for name in ("_exit", "abort", "execv", "execve"):  # os.execl and others call these
        _forbid(name)
    # The last function at the exit, after which Python restores the default handlers
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in SIGNALS])
    terminal.wrap_streams()
    # At import, bitsandbytes warns that an optional package is missing
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    sys.unraisablehook = _deliver_again
    listen()
    status = main()
    # A signal while the libraries shut down must not change the status
    listen(lambda *_: _exit(status))
    if deadline.abandoned:  # otherwise, the exit would wait for such a thread, for minutes
        sys.stdout.flush()
        sys.stderr.flush()
        _exit(status)
    return status


def _forbid(name: str) -> None:
    """Makes os.`name` raise Failure in this process, whose run it would end with any status, also 0. Children end as ever."""
    real, command, library = getattr(os, name), os.getpid(), os.execl.__code__.co_filename

    def end(*arguments: Any) -> Any:
        if os.getpid() != command:
            return real(*arguments)
        at = [frame for frame in traceback.extract_stack()[:-1] if frame.filename != library][-1]
        raise Failure(f"{at.filename}:{at.lineno} called os.{name}, which no run may do")

    setattr(os, name, end)


def resume() -> None:
    """Makes the next signal count again, because the process continues after this one."""
    global _since
    _since = None


def _on_signal(number: int, _: Any) -> None:
    """Ends the work of this process, unless another signal is being handled. If that takes too long, ends the process."""
    global received, _since
    now = time.monotonic()
    if _is_command and _since is not None:
        if now - _since > PATIENCE_S:
            _exit(128 + number)
        return
    _since = now
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    received = signal.Signals(number)
    raise SystemExit(128 + number)


def listen(handler: Callable[..., Any] = _on_signal) -> None:
    """Handles SIGNALS, except those that nohup or a shell told this process to ignore. Ray replaces the handlers."""
    for number in SIGNALS:
        if _is_main_thread() and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


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
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS if _is_main_thread()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
