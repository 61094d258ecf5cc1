"""Tests two replicas on one machine: their answers, their metrics, and that a killed replica is replaced."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import ask, chat, served

from tools.chaos.runs import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("embedded_ray")]


def answers(server):
    """Returns {replica: number of its answers} for all replicas on the metrics page."""
    counts = {}
    for family in text_string_to_metric_families(ask(server.url, "/metrics")[2].decode()):
        for sample in family.samples:
            counts.setdefault(sample.labels["replica"], 0)
            if sample.name == "rlhf_answers_total":
                counts[sample.labels["replica"]] += int(sample.value)
    return counts


def text_of(server, seed):
    """Returns the answer. Repeats a failed request once, as OpenAI's client does."""
    for _ in range(2):
        try:
            status, answer = chat(server.url, seed=seed)
        except OSError:
            status = 0
        if status == 200:
            return answer["choices"][0]["message"]["content"]
        time.sleep(1)
    raise AssertionError(f"the second request failed, too: {status}")


def test_two_replicas_answer_alike_and_a_killed_replica_is_replaced(storage, models):
    with served(storage, "scaling.num_workers=2") as server:
        until(lambda: len(answers(server)) == 2, "two replicas")
        texts = {seed: {text_of(server, seed) for _ in range(12)} for seed in range(3)}
        assert [len(found) for found in texts.values()] == [1, 1, 1], texts
        assert len(set.union(*texts.values())) > 1
        until(lambda: all(answers(server).values()), "answers of both replicas")

        before = set(answers(server))
        running = psutil.Process().children(recursive=True)
        replicas = [one for one in running if "ServeReplica:serve:server" in " ".join(one.cmdline())]
        assert len(replicas) == 2
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda seed: text_of(server, seed), [0, 1, 2] * 16)
            time.sleep(0.1)
            os.kill(replicas[0].pid, signal.SIGKILL)
            assert len(list(found)) == 48
        until(lambda: len(set(answers(server)) - before) == 1, "the metrics of a new replica")
