"""`make up` with jobs/cloud/local.yaml on three hosts that the test makes; sft, rm and ppo submitted to them; `make down`.

    .venv/bin/python -m pytest tests/cluster -s          # 15 minutes on two busy cores; needs root, openssh-server, rsync

What is real: `ray up` over ssh and rsync, the shipped file and its start script, Ray's autoscaler on the head, the token,
MLflow behind its password, jobs through the tunnel of `make dashboard`, workers that only share a mount and a network, a
spot notice by the address that a cloud gives it. What is not: the hosts share one kernel, and the environment is there.
"""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from hosts import Hosts, missing

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "fedcba9876543210" * 2
SHORT = "gate={} trainer.eval_strategy=no trainer.eval_on_start=false"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module")
def hosts():
    """Three hosts with one shared mount, and a home of the user's own."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf.")).resolve()  # short: socket names in it have a limit
    (folder / "shared").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(folder / "shared")], check=True)
    try:
        with Hosts(folder, 3, [Path(sys.prefix), ROOT, folder]) as made:
            for host in made.hosts:  # where `make setup` would put it
                (host.home / "rlhf").mkdir()
                (host.home / "rlhf/.venv").symlink_to(sys.prefix)
            yield made
    finally:
        subprocess.run(["umount", str(folder / "shared")])
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def user(hosts):
    """The submitter: a home with the token, a copy of the repository with its cluster file filled in, its environment."""
    home = hosts.folder / "user"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray/auth_token").write_text(TOKEN)
    copy = home / "project"
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(sys.prefix)
    for stamp in (".core", ".cloud"):
        (Path(sys.prefix) / stamp).touch()
    file = copy / "jobs/cloud/local.yaml"
    config = yaml.safe_load(file.read_text())
    config["provider"].update(head_ip=hosts[0].ip, worker_ips=[host.ip for host in hosts.hosts[1:]])
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    assert config["setup_commands"].pop(0) == "make -s -C ~/rlhf .venv/.cloud"  # no network inside the hosts
    # Nothing runs on the head, as in the cloud; a worker has room for one training worker and the data tasks.
    config["head_start_ray_commands"][1] += " --num-cpus=0 --object-store-memory=150000000"
    config["worker_start_ray_commands"][1] += " --num-cpus=2 --object-store-memory=200000000"
    file.write_text(yaml.safe_dump(config))
    environment = {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}:/usr/sbin",
        "CLUSTER": "jobs/cloud/local.yaml",
        "RAY_TMPDIR": str(home / "ray"),
    }
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"):
        environment.pop(name, None)
    return copy, environment


def make(user, *arguments, **more):
    """One make target, its output shown as it comes and returned."""
    copy, environment = user
    print("\n$ make " + " ".join(arguments), flush=True)
    command = subprocess.Popen(
        ["make", *arguments], cwd=copy, env={**environment, **more}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    lines = []
    for line in command.stdout:
        print("   " + line, end="", flush=True)
        lines.append(line)
    return command.wait(), "".join(lines)


@pytest.fixture(scope="module")
def cluster(user, hosts):
    status, said = make(user, "up", "ARGS=-y")
    assert status == 0, said[-3000:]
    copy, environment = user
    port = "18265"
    tunnel = subprocess.Popen(
        ["ray", "dashboard", environment["CLUSTER"], "--port", port], cwd=copy, env=environment,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: len(nodes(address)) == 3, 180)
        yield address
    finally:
        os.killpg(tunnel.pid, signal.SIGKILL)
        status, _ = make(user, "down", "ARGS=-y")
    assert status == 0
    left = "ps ax -o args | grep -E '[r]aylet/raylet|[g]cs_server|[m]lflow'"
    wait_for(lambda: not any(hosts.ssh(host, left).stdout for host in hosts.hosts), 180)


def get(address, path):
    request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())["data"]["result"]["result"]


def nodes(address):
    return [node for node in get(address, "/api/v0/nodes?detail=1") if node["state"] == "ALIVE"]


def trainers(address):
    """{actor id: node id} of the training workers that there have been."""
    actors = get(address, "/api/v0/actors?detail=1&limit=1000")
    return {
        actor["actor_id"]: actor["node_id"] for actor in actors if "RayTrainWorker" in actor["class_name"]
    }


def wait_for(true, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if true():
                return
        except OSError:
            pass
        time.sleep(1)
    raise AssertionError(f"not within {seconds} s: {true}")


def test_jobs_on_several_hosts(cluster, user, hosts):
    runs = hosts.folder / "shared/runs"
    two = f"scaling.num_workers=2 scaling.placement_strategy=SPREAD run.storage_path={runs}"
    jobs = {
        "sft": f"{two} {SHORT} trainer.max_steps=4",
        "rm": f"{two} {SHORT} trainer.max_steps=4",
        "ppo": f"{two} gate={{}} trainer.total_episodes=64",
    }
    before = trainers(cluster)
    for stage, overrides in jobs.items():
        status, said = make(user, stage, f"ARGS={overrides} run.name=far-{stage}", RAY_ADDRESS=cluster)
        assert status == 0, said[-4000:]
        assert f"registered rlhf-{stage} v1" in said
        result = json.loads((runs / f"far-{stage}/result.json").read_text())
        assert result["tracking_uri"] == f"http://{hosts[0].ip}:5000"
        now = trainers(cluster)
        new, before = {actor: now[actor] for actor in now.keys() - before.keys()}, now
        assert len(new) == 2 and len(set(new.values())) == 2, "the two workers were not on two hosts"
    # The registry asks for the password, from wherever it is asked.
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(
            f"http://{hosts[0].ip}:5000/api/2.0/mlflow/experiments/search?max_results=1", timeout=20
        )


def test_two_hosts_learn_what_one_does(cluster, user, hosts):
    """The same losses with one worker and with two on two hosts, and what the second costs in bytes a step."""
    runs = hosts.folder / "shared/runs"
    batch = "data.batch_size=16 trainer.per_device_train_batch_size=8 trainer.logging_steps=1"
    losses, seconds, traffic = {}, {}, {}
    for workers, steps in ((1, 6), (2, 6), (2, 36)):
        name = f"nodes-{workers}-{steps}"
        before = sum(host.sent() for host in hosts.hosts[1:])
        overrides = f"{SHORT} {batch} scaling.num_workers={workers} scaling.placement_strategy=SPREAD"
        status, said = make(
            user, "sft", f"ARGS={overrides} trainer.lr_scheduler_type=constant trainer.max_steps={steps} "
            f"run.storage_path={runs} run.name={name} mlflow.registered_model=null", RAY_ADDRESS=cluster,
        )  # fmt: skip
        assert status == 0, said[-4000:]
        traffic[name] = sum(host.sent() for host in hosts.hosts[1:]) - before
        result = json.loads((runs / name / "result.json").read_text())
        losses[name], seconds[name] = history(hosts[0].ip, result["mlflow_run_id"]), result["train_seconds"]
    one, two = losses["nodes-1-6"], losses["nodes-2-6"]
    assert len(one) == len(two) == 6
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4, (one, two)
    state = json.loads((runs / "nodes-2-6/result.json").read_text())
    numbers = adapter_numbers(
        Path(state["adapter"]) if Path(state["adapter"]).exists() else runs / "nodes-2-6"
    )
    # A ring all-reduce over W workers sends 2 (W - 1) / W times the gradients from each; both hosts' bytes are counted.
    expected = 2 * (2 * (2 - 1) / 2) * 4 * numbers
    a_step = (traffic["nodes-2-36"] - traffic["nodes-2-6"]) / 30
    print(
        f"\nlosses, 1 host and 2: {one} {two}\nadapter {numbers} numbers; bytes between the hosts a step: measured "
        f"{a_step:.0f}, all-reduce of the adapter alone {expected:.0f}\ntraining seconds: {seconds}"
    )
    base = Path(ROOT / "jobs/demo/model/model.safetensors").stat().st_size
    assert 0.5 * expected < a_step < base  # never the base


def history(ip, run_id):
    login = base64.b64encode(f"admin:{TOKEN}".encode()).decode()
    url = f"http://{ip}:5000/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key=loss"
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"Authorization": f"Basic {login}"})
    ) as answer:
        points = json.loads(answer.read())["metrics"]
    return [point["value"] for point in sorted(points, key=lambda point: int(point["step"]))]


def adapter_numbers(folder):
    from safetensors import safe_open

    (file,) = list(folder.rglob("adapter_model.safetensors"))[:1]
    with safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118


def test_storage_that_is_not_shared_is_refused(cluster, user):
    """Each host has a /tmp of its own: the job finds that out with a file, before it starts a worker."""
    status, said = make(
        user, "sft", "ARGS=run.storage_path=/tmp/alone/runs run.name=alone", RAY_ADDRESS=cluster
    )
    assert status == 2, said[-3000:]
    assert "is not shared" in said


def test_a_spot_notice_drains_the_node(cluster, hosts):
    """The watcher on a worker asks the address of the clouds' metadata service; here that service is a small script."""
    host = hosts[2]
    say = (hosts.folder / "imds.py").resolve()
    say.write_text(
        "import http.server, datetime\n"
        "class Say(http.server.BaseHTTPRequestHandler):\n"
        "    def answer(self):\n"
        "        at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=120)\n"
        '        body = \'{"action": "terminate", "time": "%sZ"}\' % at.strftime(\'%Y-%m-%dT%H:%M:%S\')\n'
        "        self.send_response(200); self.end_headers()\n"
        "        self.wfile.write(b'TOKEN' if self.path.endswith('token') else body.encode())\n"
        "    do_GET = do_PUT = answer\n"
        "http.server.HTTPServer(('169.254.169.254', 80), Say).serve_forever()\n"
    )
    subprocess.run(["ip", "-n", host.name, "addr", "add", "169.254.169.254/32", "dev", "lo"], check=True)
    with subprocess.Popen(["ip", "netns", "exec", host.name, sys.executable, str(say)]) as service:
        try:
            log = host.home / "logs/spot.log"
            wait_for(lambda: "draining this node" in log.read_text(), 60)
            wait_for(lambda: host.ip not in {node["node_ip"] for node in nodes(cluster)}, 90)
        finally:
            service.kill()
    assert re.search(r"notice: 1\d\d s left", log.read_text())
