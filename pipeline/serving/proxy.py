"""Limits the time for a request's headers in Ray Serve's proxy. uvicorn 0.54 and Ray Serve 2.60 have no limit for headers."""

from typing import Any

from uvicorn.protocols.http import auto

# Variable with the function that the proxy calls before it starts uvicorn
ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pipeline.serving.proxy:limit_headers"}


class TimedProtocol(auto.AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol with a keep-alive timer that also limits the time for headers.

    uvicorn stops this timer at the first byte of a request. This class stops the timer when the headers are complete.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        timer = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = timer

    def data_received(self, data: bytes) -> None:
        # Hides the timer from uvicorn, which would cancel it.
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_task = timer
        elif timer:
            timer.cancel()


def limit_headers() -> list[Any]:
    """Makes uvicorn use TimedProtocol in this process. Returns an empty list, because the proxy needs no middlewares."""
    auto.AutoHTTPProtocol = TimedProtocol
    return []
