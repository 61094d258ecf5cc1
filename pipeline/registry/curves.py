"""Sends the metrics of a run to MLflow, TensorBoard and W&B while training continues."""

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

from pipeline.errors import InputError, error_summary
from pipeline.registry.store import Tracking, client, metric_key
from pipeline.system import storage


class Point(NamedTuple):
    """The value of a metric at a step."""

    key: str
    value: float
    time: int  # ms
    step: int
    final: bool


class Tracker:
    """Base class of trackers, which record the metrics of one run. The methods may be slow, and may raise any type of error."""

    name: str  # the tracker's name in warnings

    def recorded(self, key: str) -> dict[int, float]:
        """Returns {step: value} with the values of a metric that an earlier process of this run recorded."""
        return {}

    def write(self, points: list[Point]) -> None:
        """Records points. If this method raises an error, the caller repeats the call with the same points."""
        raise NotImplementedError

    def close(self, final: dict[str, float]) -> None:
        """Ends the recording. `final` holds the final metrics of the run."""


class MLflowRun(Tracker):
    """Records metrics in an MLflow run."""

    def __init__(self, uri: str, run_id: str):
        self.name, self.uri, self.run_id = f"MLflow at {uri}", uri, run_id

    def recorded(self, key: str) -> dict[int, float]:
        return {m.step: m.value for m in client(self.uri).get_metric_history(self.run_id, key)}

    def write(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.time, point.step) for point in points]
        client(self.uri).log_batch(self.run_id, metrics=metrics)


class TensorBoard(Tracker):
    """Writes event files for TensorBoard. A resumed run writes all steps again, because Worker.replay logs them again."""

    name = "TensorBoard"
    UPLOAD_S = 60.0  # time between two uploads to a bucket

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
    """Records metrics in a W&B run, which has the id of the MLflow run. The W&B project has the name of the MLflow experiment.

    If W&B is offline, a resumed run writes all steps again. If W&B is online, its server already has the earlier steps. W&B
    rejects values for a step before the current one, so final values of an earlier step appear only in the summary of the run.
    """

    name = "Weights & Biases"

    def __init__(self, run_id: str, tracking: Tracking):
        self.run_id, self.experiment, self.of = run_id, tracking.experiment, tracking.identity
        self.remote = storage.is_remote(self.of.folder)
        self.run: Any = None
        self.local = ""
        self.next = 0  # the smallest step that W&B still accepts
        self.row: dict[str, float] = {}  # metrics that were logged for step `next`

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
            # Prevents W&B from recording the command line, environment and code of this process.
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
        self.next = self.run.step  # first step to log; above 0 if W&B's server has earlier steps

    def close(self, final: dict[str, float]) -> None:
        if self.run is None:
            return
        if final:
            # an uncommitted row would later overwrite the summary
            self.run.log(self.row, step=self.next, commit=True)
            self.run.summary.update(final)
        self.run.finish()
        if self.remote and os.path.isdir(files := os.path.join(self.local, "wandb")):
            storage.store_folder(files, storage.join(self.of.folder, "wandb"))
            shutil.rmtree(self.local)


# {name in mlflow.report_to: function(tracking, id of the MLflow run) that returns the tracker}.
# The Python package and the extra that installs it have the same name.
TRACKERS: dict[str, Callable[[Tracking, str], Tracker]] = {
    "tensorboard": lambda tracking, _: TensorBoard(storage.join(tracking.identity.folder, "tensorboard")),
    "wandb": lambda tracking, run_id: WandB(run_id, tracking),
}


class Queue:
    """Holds the points of one run that one tracker has not recorded yet. A point is removed when the tracker has recorded it."""

    BATCH = 1000  # maximum number of points that one call of `write` gets

    def __init__(self, tracker: Tracker):
        self.tracker, self.failed = tracker, False
        self.pending: deque[Point] = deque()
        self.known: dict[str, dict[int, float]] = {}  # metric -> its recorded {step: value}

    def send(self, final: dict[str, float] | None = None) -> bool:
        """Sends the pending points. Ends the recording if `final` is given. Returns False if the tracker raises an error."""
        try:
            # An iterator over the deque would raise an error if training appended a point during the loop.
            while batch := [self.pending[index] for index in range(min(self.BATCH, len(self.pending)))]:
                self._record(batch)
                for _ in batch:
                    self.pending.popleft()
            if final is not None:
                self.tracker.close(final)
        except Exception as error:  # a logging error must not end a long run
            if not self.failed:
                why = f"{self.tracker.name} does not answer ({error_summary(error)})"
                print(f"warning: {why}; training continues, its metrics are sent later", flush=True)
            self.failed = True
            return False
        self.failed = False
        return True

    def _record(self, batch: list[Point]) -> None:
        """Records the points that the tracker lacks. A restarted worker repeats steps that the tracker may already have."""
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
    """Sends the metrics of one run to all trackers in a thread, so that a slow or failing server does not affect training.

    Once a second, the thread sends each tracker its points in order. If a tracker does not answer, the thread tries again one
    second later.

    MLflow's asynchronous logging (mlflow 3.17, AsyncLoggingQueue) does not retry a failed batch, and may reorder batches.
    Replace `Curves` when MLflow retries.
    """

    INTERVAL_S = 1.0  # time between two attempts to send
    CLOSE_TIMEOUT_S = 120.0  # time that `close` waits for a server that does not answer

    def __init__(self, *trackers: Tracker):
        self.queues = [Queue(tracker) for tracker in trackers]
        self.final: dict[str, float] = {}
        self.closing, self.abandoned = threading.Event(), False
        self.thread = threading.Thread(target=self._send_rounds, name="metrics", daemon=True)
        self.thread.start()

    def log(self, metrics: dict[str, float], step: int, final: bool = False) -> None:
        """Queues the numeric metrics. If `final` is true, new values replace recorded values of the same step."""
        now = int(time.time() * 1000)
        numbers = {metric_key(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        self.final |= numbers if final else {}
        for queue in self.queues:
            queue.pending.extend(Point(key, value, now, step, final) for key, value in numbers.items())

    def close(self, timeout: float | None = None) -> None:
        """Sends the queued points. Waits at most `timeout` seconds (default CLOSE_TIMEOUT_S) for trackers that do not answer."""
        if self.abandoned:
            return
        self.closing.set()
        self.thread.join(self.CLOSE_TIMEOUT_S if timeout is None else timeout)
        self.abandoned = True
        for queue in self.queues:
            if queue.pending:
                print(
                    f"warning: {len(queue.pending)} metric values were not recorded: {queue.tracker.name} was unreachable. "
                    "The checkpoints contain these values. If the run resumes, the same command sends the missing values",
                    flush=True,
                )

    def _send_rounds(self) -> None:
        left = self.queues
        while left and not self.abandoned:
            if self.closing.wait(self.INTERVAL_S):  # no points are queued after `closing` is set
                left = [queue for queue in left if not queue.send(self.final)]
                time.sleep(self.INTERVAL_S if left else 0)
            else:
                for queue in left:
                    queue.send()


def open_curves(tracking: Tracking, run_id: str) -> Curves:
    """Returns a Curves object that sends a run's metrics to MLflow and to the trackers of mlflow.report_to."""
    others = [TRACKERS[name](tracking, run_id) for name in dict.fromkeys(tracking.also)]
    return Curves(MLflowRun(tracking.uri, run_id), *others)


def check_trackers(also: list[str]) -> None:
    """Raises InputError if a package for `mlflow.report_to` is not installed, or if there are no credentials for W&B."""
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
            "found wandb, but no credentials: export WANDB_API_KEY=..., or WANDB_MODE=offline to upload later with `wandb sync`",
            key="mlflow.report_to",
        )
