"""Defines errors that the command line prints without a traceback, because their messages suffice. Formats errors as text."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Characters that a terminal hides or interprets: control characters such as ESC, surrogates, and characters that reverse text.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def escape_controls(text: str, lines: bool = True) -> str:
    """Escapes the characters that a terminal would interpret in a text from rows, files or models.

    Args:
        lines: whether to keep line ends and tabs. Pass False for names of files and fields.
    """
    escaped = UNSEEN.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
    return escaped if lines else escaped.replace("\n", "\\n").replace("\t", "\\t")


class InputError(Exception):
    """The job file or the data is wrong. The command line prints the message and exits with status 2.

    The message says what is wrong, where it is, and what to do next. The message is safe to print even if it quotes unsafe text.

    Args:
        message: the text, without the key and its location.
        key: the job's key, `section.key`.
        where: `file:line` of that key.
        change: `section.key=value` that makes the same command work.
    """

    def __init__(self, message: str, key: str = "", where: str = "", change: str = ""):
        super().__init__(message, key, where, change)  # pickle stores an exception's `args`
        self.message, self.key, self.where, self.change = message, key, where, change

    def __str__(self) -> str:
        return escape_controls(": ".join(filter(None, (self.where, self.key, self.message))))


class Failure(Exception):
    """A run or a check failed. The command line prints the message and exits with status 1."""


class SelfCheckFailed(Failure):
    """A self-check found a wrong number. The run ends, because a restart would fail in the same way."""


class LeaseLost(Failure):
    """Another process owns the run's folder now. This process ends, because a restart would write into that folder."""


class OutOfMemory(Failure):
    """The process ran out of memory. The run ends, because a restart would fail in the same way.

    Args:
        phase: the phase of the run (`rollout`, `update`, ...), or "".
        detail: the library's error, shortened.
        remedy: the settings to change.
    """

    def __init__(self, phase: str, detail: str, remedy: str = ""):
        super().__init__(phase, detail, remedy)
        self.phase, self.detail, self.remedy = phase, detail, remedy

    def __str__(self) -> str:
        place = f" in phase {self.phase!r}" if self.phase else ""
        return "; ".join(filter(None, (f"out of memory{place} ({self.detail})", self.remedy)))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error of Python, torch or a CUDA library means out of memory."""
    phrases = ("allocate memory", "not enough memory", "out of memory", "_ALLOC_FAILED")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    )


@contextmanager
def blame_key(key: str) -> Iterator[None]:
    """Adds a job key to each InputError from this `with` block, unless the error has a key other than model.name_or_path."""
    try:
        yield
    except InputError as error:
        if error.key not in ("", "model.name_or_path"):
            raise
        raise InputError(error.message, key=key) from error


def in_brief(error: BaseException, limit: int = 250) -> str:
    """Returns type and message of an error on one line of at most `limit` characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"[:limit]


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and all errors that it wraps, outermost first, including errors that Ray wrapped.

    RayTaskError has `cause`. Errors of Ray Train have `controller_failure` or `worker_failures`, which have `_base_exc` (ray
    2.60, private). Remove these private names when Ray chains its exceptions by `__cause__`.
    """
    visited: set[int] = set()
    queue = [error]
    while queue:
        current = queue.pop(0)
        if current is None or id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        keys = ("cause", "_base_exc", "controller_failure", "__cause__")
        queue += [getattr(current, key, None) for key in keys]
        queue += getattr(current, "worker_failures", {}).values()


def error_summary(error: BaseException) -> str:
    """Returns one line with the type and message of the outermost InputError or Failure, or else of the innermost cause."""
    chain = list(causes_of(error))
    cause = next((e for e in chain if isinstance(e, (InputError, Failure))), chain[-1])
    message = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {message[0] if message else 'no message'}"[:1000]


def show_value(value: Any) -> str:
    """Returns a value as text for a message: shortened, on one line, with quotes around text."""
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return shorten("null" if value is None else text)


def shorten(text: str) -> str:
    """Returns a text for a message, truncated if it is long."""
    return escape_controls(text if len(text) <= 80 else text[:77] + "...", lines=False)
