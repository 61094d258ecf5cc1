"""What a command shows on the terminal, and what goes to the log of its run. Only this file decides.

say("registered rlhf-sft v1")          shown; with -q only if it is part of the result
live("train  16/48 steps", left=6.0)   a line that is rewritten; if stdout is no terminal, one every INTERVAL_S
print("loading the model")             a detail: while a run's log is open, it goes there and is only shown with -v
print("warning: ...")                  always shown, like everything on stderr; -q hides it

Lines have a mark on their way through stdout, so that lines of Ray's workers keep theirs. Other processes (a notebook, a
test) show all lines as they are, except live lines.
"""

import contextlib
import io
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from pipeline import run_folder
from pipeline.system import storage
from pipeline.system.credentials import without_secrets

INTERVAL_S = 30.0  # time between two lines of progress if stdout is no terminal
SHOWN, RESULT, LIVE = "\x01", "\x02", "\x03"  # the first character of a line
QUIET, NORMAL, VERBOSE = -1, 0, 1
FLAGS = {"-q": QUIET, "--quiet": QUIET, "-v": VERBOSE, "--verbose": VERBOSE}
# Details that are shown without -v
IMPORTANT = re.compile(r"\s*(warning|error|note)\b")
# Control characters except tab, line feed and return, so that a row's text cannot steer the terminal; halves of surrogates,
# which no file of UTF-8 holds.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))}
CONTROL |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
WIPE = "\r\x1b[K"

_of_worker = False  # whether Ray brings this process's stdout to a command


def mark_lines() -> None:
    """Makes `say` and `live` mark their lines, because this is a worker of Ray."""
    global _of_worker
    _of_worker = True


def say(text: str = "", result: bool = False) -> None:
    """Prints lines. With -q, only lines of the result are shown."""
    mark = (RESULT if result else SHOWN) if _of_worker or sys.stdout is screen else ""
    print("\n".join(mark + line for line in text.split("\n")), flush=True)


def live(text: str, left: float | None = None, more: str = "") -> None:
    """Prints the line of progress, in place of the one before.

    Args:
        left: seconds until this is done. The last such line stays on the terminal.
        more: what follows the time left, and may be truncated.
    """
    if _of_worker or sys.stdout is screen:
        print(LIVE, "" if left is None else round(left), LIVE, text, LIVE, more, sep="", flush=True)


def marked(line: str) -> bool:
    return line[:1] in (SHOWN, RESULT, LIVE)


def duration(seconds: float) -> str:
    """Returns a time for people, for example 2 h 03 min, 1 min 05 s, or 44 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Output:
    """A text stream that shows neither credentials nor terminal escapes, and ignores errors if it can no longer be written."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes to stderr: all of it is shown."""
        with screen.lock:
            screen.wipe()
            self.put(clean(text))
            screen.record(clean(text))
        return len(text)

    def flush(self) -> None:
        self.put("")

    def put(self, text: str) -> None:
        """Writes and flushes. A long run continues if `| head -1` has ended, or the disk of its output is full."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            if self is sys.stdout and not isinstance(error, BrokenPipeError):
                print(f"warning: cannot write to stdout any more: {error.strerror}", file=sys.stderr)


def clean(text: str) -> str:
    """Returns a text without credentials and escapes. Ray resets the colors at its end, which needs no trace."""
    return without_secrets(text.replace("\x1b[0m", "")).translate(CONTROL)


class Screen(Output):
    """The stdout of a command. Its last line may be rewritten, and a run's details go to its log."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self.level = NORMAL
        self.lock = threading.RLock()
        self.log: Any = None
        self.begun = threading.local()  # each thread's line that has no newline yet
        self.row = False  # whether the last line of the terminal will be rewritten
        self.listing = False  # whether the lines of an important list follow
        self.progress = ""  # the last live line, which stays if something else is shown after it
        self.last = time.monotonic()  # time of the last line of progress

    def write(self, text: str) -> int:
        begun = getattr(self.begun, "text", "") + text
        self.begun.text = ""
        with self.lock:
            if self.log is None and not marked(begun):  # parts of lines may pass too
                self.show(begun, end="")
            else:
                *lines, self.begun.text = begun.split("\n")
                for line in lines:
                    self._line(line)
        return len(text)

    def _line(self, line: str) -> None:
        mark, text = (line[0], line[1:]) if marked(line) else ("", line)
        if mark == LIVE:
            self._progress(*map(clean, text.split(LIVE)))
            return
        text = clean(text)
        self.record(text + "\n")
        important = mark == SHOWN or bool(IMPORTANT.match(text) or (self.listing and text.startswith("  ")))
        self.listing = important and (text.endswith(":") or self.listing)
        if mark == RESULT or self.level > (QUIET if important else NORMAL):
            self.show(text)
        elif self.level == NORMAL and text:
            self._rewrite(text)

    def _progress(self, left: str, text: str, more: str) -> None:
        if self.level != NORMAL or not self.log:  # else the details are shown
            return
        if seconds := float(left or 0):
            text += f"  {duration(seconds)} left"
        if more:
            text += f"  {more}"
        if left:
            self.progress = text
        if not self._rewrite(text) and time.monotonic() - self.last >= INTERVAL_S:
            self.progress = ""
            self.show(text)

    def _rewrite(self, text: str) -> bool:
        """Shows a line that the next one replaces. Returns False if stdout is no terminal."""
        if not self.stream.isatty():
            return False
        self.put(WIPE + fitted(text))
        self.row = True
        return True

    def show(self, text: str, end: str = "\n") -> None:
        """Shows a line that stays, below the last line of progress."""
        self.wipe()
        self.last = time.monotonic()
        self.put(clean(text) + end)

    def wipe(self) -> None:
        """Ends the line of progress, if there is one."""
        row, progress, self.row, self.progress = self.row, self.progress, False, ""
        if row:
            self.put(WIPE)
        if progress:
            self.put((fitted(progress) if row else progress) + "\n")

    def record(self, text: str) -> None:
        """Adds text to the log of the run, if one is open."""
        if self.log:
            try:
                self.log.write(text)
            except OSError as error:
                self.log = None
                print(f"warning: cannot write the log of the run any more: {error.strerror}", file=sys.stderr)


def fitted(text: str) -> str:
    """Returns the part of a line that fits the terminal, with space for an echoed ^C. Does not split a number."""
    cut = text[: shutil.get_terminal_size().columns - len("^C") - 1]
    return cut if cut == text else cut.rpartition("  ")[0].rstrip() or cut


screen = Screen(sys.stdout)


def wrap_streams() -> None:
    """Makes stdout and stderr of a process with a command line a Screen and an Output."""
    # A process that was started with `>&-` has no stdout
    sys.stdout, sys.stderr = (one or open(os.devnull, "w") for one in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # no UTF-8, a lone surrogate
    screen.stream = sys.stdout
    sys.stdout, sys.stderr = screen, Output(sys.stderr)


@contextlib.contextmanager
def logged() -> Iterator[Callable[[str], None]]:
    """Sends the details of the block to a log. Yields a function that opens log.txt in a folder.

    Until then the details stay in memory, because a run with a mistake in its job leaves no folder.
    """
    if sys.stdout is not screen or screen.log:
        yield lambda folder: None
        return
    with contextlib.ExitStack() as stack:
        screen.log = early = io.StringIO()
        stack.callback(setattr, screen, "log", None)

        def into(folder: str) -> None:
            file = stack.enter_context(storage.appended(storage.join(folder, run_folder.LOG)))
            stack.callback(setattr, screen, "log", None)
            with screen.lock:
                file.write(early.getvalue())
                screen.log = file

        try:
            yield into
        except BaseException as error:
            screen.record(clean("".join(traceback.format_exception(error))))
            raise
