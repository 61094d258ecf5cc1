"""Errors that speak for themselves: the command line prints their message. All others keep their traceback."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# What a terminal obeys instead of showing it: control characters (ESC begins most of them), characters that reverse or
# hide text, halves of surrogate pairs.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def visible(text: str, lines: bool = True) -> str:
    """Text of rows, files and models as a terminal may show it: what it would obey is written as `\\x1b`, `\\u202e`.

    `lines` says whether line ends and tabs stay; the name of a file or a field is not to begin a line of its own.
    """
    shown = UNSEEN.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
    return shown if lines else shown.replace("\n", "\\n").replace("\t", "\\t")


class InputError(Exception):
    """The job file or the data is wrong; the command line prints the message and exits with status 2.

    It says what was wrong, the value found, where it stands, what is expected, and what to type next. What it quotes from
    outside cannot reach the terminal as a command to it.

    Args:
        message: all but the following two.
        key: of the job, `section.key`.
        where: `file:line` of that key.
    """

    def __init__(self, message: str, key: str = "", where: str = ""):
        super().__init__(message, key, where)  # all of it: an exception is pickled by its args
        self.message, self.key, self.where = message, key, where

    def __str__(self) -> str:
        return visible(": ".join(filter(None, (self.where, self.key, self.message))))


class Failure(Exception):
    """Something that was to be proved does not hold; the command line prints the message and exits with status 1."""


@contextmanager
def about(key: str) -> Iterator[None]:
    """Says which key of the job the InputErrors from within are about; what loads a model takes it for the base."""
    try:
        yield
    except InputError as error:
        if error.key not in ("", "model.name_or_path"):
            raise
        raise InputError(error.message, key=key) from error


def in_brief(error: BaseException, most: int = 250) -> str:
    """Type and message of an error on one line, for an InputError about what a library raised."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"[:most]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that is inside it, outermost first: what Ray wrapped around it on its way from a worker.

    RayTaskError holds `cause`; Ray Train's errors hold `controller_failure` or `worker_failures`, each of them `_base_exc`
    (ray 2.60, private). Remove those when Ray chains its exceptions by `__cause__`.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [
            getattr(one, key, None) for key in ("cause", "_base_exc", "controller_failure", "__cause__")
        ]
        waiting += getattr(one, "worker_failures", {}).values()


def summary(error: BaseException) -> str:
    """One line: type and message of what is at the bottom of an error."""
    last = list(causes(error))[-1]
    message = str(last).strip().splitlines()
    return f"{type(last).__name__}: {message[0] if message else 'no message'}"[:1000]
