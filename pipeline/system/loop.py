"""Runs coroutines in code that is not async."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine, which runs in another thread. The caller may have an event loop, as in a notebook.

    If the calling thread is interrupted, for example by Ctrl-C, the coroutine is canceled.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    try:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(loop.run_until_complete, task)
            try:
                return done.result()
            except BaseException:
                loop.call_soon_threadsafe(task.cancel)
                raise
    finally:
        loop.close()
