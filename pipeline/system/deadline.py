"""A deadline for calls that may not return, such as the first contact with a bucket, a hub or a server."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SECONDS = 10.0  # time that a call may take
abandoned: list[threading.Thread] = []  # threads of calls that have timed out


def call_with_deadline(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `call(*arguments)`, or raises TimeoutError after SECONDS.

    A deadline is needed because libraries may retry for minutes, some without a setting that prevents it. After a timeout, the
    call continues in a daemon thread.
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
            raise  # `call` itself raised the TimeoutError
        abandoned.append(thread)
        raise TimeoutError(f"no answer within {SECONDS:.0f} seconds") from None
