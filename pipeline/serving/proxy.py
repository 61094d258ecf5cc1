"""A limit of time for the headers of a request in Ray Serve's proxy, because uvicorn 0.54 and Ray Serve 2.60 have none."""

from typing import Any

from uvicorn.protocols.http import auto

# Names the function that the proxy calls before it starts uvicorn
ENVIRONMENT = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pipeline.serving.proxy:limit_headers"}


class TimedProtocol(auto.AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, which also closes a connection whose headers take longer than `timeout_keep_alive`."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(self.timeout_keep_alive / 2, self._look, None)

    def _look(self, before: tuple[Any] | None) -> None:
        """Closes the connection if it already waited for the same headers when this was called last."""
        if self.transport.is_closing():
            return
        # Before the first byte of another request, uvicorn has its own timer.
        waits = (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None
        now = (self.cycle,) if waits else None
        if now and now == before:
            self.transport.close()
        else:
            self.loop.call_later(self.timeout_keep_alive / 2, self._look, now)


def limit_headers() -> list[Any]:
    """Makes uvicorn use TimedProtocol in this process. Returns no middlewares."""
    auto.AutoHTTPProtocol = TimedProtocol
    return []
