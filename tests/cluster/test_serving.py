"""Tests `make serve` with replicas on two hosts, while one host dies and rejoins and an alias moves.

    .venv/bin/python -m pytest tests/cluster/test_serving.py -s          # 9 minutes on two busy cores; needs root

The driver, the proxy, the recorder and MLflow run on the first host. The clients run in this process, outside the hosts.
"""

import secrets
import subprocess
import sys
import threading
import time

import pytest
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
    """Starts three hosts whose MLflow server has two versions of a policy, and a reward model."""
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
        POLICIES, REWARDS, "serve.host=0.0.0.0", "serve.alias_poll_interval_s=0.5", "serve.log_prompts=true", "scaling.num_workers=2", "scaling.label_selector={for: servers}",
        f"mlflow.tracking_uri={cluster.mlflow}", f"run.storage_path={cluster.storage}",
    ]  # fmt: skip


class Client:
    """Sends requests to the proxy on the first host."""

    def __init__(self, cluster):
        self.url = f"http://{cluster.hosts[0].ip}:8000"
        self.token = {"Authorization": f"Bearer {cluster.environment[TOKENS]}"}

    def post(self, path, body):
        """Sends a POST request. Returns (status, answer), where status 0 means that the connection broke."""
        try:
            status, _, answer = ask(self.url, path, body, **self.token)
        except OSError as error:
            return 0, str(error)
        return status, answer

    def chat(self, text="What is the capital of Peru?", **more):
        asked = {"model": "toy", "messages": [{"role": "user", "content": text}], **more}
        return self.post("/v1/chat/completions", asked)

    def answers(self, version=None):
        """Returns {replica: number of its answers} for all replicas on the metrics page."""
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
    """Eight clients that each send one request after another. A client repeats a failed request once, after a second.

    Args:
        requests: total number of requests. If None, the clients send requests until the `with` block ends.
    """

    def __init__(self, client, requests=None):
        self.client, self.requests = client, requests
        self.answers = []  # (time, answer)
        # (status, message) of requests whose first attempt failed, and of requests whose second attempt failed, too
        self.repeated, self.failed = [], []
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
            for errors in (self.repeated, self.failed):
                status, answer = self.client.chat(seed=number)
                if status == 200:
                    self.answers.append((time.time(), answer))
                    break
                errors.append((status, answer))
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
        wait(lambda: process.poll() is not None or "Ctrl-C stops the server\n" in process.lines, "the server")
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


def test_a_host_dies_and_rejoins_and_an_alias_moves_under_load(cluster, server):
    client, dying = Client(cluster), cluster.hosts[2]
    wait(lambda: len(client.answers()) == 2, "two replicas")
    assert_equal_answers_for_equal_seeds(client)

    before = set(client.answers())
    died, load = kill_host_under_load(cluster, client, dying)
    assert_feedback_is_accepted(client, load.answers, died)

    cluster.join(dying, "servers")
    wait(lambda: len(set(client.answers()) - before) == 1, "a replica on the new host")
    [new] = set(client.answers()) - before
    wait(
        lambda: client.chat(max_tokens=1)[0] == 200 and client.answers()[new], "an answer by the new replica"
    )

    move_alias_under_load(cluster, client)

    interrupt(cluster)
    status, output = server.end()
    assert status in (0, 130), (status, output)
    assert "cannot resolve the aliases" not in output
    # Ray Serve's controller logs its own tracebacks about a lost node.
    traces = [line for line in server.lines if "Traceback" in line and "(ServeController)" not in line]
    assert not traces, output
    with pytest.raises(OSError):
        ask(client.url, "/health")


def assert_equal_answers_for_equal_seeds(client):
    """Checks that equal seeds give equal answers. Sends no requests in parallel: on a CPU, the batch size changes rounding."""
    texts = {
        seed: {client.chat(seed=seed)[1]["choices"][0]["message"]["content"] for _ in range(12)}
        for seed in range(3)
    }
    assert [len(found) for found in texts.values()] == [1, 1, 1], texts
    assert len(set.union(*texts.values())) > 1
    counts = client.answers()
    assert len(counts) == 2 and all(counts.values()), counts


def kill_host_under_load(cluster, client, host):
    """Kills a host while clients send requests. Returns (time of the kill, the Load with the answers)."""
    with Load(client, REQUESTS) as load:
        wait(lambda: len(load.answers) > REQUESTS // 3, "a third of the answers")
        cluster.leave(host)
        died = time.time()
        sent = load.number
    print(f"\n{len(load.repeated)} of {REQUESTS} requests were repeated; the host died at request {sent}")
    assert sent < REQUESTS, "the host died after the last request"
    assert not load.failed and len(load.answers) == REQUESTS, load.failed
    # OpenAI's client repeats a request if the status is 500 or higher
    assert all(status >= 500 for status, _ in load.repeated), load.repeated
    return died, load


def assert_feedback_is_accepted(client, answers, died):
    unknown = []
    for arrived, answer in answers:
        status, message = client.post("/v1/feedback", {"id": answer["id"], "label": False})
        if status == 404:
            unknown.append(arrived - died)
        else:
            assert status in (200, 400), message  # an empty completion has status 400
    print(f"{len(unknown)} answers were lost with the host, seconds before its death: {unknown}")
    assert all(-2 < seconds < 1 for seconds in unknown), unknown


def move_alias_under_load(cluster, client):
    with Load(client) as load:
        wait(lambda: len(load.answers) > CLIENTS, "answers")
        registry.client(cluster.mlflow).set_registered_model_alias("toy-policy", "champion", "2")
        wait(
            lambda: sum(map(bool, client.answers(SECOND).values())) == 2,
            "answers of version 2 by both replicas",
        )
    versions = [answer["system_fingerprint"] for _, answer in load.answers]
    assert not load.repeated and versions[0] == FIRST and set(versions) == {FIRST, SECOND}
    assert {client.chat(max_tokens=1)[1]["system_fingerprint"] for _ in range(20)} == {SECOND}
