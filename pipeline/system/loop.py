"""Runs coroutines from synchronous code."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in another thread and returns its result. The caller may have its own event loop, as in a notebook.

    If the calling thread is interrupted, for example by Ctrl-C, the coroutine is canceled.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    try:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(loop.run_until_complete, task)
            try:
                return future.result()
            except BaseException:
                loop.call_soon_threadsafe(task.cancel)
                raise
    finally:
        loop.close()
