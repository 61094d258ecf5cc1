"""What came with a model and may run for ever, or for all memory, is tried in a process that may be killed."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import in_brief

SECONDS, BYTES = 5.0, 1 << 30  # what a trial may take


def in_child(work: Callable[[], str | None]) -> str | None:
    """What `work` returns: a problem in words, or None; or that it did not end, or ended its process."""
    fork = multiprocessing.get_context("fork")  # a new interpreter would take a second
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(work, theirs), daemon=True)
    with warnings.catch_warnings():
        # Of forking beside threads: the child runs Jinja or a tokenizer, and nothing else.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return f"did not end within {SECONDS:g} seconds"
        return ours.recv()
    except EOFError:
        return "ended the process that did it"
    finally:
        child.kill()
        child.join()


def _answer(work: Callable[[], str | None], pipe: Any) -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere (macOS) time alone is limited
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, now + BYTES))
    try:
        answer = work()
    except BaseException as error:  # a panic of tokenizers is no Exception
        answer = f"failed ({in_brief(error)})"
    pipe.send(answer)
