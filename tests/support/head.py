"""A separate Ray cluster for a test, with dashboard, jobs and token, and a proxy whose connections can be cut."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tools.chaos.runs import answers, free_port, until

TOKEN = "0123456789abcdef" * 2


class Head:
    """Runs a Ray head as a context manager. With `--block`, killing one process ends this cluster, and no other Ray.

    Args:
        options: additional options of `ray start`.
        environment: additional environment variables of the head.
    """

    def __init__(self, *options: str, **environment: str) -> None:
        self.port, gcs = free_port(), free_port()
        self.address, self.gcs = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{gcs}"
        self.options = [f"--dashboard-port={self.port}", f"--port={gcs}", *options]
        self.environment = environment
        # A short path, because the length of socket paths is limited.
        self.folder = Path(tempfile.mkdtemp(prefix="rh"))
        self.token = self.folder / "token"

    def __enter__(self) -> "Head":
        self.token.write_text(TOKEN)
        environment = os.environ | {
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
        }
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "MLFLOW_TRACKING_URI", "PYTHONPATH"):
            environment.pop(name, None)
        environment |= self.environment
        command = [str(Path(sys.prefix) / "bin/ray"), "start", "--head", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address=127.0.0.1", *self.options]
        for name in ("dashboard-agent-listen-port", "ray-client-server-port"):
            command.append(f"--{name}={free_port()}")
        command += [f"--temp-dir={self.folder}", "--num-cpus=4", "--object-store-memory=150000000"]
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        nodes, token = f"{self.address}/api/v0/nodes?detail=1", f"Bearer {TOKEN}"
        try:
            until(lambda: b"ALIVE" in answers(nodes, Authorization=token), "the head", every=0.5)
        except TimeoutError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, 15)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
        shutil.rmtree(self.folder, ignore_errors=True)


class Proxy:
    """A proxy to a Ray head. `cut` closes the proxy's connections. The proxy refuses new connections until `mend` is called."""

    def __init__(self, port: int):
        self.target, self.connections, self.broken = port, [], False
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            if self.broken:
                client.close()
                continue
            upstream = socket.create_connection(("127.0.0.1", self.target))
            self.connections += [client, upstream]
            for source, sink in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self.broken = True
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self.broken = False
