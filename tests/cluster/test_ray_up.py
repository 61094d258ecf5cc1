"""Tests `make up` on three hosts with jobs/cloud/local.yaml, jobs on this cluster, a spot notice, and `make down`.

    .venv/bin/python -m pytest tests/cluster -s          # 15 minutes on two busy cores; needs root, openssh-server, rsync

`ray up`, ssh, rsync, the start script, the autoscaler, the token and MLflow are real. The hosts share one kernel, and the
environment is installed already.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import pytest
import yaml
from hosts import Hosts, missing
from running import ROOT, copy_repository

from tools.chaos.runs import until

TOKEN = "fedcba9876543210" * 2
SHORT = "gate={} trainer.eval_strategy=no trainer.eval_on_start=false"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


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

    def end(self, seconds: float) -> tuple[int, str]:
        """Waits for the end of the process. Returns (exit status, output)."""
        status = self.wait(seconds)
        self.reader.join(10)
        return status, "".join(self.lines)


@pytest.fixture(scope="module")
def hosts():
    """Starts three hosts with a shared mount and separate homes."""
    # The path is short, because the length of socket paths is limited.
    folder = Path(tempfile.mkdtemp(prefix="rlhf.")).resolve()
    (folder / "shared").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(folder / "shared")], check=True)
    try:
        with Hosts(folder, 3, [Path(sys.prefix), ROOT, folder]) as made:
            for host in made.hosts:  # ~/rlhf/.venv is where `make setup` would install the environment
                (host.home / "rlhf").mkdir()
                (host.home / "rlhf/.venv").symlink_to(sys.prefix)
            yield made
    finally:
        subprocess.run(["umount", str(folder / "shared")])
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def user(hosts):
    """Returns the submitter's copy of the repository, with a filled-in cluster file, and the submitter's environment."""
    home = hosts.folder / "user"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text(TOKEN)
    copy = copy_repository(home / "project", ".cloud")
    file = copy / "jobs/cloud/local.yaml"
    config = yaml.safe_load(file.read_text())
    config["provider"].update(head_ip=hosts[0].ip, worker_ips=[host.ip for host in hosts.hosts[1:]])
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    # The hosts have no internet access.
    assert config["setup_commands"] == ["bash ~/rlhf/start-node.sh install"]
    config["setup_commands"] = ["echo 'export PATH=$HOME/rlhf/.venv/bin:$PATH' >> ~/.bashrc"]
    config["file_mounts"]["~/rlhf/pyvenv.cfg"] = f"{sys.prefix}/pyvenv.cfg"
    # As in the cloud, the head runs no tasks. A worker node has CPUs for one training worker and the data tasks.
    config["head_start_ray_commands"][1] += " --num-cpus=0 --object-store-memory=150000000"
    config["worker_start_ray_commands"][1] += " --num-cpus=2 --object-store-memory=200000000"
    file.write_text(yaml.safe_dump(config))
    here = {"HOME": str(home), "CLUSTER": "jobs/cloud/local.yaml", "RAY_TMPDIR": str(home / "ray")}
    return copy, environment_with(**here)


def make(user, *arguments, status=0, **more):
    """Runs a target of the Makefile, and checks its exit status. Returns its output."""
    copy, environment = user
    print("\n$ make " + " ".join(arguments), flush=True)
    found, output = Process("make", *arguments, cwd=copy, env={**environment, **more}).end(3600)
    assert found == status, output[-4000:]
    return output


@pytest.fixture(scope="module")
def cluster(user, hosts):
    make(user, "up", "ARGS=-y")
    copy, environment = user
    port = "18265"
    tunnel = subprocess.Popen(
        ["ray", "dashboard", environment["CLUSTER"], "--port", port], cwd=copy, env=environment,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        wait(lambda: len(nodes(address)) == 3, "three nodes", 180)
        yield address
    finally:
        os.killpg(tunnel.pid, signal.SIGKILL)
        make(user, "down", "ARGS=-y")
    left = "ps ax -o args | grep -E '[r]aylet/raylet|[g]cs_server|[m]lflow'"
    wait(lambda: not any(hosts.ssh(host, left).stdout for host in hosts.hosts), "the end of Ray", 180)


def wait(condition, what, seconds):
    def there():
        with contextlib.suppress(OSError):
            return condition()

    until(there, what, seconds, every=1)


def get(url, login):
    request = urllib.request.Request(url, headers={"Authorization": login})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


def state(address, path):
    return get(f"{address}/api/v0/{path}", f"Bearer {TOKEN}")["data"]["result"]["result"]


def nodes(address):
    return [node for node in state(address, "nodes?detail=1") if node["state"] == "ALIVE"]


def trainers(address):
    """Returns {actor id: node id} of all training workers so far."""
    actors = state(address, "actors?detail=1&limit=1000")
    return {one["actor_id"]: one["node_id"] for one in actors if "RayTrainWorker" in one["class_name"]}


def test_jobs_run_on_several_hosts(cluster, user, hosts):
    runs = hosts.folder / "shared/runs"
    two = f"scaling.num_workers=2 scaling.placement_strategy=SPREAD run.storage_path={runs}"
    jobs = {
        "sft": f"{two} {SHORT} trainer.max_steps=4",
        "rm": f"{two} {SHORT} trainer.max_steps=4",
        "ppo": f"{two} gate={{}} trainer.total_episodes=64",
    }
    before = trainers(cluster)
    for stage, overrides in jobs.items():
        output = make(user, stage, f"ARGS={overrides} run.name=far-{stage}", RAY_ADDRESS=cluster)
        assert f"registered rlhf-{stage} v1" in output
        result = json.loads((runs / f"far-{stage}/result.json").read_text())
        assert result["tracking_uri"] == f"http://{hosts[0].ip}:5000"
        now = trainers(cluster)
        new, before = {actor: now[actor] for actor in now.keys() - before.keys()}, now
        assert len(new) == 2 and len(set(new.values())) == 2, "the two workers were not on two hosts"
    # The MLflow server requires the password from clients at every address.
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"http://{hosts[0].ip}:5000/api/2.0/mlflow/experiments/search?max_results=1", "")


def test_storage_that_is_not_shared_is_refused(cluster, user):
    """The storage path is in /tmp, which differs on each host, so the job fails before it starts a worker."""
    alone = "ARGS=run.storage_path=/tmp/alone/runs run.name=alone"
    assert "is not shared" in make(user, "sft", alone, status=2, RAY_ADDRESS=cluster)


NOTICE = """\
import http.server, datetime
class Say(http.server.BaseHTTPRequestHandler):
    def answer(self):
        at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=120)
        body = '{"action": "terminate", "time": "%sZ"}' % at.strftime('%Y-%m-%dT%H:%M:%S')
        self.send_response(200); self.end_headers()
        self.wfile.write(b'TOKEN' if self.path.endswith('token') else body.encode())
    do_GET = do_PUT = answer
http.server.HTTPServer(('169.254.169.254', 80), Say).serve_forever()
"""


def test_a_spot_notice_drains_the_node(cluster, hosts):
    """A small script simulates the cloud's metadata service, which the spot watcher of a node queries."""
    host = hosts[2]
    subprocess.run(["ip", "-n", host.name, "addr", "add", "169.254.169.254/32", "dev", "lo"], check=True)
    command = ["ip", "netns", "exec", host.name, sys.executable, "-c", NOTICE]
    with subprocess.Popen(command) as service:
        try:
            log = host.home / "logs/spot.log"
            wait(lambda: "draining this node" in log.read_text(), "a notice", 60)
            wait(
                lambda: host.ip not in {node["node_ip"] for node in nodes(cluster)}, "the end of the node", 90
            )
        finally:
            service.kill()
    assert re.search(r"notice: 1\d\d s left", log.read_text())
