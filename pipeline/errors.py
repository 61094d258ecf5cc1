"""Errors that speak for themselves: the command line prints their message. All others keep their traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """The job file or the data is wrong; the command line prints the message and exits with status 2.

    The message says what was wrong, the value found, where it stands (`file:line` or `section.key`),
    what is expected, and what to type next.
    """


class Failure(Exception):
    """Something that was to be proved does not hold; the command line prints the message and exits with status 1."""


@contextmanager
def about(key: str) -> Iterator[None]:
    """Begins the InputErrors from within with the key of the job that they are about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{key}: {str(error).removeprefix('model.name_or_path: ')}") from error


def in_brief(error: BaseException, most: int = 250) -> str:
    """Type and message of an error on one line, for an InputError about what a library raised."""
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"[:most]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that is inside it, outermost first: what Ray wrapped around it on its way from a worker.

    RayTaskError holds `cause`; Ray Train's errors hold `controller_failure` or `worker_failures`, each of them `_base_exc`.
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
