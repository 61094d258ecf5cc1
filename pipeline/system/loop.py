"""Coroutines in a program that is not async."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine. It runs in another thread, because this one may run an event loop, as in a notebook.

    If this thread is interrupted, for example by Ctrl-C, the coroutine is cancelled.
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
