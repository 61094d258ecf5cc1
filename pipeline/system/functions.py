"""Imports and hashes Python functions that a job names as `python:module:function`."""

import hashlib
import importlib
import inspect
import os
import pkgutil
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from pipeline.errors import InputError, in_brief
from pipeline.input_uri import InputURI


def digest_functions(sources: Iterable[str]) -> str:
    """Returns a SHA-256 digest of the source code of the functions' modules. Without source code, hashes the function's name."""
    digests = []
    for source in sources:
        try:
            text = inspect.getsource(importlib.import_module(InputURI.parse(source).name))
        except (OSError, TypeError):
            text = source
        digests.append(hashlib.sha256(text.encode()).hexdigest())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def import_function(source: str) -> Callable[..., Any]:
    """Returns the function of `python:module:function`. Raises InputError if the function cannot be imported."""
    ref = InputURI.parse(source)
    try:
        function = pkgutil.resolve_name(f"{ref.name}:{ref.function}")
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        in_import = frame.filename.startswith(("<frozen", pkgutil.__file__))
        place = "" if in_import else f", at {frame.filename}:{frame.lineno}"
        raise InputError(
            f"{source}: cannot be imported from {os.getcwd()} ({in_brief(error)}{place}); correct the name or the module, "
            "or add its folder to PYTHONPATH"
        ) from error
    if not callable(function):
        raise InputError(f"{source}: is not a function")
    return function  # type: ignore[no-any-return]
