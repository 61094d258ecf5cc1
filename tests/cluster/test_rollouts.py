"""The trainer on one host, rollout workers on two others that come and go: the bits of the run that nothing happens to.

    .venv/bin/python -m pytest tests/cluster/test_rollouts.py -s          # 5 minutes on two busy cores; needs root

What is real: Ray's processes on hosts with networks, process tables and /tmp of their own, all of a host's killed at once.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hosts import Hosts, missing
from resumed import numbers

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 12
PPO = [
    "gate={}", "policy=base", "reward=python:pipeline.demo:gold", "judge=null", "data.eval=null", "run.report=false",
    "mlflow.registered_model=null", f"trainer.total_episodes={16 * UPDATES}", "trainer.batch_size=16",
    "trainer.local_rollout_forward_batch_size=8", "trainer.normalize_rewards=false", "scaling.label_selector={for: trainers}",
    "rollout.label_selector={for: rollouts}", "rollout.num_workers=[1, 2]", "rollout.staleness=1", "rollout.patience_s=-1",
    "rollout.heartbeat_timeout_s=5",
]  # fmt: skip
PATIENCE = 400  # seconds for whatever is waited for
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing(ssh=False) is not None, reason=str(missing(ssh=False))),
]


class Cluster:
    """Ray and an MLflow server on the first host; `join` and `leave` are for the others."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder = hosts, folder
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/chaos'}", "CHAOS_STEP_S": "0.3", "HOME": str(folder),
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        }  # fmt: skip
        for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
            self.environment.pop(name, None)
        self.address = f"{hosts[0].ip}:6379"
        more = ["--head", "--port=6379", "--include-dashboard=false", "--num-cpus=2"]
        self._ray(hosts[0], "trainers", *more)
        server = ["mlflow", "server", "--port", "5000", "--workers", "1"]
        with open(folder / "mlflow.log", "w") as log:
            self.server = subprocess.Popen(
                hosts[0].here(*server, "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
                              "--artifacts-destination", str(folder / "artifacts")),
                env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip

    def _ray(self, host, kind, *more):
        command = [
            "ray",
            "start",
            f"--node-ip-address={host.ip}",
            f"--labels=for={kind}",
            "--object-store-memory=100000000",
        ]
        done = subprocess.run(
            host.here("env", "-C", str(ROOT), *command, *more),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def join(self, host):
        self._ray(host, "rollouts", f"--address={self.address}", "--num-cpus=1")

    def leave(self, host):
        """Everything on the host dies at once, save its process 1."""
        subprocess.run(host.here("bash", "-c", "kill -9 -1"))

    def run(self, name):
        return Ppo(self, name)


class Ppo:
    """A run of ppo whose driver is on the first host."""

    def __init__(self, cluster, name):
        self.folder = cluster.folder / "runs" / name
        overrides = [
            f"run.storage_path={cluster.folder / 'runs'}",
            f"run.name={name}",
            "mlflow.tracking_uri=http://127.0.0.1:5000",
        ]
        command = [
            sys.executable,
            str(ROOT / "tests/chaos/slowly.py"),
            "ppo",
            "jobs/demo/ppo.yaml",
            *PPO,
            *overrides,
        ]
        self.process = subprocess.Popen(
            cluster.hosts[0].here("env", "-C", str(ROOT), *command), env=cluster.environment | {"RAY_ADDRESS": cluster.address},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.lines = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            print("   " + line, end="", flush=True)
            self.lines.append(line)

    def reaches(self, step):
        """Waits for a step's line."""
        pattern, give_up = re.compile(rf"\bstep +{step}/{UPDATES}\b"), time.monotonic() + PATIENCE
        while not any(pattern.search(line) for line in self.lines):
            assert self.process.poll() is None and time.monotonic() < give_up, "".join(self.lines[-30:])
            time.sleep(0.02)

    def result(self):
        assert self.process.wait(PATIENCE) == 0, "".join(self.lines[-30:])
        return json.loads((self.folder / "result.json").read_text())


@pytest.fixture(scope="module")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="rlhf.")).resolve()  # short: socket names in it have a limit
    try:
        with Hosts(folder, 3, [Path(sys.prefix), ROOT, folder], ssh=False) as hosts:
            made = Cluster(hosts, folder)
            yield made
            for host in hosts.hosts:
                made.leave(host)
            made.server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_rollout_workers_on_other_hosts_come_and_go(cluster):
    _, one, other = cluster.hosts.hosts
    for host in (one, other):
        cluster.join(host)
    calm = cluster.run("calm")
    calm.reaches(3)
    before = [host.sent() for host in cluster.hosts.hosts]
    calm.reaches(UPDATES - 2)
    sent = [host.sent() - was for host, was in zip(cluster.hosts.hosts, before, strict=True)]
    expected = calm.result()
    cluster.leave(other)

    # Without a rollout worker nothing goes on: the update after a host has died was sampled on the other one.
    run = cluster.run("come-and-go")
    run.reaches(3)
    cluster.leave(one)
    cluster.join(other)
    run.reaches(6)
    cluster.leave(other)
    cluster.join(one)
    result = run.result()

    weights = [Path(each["adapter"], "adapter_model.safetensors") for each in (expected, result)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    figures = [
        {key: value for key, value in numbers(each["metrics"]).items() if not key.startswith("rollout/")}
        for each in (expected, result)
    ]
    assert figures[0] == figures[1] and len(figures[0]) > 20
    said = "".join(run.lines)
    assert said.count("another one takes its place") >= 2

    updates = UPDATES - 5
    adapter, counted = weights[0].stat().st_size, expected["metrics"]["rollout/bytes"]
    print(
        f"\nadapter {adapter} bytes; an update: {sent[0] / updates:.0f} from the trainer's host, "
        f"{sum(sent[1:]) / updates:.0f} from the two others; rollout/bytes {counted:.0f}"
    )
    # Two workers fetch each version; the base, which is ten times as large, never travels again.
    assert adapter < sent[0] / updates < 4 * adapter
    assert counted < 4 * adapter
