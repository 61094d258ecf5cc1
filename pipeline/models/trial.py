"""Runs code that came with a model (templates, tokenizers) in a child process, limited in time and memory."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import in_brief

SECONDS, BYTES = 5.0, 1 << 30  # limits of a trial


def in_child(work: Callable[[], str | None]) -> str | None:
    """Run `work` in a child process.

    Returns:
        What `work` returns, a problem in words or None; or, in words, that it raised, did not end, or ended its process.
    """
    fork = multiprocessing.get_context("fork")  # starting a new interpreter would take a second
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(work, sender), daemon=True)
    with warnings.catch_warnings():
        # Warns of forking with threads; the child runs Jinja or a tokenizer, and nothing else.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return f"did not end within {SECONDS:g} seconds"
        return receiver.recv()
    except EOFError:
        return "ended the process that did it"
    finally:
        child.kill()
        child.join()


def _answer(work: Callable[[], str | None], pipe: Any) -> None:
    """In the child: limit memory, run `work`, and send what it returns."""
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere (macOS) only time is limited
        in_use = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + BYTES, in_use + BYTES))
    try:
        answer = work()
    except BaseException as error:  # a panic of tokenizers is not an Exception
        answer = f"failed ({in_brief(error)})"
    pipe.send(answer)
