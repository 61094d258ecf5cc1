"""Sets a time limit for calls that may hang, such as the first request to a bucket, the Hub or a server."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SECONDS = 10.0  # maximum time that a call may take
abandoned: list[threading.Thread] = []  # threads of calls that have timed out


def call_with_deadline(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `call(*arguments)`. Raises TimeoutError if the call takes longer than SECONDS.

    Some libraries retry for minutes and have no setting for a shorter limit. After a timeout, the call continues in a daemon
    thread.
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
