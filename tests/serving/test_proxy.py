"""Tests requests with an incomplete body, on real sockets with a short limit."""

import asyncio
import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from pipeline.serving import app
from pipeline.serving.app import Server, endpoint
from tools.chaos.runs import until

LIMIT_S = 0.6
HEADERS = b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20\r\n"


@pytest.fixture(scope="module")
def port():
    """Starts uvicorn as Ray Serve's proxy does, with a handler that reads the body like `Server`. Returns the port."""

    @endpoint
    async def echo(server, request):
        body = await Server._body(server, request)
        await asyncio.sleep(body["sleep"])
        return JSONResponse(body)

    settings = SimpleNamespace(max_body_bytes=1000)
    counter = SimpleNamespace(labels=lambda *given: SimpleNamespace(inc=lambda: None))
    server = SimpleNamespace(
        serve=settings, check_sender=lambda request: None, metrics=SimpleNamespace(requests=counter)
    )

    async def asgi(scope, receive, send):
        response = await echo(server, Request({**scope, "route": SimpleNamespace(path="/score")}, receive))
        await response(scope, receive, send)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "REQUEST_S", LIMIT_S)
        config = uvicorn.Config(asgi, port=0, timeout_keep_alive=LIMIT_S, lifespan="off", log_config=None)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run)
        thread.start()
        until(lambda: running.started, "uvicorn")
        yield running.servers[0].sockets[0].getsockname()[1]
        running.should_exit = True
        thread.join()


def after(port, request):
    """Sends a request. Returns the response, and the seconds until the server closed the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
        one.sendall(request)
        began, received = time.monotonic(), b""
        with contextlib.suppress(ConnectionResetError):
            while more := one.recv(1000):
                received += more
        return received, time.monotonic() - began


def test_a_missing_body_gets_408_and_the_connection_is_closed(port):
    received, open_s = after(port, HEADERS + b"\r\n{")
    assert b" 408 " in received and b"no complete body within 0.6 s" in received
    assert open_s < LIMIT_S + 0.5
