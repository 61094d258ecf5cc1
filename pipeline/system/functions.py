"""Python functions that a job names, `python:module:function`: imported so that what is wrong with them is said at once."""

import hashlib
import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.errors import InputError, in_brief
from pipeline.system import deadline

IMPORT_SECONDS = 15  # for the module of a Python function


def parts(source: str) -> tuple[str, str]:
    """(module, function) of `python:module:function`."""
    module, _, function = source.removeprefix("python:").partition(":")
    return module, function


def digest(source: str) -> str:
    """SHA-256 of the function's module: with it changes what it returns. Where it has no source, of its name."""
    try:
        text = inspect.getsource(importlib.import_module(parts(source)[0]))
    except (OSError, TypeError):
        text = source
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(sources: Iterable[str]) -> str:
    """That of one function, or of several together."""
    several = [digest(source) for source in sources]
    return several[0] if len(several) == 1 else hashlib.sha256("".join(several).encode()).hexdigest()


def imported(source: str) -> Callable[..., Any]:
    """The function of `python:module:function`.

    Raises:
        InputError: when there is no such module, its import raises (SystemExit too) or takes longer than IMPORT_SECONDS, or
            it has no such function.
    """
    name, function = parts(source)
    module = _module(source, name)
    found = getattr(module, function, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    there = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
    raise InputError(f"{source}: {name} has no function {function!r} (functions there: {there})")


def signature(source: str, function: Callable[..., Any], of: str) -> inspect.Signature:
    """The signature of a function that was imported; `of` says in words which parameters one is expected to have.

    Raises:
        InputError: when it cannot be read, as of some functions written in C.
    """
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{source}: its parameters cannot be read ({error}); wrap it in a Python function of {of}"
        ) from error


def _module(source: str, name: str) -> Any:
    late = f"{source}: its module was not imported within {IMPORT_SECONDS} seconds; move slow work out of the module, into the function"
    try:
        with deadline.limited(IMPORT_SECONDS, InputError(late)):
            return importlib.import_module(name)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):  # it, or a package above it
            raise InputError(
                f"{source}: no module {name!r} can be imported from {os.getcwd()} (PYTHONPATH adds folders)"
            ) from error
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename}:{at.lineno}"
        if isinstance(error, SyntaxError):
            where = f"{error.filename or name}:{error.lineno or '?'}"
        raise InputError(
            f"{source}: importing {name!r} ended with {in_brief(error)}, at {where}; fix it there"
        ) from error
