"""Sends the metrics of a run to MLflow, and to TensorBoard and W&B if `mlflow.report_to` names them, while training continues."""

import contextlib
import importlib.util
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import InputError, summary
from pipeline.registry.store import Tracking, client, metric_key
from pipeline.system import storage


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    time: int  # ms
    step: int
    final: bool


class Tracker:
    """Records the metrics of one run. Its methods may take long, and raise anything that its library raises."""

    name: str  # in a warning

    def recorded(self, key: str) -> dict[int, float]:
        """Returns the values of a metric that an earlier process recorded: {step: value}."""
        return {}

    def write(self, points: list[Point]) -> None:
        """Records points. After a failure it is called again with the same points."""
        raise NotImplementedError

    def close(self, final: dict[str, float]) -> None:
        """Ends the recording. `final` are the run's results."""


class MLflowRun(Tracker):
    """A run in MLflow."""

    def __init__(self, uri: str, run_id: str):
        self.name, self.uri, self.run_id = f"MLflow at {uri}", uri, run_id

    def recorded(self, key: str) -> dict[int, float]:
        return {m.step: m.value for m in client(self.uri).get_metric_history(self.run_id, key)}

    def write(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.time, point.step) for point in points]
        client(self.uri).log_batch(self.run_id, metrics=metrics)


class TensorBoard(Tracker):
    """Event files in a folder. A resumed run writes them again, because it repeats its curve (Worker.replay)."""

    name = "TensorBoard"
    UPLOAD_S = 60.0  # time between two copies into a bucket

    def __init__(self, folder: str):
        self.folder, self.remote, self.uploaded = folder, storage.is_remote(folder), time.monotonic()
        self.writer: Any = None
        self.local = ""

    def write(self, points: list[Point]) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            storage.remove(self.folder)
            self.local = tempfile.mkdtemp() if self.remote else self.folder
            self.writer = SummaryWriter(self.local)
        for point in points:
            self.writer.add_scalar(point.key, point.value, point.step, point.time / 1000)
        self.writer.flush()
        if self.remote and time.monotonic() - self.uploaded > self.UPLOAD_S:
            storage.store_folder(self.local, self.folder)
            self.uploaded = time.monotonic()

    def close(self, final: dict[str, float]) -> None:
        if self.writer is None:
            return
        self.writer.close()
        if self.remote:
            storage.store_folder(self.local, self.folder)
            shutil.rmtree(self.local)


class WandB(Tracker):
    """A run in Weights & Biases, with the id of the MLflow run, in the project named like the experiment.

    Each process writes an offline run from the start, but a server already has the earlier steps. W&B's steps only ascend, so
    final values of an earlier step are only in the run's summary.
    """

    name = "Weights & Biases"

    def __init__(self, run_id: str, tracking: Tracking):
        self.run_id, self.experiment, self.of = run_id, tracking.experiment, tracking.run
        self.remote = storage.is_remote(self.of.folder)
        self.run: Any = None
        self.local = ""
        self.next = 0  # the first step that W&B still accepts
        self.row: dict[str, float] = {}  # metrics of that step

    def write(self, points: list[Point]) -> None:
        if self.run is None:
            self._begin()
        for step, group in itertools.groupby(points, key=lambda point: point.step):
            if step >= self.next:
                self.next, self.row = step, {point.key: point.value for point in group}
                self.run.log(self.row, step=step)

    def _begin(self) -> None:
        import wandb

        self.local = self.local or (tempfile.mkdtemp() if self.remote else self.of.folder)
        for earlier in Path(self.local, "wandb").glob(f"offline-run-*-{self.run_id}"):
            shutil.rmtree(earlier)
        self.run = wandb.init(
            project=self.experiment,
            name=self.of.name,
            id=self.run_id,
            resume="allow",
            job_type=self.of.stage,
            config=self.of.settings,
            dir=self.local,
            # W&B must not record the command line, environment and code of this process.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self.next = self.run.step  # above 0 if a server has the steps of an earlier process

    def close(self, final: dict[str, float]) -> None:
        if self.run is None:
            return
        if final:
            self.run.log(self.row, step=self.next, commit=True)  # an open row would overwrite the summary
            self.run.summary.update(final)
        self.run.finish()
        if self.remote and os.path.isdir(files := os.path.join(self.local, "wandb")):
            storage.store_folder(files, storage.join(self.of.folder, "wandb"))
            shutil.rmtree(self.local)


# {name in `mlflow.report_to`, also of the package and its extra: f(tracking, id of the MLflow run) -> tracker}
TRACKERS: dict[str, Callable[[Tracking, str], Tracker]] = {
    "tensorboard": lambda tracking, _: TensorBoard(storage.join(tracking.run.folder, "tensorboard")),
    "wandb": lambda tracking, run_id: WandB(run_id, tracking),
}


class MetricLog:
    """Sends the metrics of one run to a tracker from a thread, so that training neither waits for a server nor fails with it.

    Values are sent in order, about once a second, up to 1000 per call. The first failure prints a warning; retries slow down.
    A restarted worker repeats the steps after its checkpoint: values that the run already has are not recorded twice.

    MLflow's own asynchronous logging (mlflow 3.17, AsyncLoggingQueue) drops a batch whose call failed, and sends in any order.
    Replace this class when MLflow retries (tests/test_upstream.py notices).
    """

    # Time between two calls, and between two tries while the server does not answer
    INTERVAL_S, MAX_INTERVAL_S = 1.0, 60.0
    CLOSE_TIMEOUT_S = 120.0  # time that `close` waits for a server that does not answer
    MAX_PENDING = 500_000  # values that wait for a server, about 100 MB; the oldest are dropped beyond that

    FIRST_CALL = threading.Lock()  # first calls import libraries, which two threads must not do at once

    def __init__(self, tracker: Tracker):
        self.tracker = tracker
        self.known: dict[str, dict[int, float]] = {}  # metric -> its recorded {step: value}
        self.pending: deque[Point] = deque(maxlen=self.MAX_PENDING)
        self.queued = self.sent = 0  # number of values; the thread counts only values that it has sent
        self.final: dict[str, float] = {}
        self.failures, self.closing, self.abandoned = 0, threading.Event(), False
        self.thread = threading.Thread(target=self._send_all, name="metrics", daemon=True)
        self.thread.start()

    def log(self, metrics: dict[str, float], step: int, final: bool = False) -> None:
        """Queues the numbers of `metrics`. A `final` value is recorded even if the step has another value."""
        now = int(time.time() * 1000)
        numbers = {metric_key(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        self.queued += len(numbers)
        self.final |= numbers if final else {}
        self.pending.extend(Point(key, value, now, step, final) for key, value in numbers.items())

    def close(self, timeout: float | None = None) -> None:
        """Sends the rest. Waits at most `timeout` seconds (default CLOSE_TIMEOUT_S) for an unreachable server."""
        self.closing.set()
        self.thread.join(self.CLOSE_TIMEOUT_S if timeout is None else timeout)
        if self.queued > self.sent and not self.abandoned:
            print(
                f"warning: {self.queued - self.sent} metric values were not recorded: {self.tracker.name} was unreachable. The "
                "checkpoints hold the curve: if the run continues, the same command sends what is missing",
                flush=True,
            )
        self.abandoned = True

    def _send_all(self) -> None:
        batch: list[Point] = []
        lock: Any = self.FIRST_CALL
        while not self.abandoned:
            if self.failures and self.closing.is_set():
                time.sleep(self.INTERVAL_S)
            else:
                self.closing.wait(min(self.INTERVAL_S * 2**self.failures, self.MAX_INTERVAL_S))
            closing = self.closing.is_set()  # if so, `pending` holds the last values
            while self.pending and len(batch) < 1000:
                batch.append(self.pending.popleft())
            try:
                if batch:
                    with lock:
                        self._send(batch)
                    lock = contextlib.nullcontext()
                elif closing:
                    self.tracker.close(self.final)
                    return
            except Exception as error:  # a logging error must not end a long run
                if not self.failures:
                    print(
                        f"warning: {self.tracker.name} does not answer ({summary(error)}); training continues, its metrics are "
                        "sent later",
                        flush=True,
                    )
                self.failures = min(self.failures + 1, 10)
                continue
            self.failures = 0
            self.sent += len(batch)
            batch = []

    def _send(self, batch: list[Point]) -> None:
        new: dict[str, dict[int, float]] = defaultdict(dict)
        points = []
        for point in batch:
            if point.key not in self.known:
                self.known[point.key] = self.tracker.recorded(point.key)
            before = new[point.key].get(point.step, self.known[point.key].get(point.step))
            if before is None or (point.final and before != point.value):
                points.append(point)
                new[point.key][point.step] = point.value
        if points:
            self.tracker.write(points)
        for key, values in new.items():
            self.known[key] |= values


class Curves:
    """Sends the metrics of one run to all trackers, each from a separate thread."""

    def __init__(self, tracking: Tracking, run_id: str):
        others = [TRACKERS[name](tracking, run_id) for name in dict.fromkeys(tracking.also)]
        self.logs = [MetricLog(tracker) for tracker in (MLflowRun(tracking.uri, run_id), *others)]

    def log(self, metrics: dict[str, float], step: int, final: bool = False) -> None:
        for log in self.logs:
            log.log(metrics, step, final)

    def close(self, timeout: float | None = None) -> None:
        for log in self.logs:
            log.close(timeout)


def check_trackers(also: list[str]) -> None:
    """Raises InputError if a package of `mlflow.report_to` is missing here (all nodes share one image), or W&B has no account."""
    for name in also:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"found {name}, which is not installed here; run .venv/bin/pip install -c constraints.txt -e "
                f'".[{name}]" (on every node), or remove it',
                key="mlflow.report_to",
            )
    if "wandb" not in also or os.environ.get("WANDB_MODE", "online") != "online":
        return
    from requests.utils import get_netrc_auth  # reads the file that `wandb login` writes

    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not os.environ.get("WANDB_API_KEY") and get_netrc_auth(server) is None:
        raise InputError(
            "found wandb, and no account: export WANDB_API_KEY=..., or WANDB_MODE=offline to upload later with `wandb sync`",
            key="mlflow.report_to",
        )
