"""Ray and an MLflow server on the first of several hosts (hosts.py); the others join and leave.

    with cluster_of(3) as cluster:          # cluster.hosts[0].ip, ...; cluster.folder is a mount that all of them share
        cluster.join(cluster.hosts[1], "rollouts")
        cluster.leave(cluster.hosts[1])

What is real: Ray's processes on hosts with networks, process tables and /tmp of their own, all of a host's killed at once.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from hosts import Host, Hosts

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 400  # seconds for whatever is waited for


class Cluster:
    """`join` and `leave` are for all hosts but the first, whose label is `head`.

    Args:
        dashboard: Ray's, on port 8265 of the first host.
        more: environment variables of all that runs on the hosts.
    """

    def __init__(self, hosts: Hosts, folder: Path, dashboard: bool = False, **more: str):
        self.hosts, self.folder = hosts, folder
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT), "HOME": str(folder), "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        } | more  # fmt: skip
        for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
            self.environment.pop(name, None)
        head = hosts[0]
        self.address, self.mlflow = f"{head.ip}:6379", f"http://{head.ip}:5000"
        listens = ["--dashboard-host=0.0.0.0", "--dashboard-port=8265"] if dashboard else []
        self._ray(
            head,
            "head",
            "--head",
            "--port=6379",
            f"--include-dashboard={dashboard}",
            *listens,
            "--num-cpus=2",
        )
        server = ["mlflow", "server", "--host", "0.0.0.0", "--allowed-hosts", "*", "--port", "5000"]
        server += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        server += ["--artifacts-destination", str(folder / "artifacts")]
        with open(folder / "mlflow.log", "w") as log:
            self.server = subprocess.Popen(head.here(*server), env=self.environment, stdout=log, stderr=log)
        self._wait_for_mlflow()

    def _wait_for_mlflow(self) -> None:
        give_up = time.monotonic() + PATIENCE
        while self.server.poll() is None and time.monotonic() < give_up:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.mlflow}/health", timeout=5):
                return
            time.sleep(0.2)
        raise RuntimeError(f"{self.mlflow} is not up: {(self.folder / 'mlflow.log').read_text()[-3000:]}")

    def _ray(self, host: Host, label: str, *more: str) -> None:
        command = ["ray", "start", f"--node-ip-address={host.ip}", f"--labels=for={label}"]
        for _ in range(
            3
        ):  # Ray gives a node half a minute to start (2.60, a constant), and a busy machine takes longer
            done = subprocess.run(
                host.here("env", "-C", str(ROOT), *command, "--object-store-memory=100000000", *more),
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            if done.returncode == 0:
                return
            self.leave(host)
        raise RuntimeError(done.stdout + done.stderr)

    def join(self, host: Host, label: str) -> None:
        self._ray(host, label, f"--address={self.address}", "--num-cpus=1")

    def leave(self, host: Host) -> None:
        """Everything on the host dies at once, save its process 1."""
        subprocess.run(host.here("bash", "-c", "kill -9 -1"))

    def start(self, host: Host, *command: str) -> subprocess.Popen:
        """A command on a host, in the repository's folder and as a driver of the cluster; its output is to be read."""
        return subprocess.Popen(
            host.here("env", "-C", str(ROOT), *command), env=self.environment | {"RAY_ADDRESS": self.address},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip


@contextlib.contextmanager
def cluster_of(count: int, dashboard: bool = False, **more: str) -> Iterator[Cluster]:
    """A cluster of so many hosts, of which only the first has joined; nothing is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf.")).resolve()  # short: socket names in it have a limit
    try:
        with Hosts(folder, count, [Path(sys.prefix), ROOT, folder], ssh=False) as hosts:
            cluster = Cluster(hosts, folder, dashboard, **more)
            yield cluster
            for host in hosts.hosts:
                cluster.leave(host)
            cluster.server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
