"""Deadlines for calls that may not answer: the first contact with a bucket, a hub or a server."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SECONDS = 10.0
abandoned: list[threading.Thread] = []  # threads of calls that have timed out


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `call(*arguments)`. Libraries retry for up to minutes, and not all of them have a setting for it.

    Raises TimeoutError after SECONDS. The call then continues in its thread, which does not keep the process from ending.
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, daemon=True, name="first contact")
    thread.start()
    try:
        return future.result(timeout=SECONDS)
    except TimeoutError:
        if future.done():
            raise  # the call's own
        abandoned.append(thread)
        raise TimeoutError(f"no answer within {SECONDS:.0f} seconds") from None
