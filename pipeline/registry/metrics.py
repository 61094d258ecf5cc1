"""The curves of a run on their way to MLflow, and to where else the job wants them, while training goes on."""

import contextlib
import threading
import time
from collections import deque
from typing import Any, NamedTuple, Protocol

from pipeline.registry.server import client, first_line, metric_key


class Point(NamedTuple):
    """One value of one metric on its way to MLflow."""

    key: str
    value: float
    time: int  # ms
    step: int
    final: bool


class Target(Protocol):
    """Where the metrics of one run are recorded. Its methods may take long, and raise whatever its library raises."""

    name: str  # in a warning

    def write(self, points: list[Point]) -> None:
        """Records the points that it does not have yet. After a failure it is asked again, with the same points first."""

    def close(self) -> None:
        """Ends the recording: nothing is written any more."""


class MLflowRun:
    """A run in MLflow, as a target."""

    def __init__(self, uri: str, run_id: str):
        self.name, self.uri, self.run_id = f"MLflow at {uri}", uri, run_id
        self.client: Any = None  # made by the log's thread: the import and the migrations take a second
        self.known: dict[str, dict[int, float]] = {}  # of each metric, what the run has: {step: value}

    def write(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        self.client = self.client or client(self.uri)
        for key in {point.key for point in points} - self.known.keys():
            self.known[key] = {m.step: m.value for m in self.client.get_metric_history(self.run_id, key)}
        new: dict[str, dict[int, float]] = {key: {} for key in self.known}
        metrics = []
        for point in points:
            if not recorded(point, self.known[point.key]) and not recorded(point, new[point.key]):
                metrics.append(Metric(point.key, point.value, point.time, point.step))
                new[point.key][point.step] = point.value
        if metrics:
            self.client.log_batch(self.run_id, metrics=metrics)
        for key, values in new.items():
            self.known[key] |= values

    def close(self) -> None:
        pass


def recorded(point: Point, known: dict[int, float]) -> bool:
    """Whether a target that has these values of the metric, {step: value}, has the point, too."""
    return point.step in known and (not point.final or known[point.step] == point.value)


class MetricLog:
    """Metrics of one run, sent by a thread of its own: training never waits for the server, nor fails with it.

    Values are sent in order, about once a second, 1000 a call. Logs the first failure, then retries with backoff; `close`
    waits for a limited time and says how many values were not recorded. A restarted worker repeats the steps after its
    checkpoint: values that the run already has are not recorded twice.

    Not MLflow's own asynchronous logging (MlflowClient.log_batch(synchronous=False), mlflow 3.17, AsyncLoggingQueue): it drops
    a batch whose call failed, sends from ten threads in any order, keeps a queue without bound, and waits for the server
    without bound at exit. Replace this class when MLflow retries (tests/test_upstream.py notices).
    """

    EVERY, LONGEST = 1.0, 60.0  # seconds between two calls; between two tries while the server is away
    PATIENCE = 120.0  # seconds that `close` waits for a server that is away
    ROOM = 500_000  # values kept for it, about 100 MB; beyond that the oldest are given up

    # First calls import libraries, mlflow among them, which two threads at once cannot: they wait for each other.
    BEGINNING = threading.Lock()

    def __init__(self, target: Target):
        self.target, self.begun = target, False
        self.pending: deque[Point] = deque()
        self.given_up = 0
        self.failures, self.closing = 0, False
        self.wake = threading.Condition()
        self.thread = threading.Thread(target=self._send_all, name="metrics", daemon=True)
        self.thread.start()

    def log(self, metrics: dict[str, float], step: int, final: bool = False) -> None:
        """Takes the numbers of `metrics`; `final` ones are also recorded beside another value of the same step."""
        now = int(time.time() * 1000)
        with self.wake:
            self.pending.extend(
                Point(metric_key(k), float(v), now, step, final)
                for k, v in metrics.items()
                if isinstance(v, int | float)
            )
            while len(self.pending) > self.ROOM:
                self.pending.popleft()
                self.given_up += 1

    def close(self, patience: float | None = None) -> None:
        """Sends what is left; a server that is away is waited for, at most `patience` seconds (PATIENCE)."""
        with self.wake:
            self.closing = True
            self.wake.notify()
        self.thread.join(self.PATIENCE if patience is None else patience)
        with self.wake:
            lost, self.given_up = len(self.pending) + self.given_up, 0
            self.pending.clear()  # the thread, should it still wait for an answer, has nothing left to do
        if lost:
            print(
                f"warning: {lost} metric values were not recorded: {self.target.name} was unreachable. The checkpoints hold the "
                "curve: the same command sends what is missing if the run goes on",
                flush=True,
            )

    def _send_all(self) -> None:
        while True:
            with self.wake:
                pause = min(self.EVERY * 2**self.failures, self.EVERY if self.closing else self.LONGEST)
                self.wake.wait_for(lambda: self.closing and not self.failures, timeout=pause)
                batch = [self.pending[i] for i in range(min(1000, len(self.pending)))]
                given_up = self.given_up
            if not batch and not self.closing:
                continue
            try:
                if not batch:
                    self.target.close()
                    return
                with contextlib.nullcontext() if self.begun else self.BEGINNING:
                    self.target.write(batch)
                self.begun = True
            except Exception as error:  # a ten-hour run must not die of its bookkeeping
                if not self.failures:
                    print(
                        f"warning: {self.target.name} does not answer ({first_line(error)}); training goes on, its metrics are "
                        "sent later",
                        flush=True,
                    )
                self.failures = min(self.failures + 1, 10)
                continue
            self.failures = 0
            with self.wake:
                for _ in range(len(batch) - (self.given_up - given_up)):
                    if self.pending:
                        self.pending.popleft()
