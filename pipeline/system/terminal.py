"""Decides which lines a command shows on the terminal, and which go to the log of its run.

say("registered rlhf-sft v1")            is shown; with -q only if it is part of the result
show_progress("train  16/48", left=6.0)  rewrites one line; if stdout is no terminal, prints a line every INTERVAL_S
print("loading the model")               is a detail: if the run has a log, it goes only there, unless -v is set
print("warning: ...")                    is shown, except with -q

`say` and `show_progress` put a marker character in front of each line, because the driver gets the lines of Ray workers as plain
text. A process that is not a command (a notebook, a test) shows all lines except live ones.
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

INTERVAL_S = 30.0  # time between two lines of progress if stdout is not a terminal
SHOWN, RESULT, LIVE = "\x01", "\x02", "\x03"  # marker characters, which start a line
QUIET, NORMAL, VERBOSE = -1, 0, 1
FLAGS = {"-q": QUIET, "--quiet": QUIET, "-v": VERBOSE, "--verbose": VERBOSE}
# Matches lines of `print` that are shown without -v
IMPORTANT = re.compile(r"\s*(warning|error|note)\b")
# {code of a character: escape that is shown instead}. Includes control characters except tab, line feed and return, because text
# from a row must not control the terminal, and lone surrogates, because UTF-8 cannot encode them.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), 11, 12, *range(14, 32), *range(127, 160))}
CONTROL |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
WIPE = "\r\x1b[K"  # escape sequence that erases the line of the cursor

_of_worker = False  # whether this process is a Ray worker, whose stdout Ray forwards to the driver


def mark_lines() -> None:
    """Makes `say` and `show_progress` add marker characters in this process. Ray workers call this function."""
    global _of_worker
    _of_worker = True


def say(text: str = "", result: bool = False) -> None:
    """Prints lines that are shown without -v. With -q, prints the lines only if `result` is true."""
    mark = (RESULT if result else SHOWN) if _of_worker or sys.stdout is screen else ""
    print("\n".join(mark + line for line in text.split("\n")), flush=True)


def show_progress(text: str, left: float | None = None, more: str = "") -> None:
    """Replaces the progress line at the bottom of the terminal.

    Args:
        left: estimated seconds until the work is done. The last progress line with this value stays on the terminal.
        more: text after the remaining time. A narrow terminal cuts the text off.
    """
    if _of_worker or sys.stdout is screen:
        print(LIVE, "" if left is None else round(left), LIVE, text, LIVE, more, sep="", flush=True)


def marked(line: str) -> bool:
    return line[:1] in (SHOWN, RESULT, LIVE)


def duration(seconds: float) -> str:
    """Returns a duration as text, for example 2 h 03 min, 1 min 05 s, or 44 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class Output:
    """A text stream that removes credentials and escapes control characters. If writing fails, it discards all later text."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Shows a text, and adds it to the log of the run. This method is for stderr, whose lines are all shown."""
        with screen.lock:
            screen.wipe()
            self.put(clean(text))
            screen.record(clean(text))
        return len(text)

    def flush(self) -> None:
        self.put("")

    def put(self, text: str) -> None:
        """Writes and flushes text. If writing fails (a closed pipe, a full disk), the run continues without output."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self.stream.fileno())
            os.close(devnull)
            if self is sys.stdout and not isinstance(error, BrokenPipeError):
                print(f"warning: cannot write to stdout any more: {error.strerror}", file=sys.stderr)


def clean(text: str) -> str:
    """Removes credentials from a text, and escapes control characters. Also removes Ray's sequence that resets colors."""
    return without_secrets(text.replace("\x1b[0m", "")).translate(CONTROL)


class Screen(Output):
    """The stdout of a command. Handles the progress line, and writes to the log of the run."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self.level = NORMAL
        self.lock = threading.RLock()
        self.log: Any = None
        self.pending = threading.local()  # for each thread, its text since its last newline
        self.row = False  # whether the terminal's last line is a progress line, which the next line replaces
        self.listing = False  # whether the next indented lines belong to a shown line that ended with a colon
        self.progress = ""  # a progress line that stays on the terminal if another line follows
        self.last = time.monotonic()  # time of the last line that stayed on the terminal

    def write(self, text: str) -> int:
        pending = getattr(self.pending, "text", "") + text
        self.pending.text = ""
        with self.lock:
            if self.log is None and not marked(pending):  # without a log, shows incomplete lines immediately
                self.show(pending, end="")
            else:
                *lines, self.pending.text = pending.split("\n")
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

    def _progress(self, seconds_left: str, text: str, suffix: str) -> None:
        if self.level != NORMAL or not self.log:
            return
        if seconds := float(seconds_left or 0):
            text += f"  {duration(seconds)} left"
        if suffix:
            text += f"  {suffix}"
        if seconds_left:
            self.progress = text
        if not self._rewrite(text) and time.monotonic() - self.last >= INTERVAL_S:
            self.progress = ""
            self.show(text)

    def _rewrite(self, text: str) -> bool:
        """Shows a line that the next line will replace. Returns False if stdout is not a terminal."""
        if not self.stream.isatty():
            return False
        self.put(WIPE + fit_line(text))
        self.row = True
        return True

    def show(self, text: str, end: str = "\n") -> None:
        """Shows a line that stays on the terminal. If the progress line also stays, the new line is shown below it."""
        self.wipe()
        self.last = time.monotonic()
        self.put(clean(text) + end)

    def wipe(self) -> None:
        """Erases the progress line. If `progress` is set, prints that text with a line break, so that it stays visible."""
        row, progress, self.row, self.progress = self.row, self.progress, False, ""
        if row:
            self.put(WIPE)
        if progress:
            self.put((fit_line(progress) if row else progress) + "\n")

    def record(self, text: str) -> None:
        """Adds text to the log of the run, if one is open."""
        if self.log:
            try:
                self.log.write(text)
            except OSError as error:
                self.log = None
                print(f"warning: cannot write the log of the run any more: {error.strerror}", file=sys.stderr)


def fit_line(text: str) -> str:
    """Truncates a line at a double space, which separates its fields, so that the line and an echoed ^C fit the terminal."""
    visible = text[: shutil.get_terminal_size().columns - len("^C") - 1]
    return visible if visible == text else visible.rpartition("  ")[0].rstrip() or visible


screen = Screen(sys.stdout)


def wrap_streams() -> None:
    """Replaces sys.stdout by a Screen, and sys.stderr by an Output."""
    # sys.stdout is None if a shell started this process with `>&-`.
    sys.stdout, sys.stderr = (file or open(os.devnull, "w") for file in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # e.g. stdout is not UTF-8
    screen.stream = sys.stdout
    sys.stdout, sys.stderr = screen, Output(sys.stderr)


@contextlib.contextmanager
def output_logged() -> Iterator[Callable[[str], None]]:
    """Sends the output of the `with` block to the log of the run. Yields a function that opens log.txt in the run's folder.

    Until log.txt is open, the output is kept in memory, because a job with a mistake must not create a folder.
    """
    if sys.stdout is not screen or screen.log:
        yield lambda folder: None
        return
    with contextlib.ExitStack() as stack:
        screen.log = buffer = io.StringIO()
        stack.callback(setattr, screen, "log", None)

        def into(folder: str) -> None:
            file = stack.enter_context(storage.appended(storage.join(folder, run_folder.LOG)))
            stack.callback(setattr, screen, "log", None)
            with screen.lock:
                file.write(buffer.getvalue())
                screen.log = file

        try:
            yield into
        except BaseException as error:
            screen.record(clean("".join(traceback.format_exception(error))))
            raise
