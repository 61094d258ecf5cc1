"""A Ray cluster and an MLflow server on several hosts of hosts.py. All hosts except the first can join and leave the cluster.

    with cluster_of(3) as cluster:          # cluster.folder is shared by all hosts
        cluster.join(cluster.hosts[1], "rollouts")
        cluster.leave(cluster.hosts[1])

Ray's processes are real. Each host has its own network, process table and /tmp. `leave` kills all processes of a host at once.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from hosts import Host, Hosts

from tools.chaos.runs import answers, until

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 400  # seconds after which any wait fails


def environment_with(**more: str) -> dict[str, str]:
    """Returns this process's environment with Ray's commands and `more`, but without addresses of servers."""
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}:/usr/sbin"
    found = os.environ | {"PATH": path} | more
    for name in {"RAY_ADDRESS", "MLFLOW_TRACKING_URI", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"} - more.keys():
        found.pop(name, None)
    return found


class Process(subprocess.Popen):
    """A command whose output is printed and also kept in `lines`."""

    def __init__(self, *command: str, **more):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        super().__init__(command, text=True, **pipes, **more)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.stdout:
            print("   " + line, end="", flush=True)
            self.lines.append(line)

    def end(self, seconds: float = PATIENCE) -> tuple[int, str]:
        """Waits for the end of the process. Returns (exit status, output)."""
        status = self.wait(seconds)
        self.reader.join(10)
        return status, "".join(self.lines)


class Cluster:
    """A cluster whose first host has the label `head`.

    Args:
        more: environment variables of all processes on the hosts.
    """

    def __init__(self, hosts: Hosts, folder: Path, **more: str):
        self.hosts, self.folder, head = hosts, folder, hosts[0]
        ours = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT), "HOME": str(folder),
        }  # fmt: skip
        self.environment = environment_with(**(ours | more))
        self.address, self.mlflow = f"{head.ip}:6379", f"http://{head.ip}:5000"
        options = ["--head", "--port=6379", "--num-cpus=2", "--include-dashboard=False"]
        self._ray(head, "head", *options)
        server = ["mlflow", "server", "--host", "0.0.0.0", "--allowed-hosts", "*", "--port", "5000"]
        server += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        server += ["--artifacts-destination", str(folder / "artifacts")]
        with open(folder / "mlflow.log", "w") as log:
            self.server = subprocess.Popen(head.here(*server), env=self.environment, stdout=log, stderr=log)
        until(lambda: answers(f"{self.mlflow}/health"), f"{self.mlflow}; see {folder}/mlflow.log", PATIENCE)

    def _ray(self, host: Host, label: str, *more: str) -> None:
        command = ["ray", "start", f"--node-ip-address={host.ip}", f"--labels=for={label}"]
        command = host.here("env", "-C", str(ROOT), *command, "--object-store-memory=100000000", *more)
        # by default, a node must start within 30 s, which is too short on a busy machine
        for _ in range(3):
            status, output = Process(*command, env=self.environment).end()
            if status == 0:
                return
            self.leave(host)
        raise RuntimeError(output)

    def join(self, host: Host, label: str) -> None:
        self._ray(host, label, f"--address={self.address}", "--num-cpus=1")

    def leave(self, host: Host) -> None:
        """Kills all processes of the host at the same time, except its process 1."""
        subprocess.run(host.here("bash", "-c", "kill -9 -1"))

    def start(self, host: Host, *command: str) -> Process:
        """Starts a command on a host, as a driver of the cluster and in the repository's folder."""
        environment = self.environment | {"RAY_ADDRESS": self.address}
        return Process(*host.here("env", "-C", str(ROOT), *command), env=environment)


@contextlib.contextmanager
def cluster_of(count: int, **more: str) -> Iterator[Cluster]:
    """Starts `count` hosts and a cluster with one node, on the first host. Removes cluster and hosts at the end."""
    # Short, because the length of socket paths is limited.
    folder = Path(tempfile.mkdtemp(prefix="rlhf.")).resolve()
    try:
        with Hosts(folder, count, [Path(sys.prefix), ROOT, folder], ssh=False) as hosts:
            cluster = Cluster(hosts, folder, **more)
            yield cluster
            for host in hosts.hosts:
                cluster.leave(host)
            cluster.server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
