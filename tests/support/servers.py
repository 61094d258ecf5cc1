"""Fake servers on loopback, as context managers. Some of the servers misbehave on purpose."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """An HTTP request handler that logs nothing."""

    def log_message(self, *_):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, status, body, kind="text/plain", **headers):
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """A server that accepts many connections at once. A client whose connection is not accepted tries again after a second."""

    request_queue_size = 64


@contextlib.contextmanager
def listening(handler, **facts):
    """Starts a server. Stores the keyword arguments and the server's address as attributes of the server."""
    with Server(("127.0.0.1", 0), handler) as server:
        vars(server).update(facts, address=f"http://127.0.0.1:{server.server_port}")
        # by default, `shutdown` waits up to half a second
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextlib.contextmanager
def silent():
    """Yields HOST:PORT of a server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def answering(status, body, kind="application/json", at=None):
    """Yields HOST:PORT of a server that responds with `at[path]` to the paths in `at`, and with `body` to all other paths."""

    class Same(Handler):
        def answer(self):
            self.body()
            reply = (at or {}).get(self.path.partition("?")[0])
            self.send(status if reply is None else 200, (body if reply is None else reply).encode(), kind)

        do_GET = do_POST = answer

    with listening(Same) as server:
        yield server.address.removeprefix("http://")
