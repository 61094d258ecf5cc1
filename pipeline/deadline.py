"""The first contact with a bucket, a hub or a server has ten seconds: one that never answers is an error, not a hang."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

SECONDS = 10.0
left_behind: list[threading.Thread] = []  # with calls that nobody waits for any more


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """`call(*arguments)`. Libraries retry for up to minutes and not all of them can be told otherwise; a call that takes
    longer is left behind in its thread, which does not keep the process from ending.

    Raises:
        TimeoutError: when there is no answer within SECONDS.
    """
    found: Future[Any] = Future()

    def work() -> None:
        try:
            found.set_result(call(*arguments))
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=work, daemon=True, name="first contact")
    thread.start()
    try:
        return found.result(timeout=SECONDS)
    except TimeoutError:
        if found.done():
            raise  # the call's own
        left_behind.append(thread)
        raise TimeoutError(f"no answer within {SECONDS:.0f} seconds") from None
