"""Tests `make serve` on several hosts: two have replicas, and one of them dies and rejoins during requests.

    .venv/bin/python -m pytest tests/cluster/test_serving.py -s          # 9 minutes on two busy cores; needs root

Driver, proxy, recorder and MLflow are on the first host. The clients are in this process, which is on no host.
"""

import secrets
import subprocess
import sys
import threading
import time

import pytest
import yaml
from clusters import PATIENCE, cluster_of
from hosts import missing
from prometheus_client.parser import text_string_to_metric_families
from served import POLICIES, REWARDS, ask
from toy_models import registered, second

from pipeline import registry
from pipeline.commands.serve import TOKENS
from tools.chaos.runs import until

REQUESTS, CLIENTS = 240, 8
FIRST, SECOND = "models:/toy-policy/1", "models:/toy-policy/2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing(ssh=False) is not None, reason=str(missing(ssh=False))),
]


@pytest.fixture(scope="module")
def cluster():
    """Makes three hosts, and two versions of a policy and a reward model in their MLflow server."""
    token = secrets.token_hex(32)
    with cluster_of(3, dashboard=True, **{TOKENS: token}) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", made.mlflow)
        made.storage = made.folder / "runs"
        registered(made.storage)
        assert second(made.storage) == "2"
        for host in made.hosts.hosts[1:]:
            made.join(host, "servers")
        yield made


@pytest.fixture
def settings(cluster):
    return [
        POLICIES, REWARDS, "serve.host=0.0.0.0", "serve.alias_poll_interval_s=0.5", "scaling.num_workers=2", "scaling.label_selector={for: servers}",
        f"mlflow.tracking_uri={cluster.mlflow}", f"run.storage_path={cluster.storage}",
    ]  # fmt: skip


class Client:
    """Sends requests to the application, whose proxy is on the first host."""

    def __init__(self, cluster):
        self.url = f"http://{cluster.hosts[0].ip}:8000"
        self.token = {"Authorization": f"Bearer {cluster.environment[TOKENS]}"}

    def post(self, path, body):
        """Returns (status, answer). A broken connection has status 0."""
        try:
            status, _, answer = ask(self.url, path, body, **self.token)
        except OSError as error:
            return 0, str(error)
        return status, answer

    def chat(self, text="What is the capital of Peru?", **more):
        asked = {"model": "toy", "messages": [{"role": "user", "content": text}], **more}
        return self.post("/v1/chat/completions", asked)

    def answers(self, version=None):
        """Returns {replica: number of its answers} for replicas that reported to the recorder in the last half minute."""
        status, _, page = ask(self.url, "/metrics", **self.token)
        assert status == 200, page
        counts = {}
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                counts.setdefault(sample.labels["replica"], 0)
                if sample.name == "rlhf_answers_total" and version in (None, sample.labels["version"]):
                    counts[sample.labels["replica"]] += int(sample.value)
        return counts


class Load:
    """Eight clients that send one request after the other. Each request is retried at most once, after a second.

    Args:
        requests: total number. None means until the block ends.
    """

    def __init__(self, client, requests=None):
        self.client, self.requests = client, requests
        # (time, answer); (status, message) of a first and a second try
        self.answers, self.again, self.failed = [], [], []
        self.number, self.lock, self.ended = 0, threading.Lock(), False
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CLIENTS)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ended = self.requests is None
        for thread in self.threads:
            thread.join()

    def _work(self):
        while (number := self._next()) is not None:
            for said in (self.again, self.failed):
                status, answer = self.client.chat(seed=number)
                if status == 200:
                    self.answers.append((time.time(), answer))
                    break
                said.append((status, answer))
                time.sleep(1)

    def _next(self):
        with self.lock:
            self.number += 1
            return None if self.ended or (self.requests and self.number > self.requests) else self.number


@pytest.fixture
def server(cluster, settings):
    """Runs `make serve`."""
    command = [sys.executable, "-m", "pipeline", "serve", "jobs/demo/serve.yaml", *settings]
    process = cluster.start(cluster.hosts[0], *command)
    try:
        wait(lambda: process.poll() is not None or "Ctrl-C ends it\n" in process.lines, "a start")
        assert process.poll() is None, "".join(process.lines)
        yield process
    finally:
        if process.poll() is None:
            interrupt(cluster)
            process.wait(PATIENCE)


def wait(condition, what):
    return until(condition, what, PATIENCE, every=0.2)


def interrupt(cluster):
    """Sends Ctrl-C to the command on its host."""
    subprocess.run(cluster.hosts[0].here("pkill", "-INT", "-f", "pipeline serve"))


def test_a_host_dies_and_joins_again_and_an_alias_moves_while_clients_ask(cluster, server):
    client, dying = Client(cluster), cluster.hosts[2]
    wait(lambda: len(client.answers()) == 2, "two replicas")
    one_text_a_seed(client)

    before = set(client.answers())
    died, load = ask_while_it_dies(cluster, client, dying)
    feedback_is_known(client, load.answers, died)

    cluster.join(dying, "servers")
    wait(lambda: len(set(client.answers()) - before) == 1, "a replica on the host that has joined")
    [new] = set(client.answers()) - before
    wait(
        lambda: client.chat(max_tokens=1)[0] == 200 and client.answers()[new], "an answer by the new replica"
    )

    the_alias_moves(cluster, client)

    interrupt(cluster)
    status, said = server.end()
    assert status in (0, 130), (status, said)
    assert "the aliases cannot be followed" not in said
    # Ray Serve's controller logs its own tracebacks about a lost node.
    traces = [line for line in server.lines if "Traceback" in line and "(ServeController)" not in line]
    assert not traces, said
    with pytest.raises(OSError):
        ask(client.url, "/health")


def one_text_a_seed(client):
    """Sends requests one after the other, because a CPU rounds differently in batches of other sizes."""
    texts = {
        seed: {client.chat(seed=seed)[1]["choices"][0]["message"]["content"] for _ in range(12)}
        for seed in range(3)
    }
    assert [len(found) for found in texts.values()] == [1, 1, 1], texts
    assert len(set.union(*texts.values())) > 1
    counts = client.answers()
    assert len(counts) == 2 and all(counts.values()), counts


def ask_while_it_dies(cluster, client, host):
    """Returns (the time of the death, the load)."""
    with Load(client, REQUESTS) as load:
        wait(lambda: len(load.answers) > REQUESTS // 3, "a third of the answers")
        cluster.leave(host)
        died = time.time()
        asked = load.number
    print(f"\n{len(load.again)} of {REQUESTS} requests were sent again; it died at request {asked}")
    assert asked < REQUESTS, "it died after the last request"
    assert not load.failed and len(load.answers) == REQUESTS, load.failed
    # OpenAI's clients retry these by themselves.
    assert all(status >= 500 for status, _ in load.again), load.again
    return died, load


def feedback_is_known(client, answers, died):
    unknown = []
    for arrived, answer in answers:
        status, said = client.post("/v1/feedback", {"id": answer["id"], "label": False})
        if status == 404:
            unknown.append(arrived - died)
        else:
            assert status == 200, said
    print(f"{len(unknown)} answers were lost with the host, seconds before its death: {unknown}")
    assert all(-2 < seconds < 1 for seconds in unknown), unknown


def the_alias_moves(cluster, client):
    with Load(client) as load:
        wait(lambda: len(load.answers) > CLIENTS, "answers")
        registry.client(cluster.mlflow).set_registered_model_alias("toy-policy", "champion", "2")
        wait(lambda: sum(map(bool, client.answers(SECOND).values())) == 2, "answers of version 2 by both")
    versions = [answer["system_fingerprint"] for _, answer in load.answers]
    assert not load.again and versions[0] == FIRST and set(versions) == {FIRST, SECOND}
    assert {client.chat(max_tokens=1)[1]["system_fingerprint"] for _ in range(20)} == {SECOND}


def test_serve_deploy(cluster, settings):
    """Uses Ray Serve's own command, like docs/serving.md."""
    application = {"name": "demo", "route_prefix": "/", "import_path": "pipeline.commands.serve:build"}
    application["args"] = {"job": "jobs/demo/serve.yaml", "overrides": settings}
    config = cluster.folder / "serve.yaml"
    listen = {"host": "0.0.0.0", "port": 8000}
    config.write_text(yaml.safe_dump({"http_options": listen, "applications": [application]}))

    def serve(*command):
        status, said = cluster.start(cluster.hosts[0], "serve", *command).end()
        assert status == 0, said
        return said

    def running():
        said = serve("status", "--name", "demo")
        assert "FAILED" not in said, said
        return yaml.safe_load(said)["status"] == "RUNNING"

    serve("deploy", str(config))
    try:
        wait(running, "the application runs")
        status, answer = Client(cluster).chat()
        assert status == 200 and answer["system_fingerprint"] in (FIRST, SECOND), answer
    finally:
        serve("shutdown", "--yes")
