"""Defines the metrics of a replica, and the Prometheus page with the metrics of all replicas."""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

REPORT_TIMEOUT_S = 30.0  # time without a report after which a replica is treated as lost
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The Prometheus metrics of one replica."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()  # prometheus_client's registry, sent to the recorder
        counter = partial(Counter, namespace="rlhf", registry=registry)
        gauge = partial(Gauge, namespace="rlhf", registry=registry)
        histogram = partial(Histogram, namespace="rlhf", registry=registry, buckets=SECONDS)
        models = ("model", "version")
        self.requests = counter("requests", "Answered requests", ("path", "status"))
        self.answers = counter("answers", "Chat completions, by model id and version", models)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts", ("version",))
        self.completion_tokens = counter("completion_tokens", "Tokens of completions", ("version",))
        self.first_token = histogram("first_token_seconds", "Seconds until the first token")
        self.seconds = histogram("answer_seconds", "Seconds until the last token")
        self.running = gauge("running_rows", "Completions that are being decoded")
        self.waiting = gauge("waiting_rows", "Completions that wait to join the batch")
        self.versions = gauge("versions", "Always 1; the labels are a model id and its version", models)


class MetricsPage:
    """Keeps the newest metrics of each replica, and formats them for Prometheus."""

    def __init__(self) -> None:
        self.newest: dict[str, tuple[float, list[Metric]]] = {}  # {replica: (time of the report, metrics)}

    def update(self, replica: str, metrics: list[Metric]) -> None:
        self.newest[replica] = (time.monotonic(), metrics)

    def collect(self) -> list[Metric]:
        """Returns the metrics of all live replicas for prometheus_client. Each sample gets the label `replica`."""
        merged: dict[str, Metric] = {}
        now = time.monotonic()
        for replica, (report_time, metrics) in self.newest.items():
            for metric in metrics if now - report_time < REPORT_TIMEOUT_S else ():
                copy = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    copy.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        return list(merged.values())

    def text(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        return generate_latest(registry)
