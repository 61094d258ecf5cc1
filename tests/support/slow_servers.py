"""Servers on loopback that answer as no good one does."""

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def silent():
    """HOST:PORT where connections are accepted, and nothing is ever answered."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def answering(status, body, kind="application/json", at=None):
    """HOST:PORT of a server with one answer for everything; `at` gives other bodies to some paths."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = (at or {}).get(self.path.partition("?")[0])
            said = (found if found is not None else body).encode()
            self.send_response(200 if found is not None else status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
