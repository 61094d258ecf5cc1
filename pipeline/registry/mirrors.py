"""The curves of a run in TensorBoard and Weights & Biases too (`mlflow.also`): the names and steps that MLflow has.

MLflow holds the curve over all attempts of a run. A process therefore begins with that, in place of what an earlier one left,
and goes on with what is new: in a run that was killed and continued no step is there twice, and none is missing.
"""

from __future__ import annotations

import glob
import importlib.util
import itertools
import netrc
import os
import shutil
import tempfile
import time
from collections import defaultdict
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import Job
from pipeline.errors import InputError
from pipeline.registry.metrics import MetricLog, MLflowRun, Point, Target, recorded
from pipeline.registry.server import client, tracking_uri
from pipeline.system import storage


class Curves:
    """The metrics of one run on their way to MLflow and to where else the job wants them, each by a thread of its own."""

    def __init__(self, job: Job, run_id: str):
        uri = tracking_uri(job)
        targets: list[Target] = [MLflowRun(uri, run_id)]
        if "tensorboard" in job.mlflow.also:
            targets.append(TensorBoard(uri, run_id, storage.join(job.folder, "tensorboard")))
        if "wandb" in job.mlflow.also:
            targets.append(WandB(uri, run_id, job))
        self.logs = [MetricLog(target) for target in targets]

    def log(self, metrics: dict[str, float], step: int, final: bool = False) -> None:
        """See MetricLog."""
        for log in self.logs:
            log.log(metrics, step, final)

    def close(self, patience: float | None = None) -> None:
        """See MetricLog."""
        for log in self.logs:
            log.close(patience)


def check_mirrors(job: Job) -> None:
    """Refuses a place in `mlflow.also` whose package is not installed here, or that nobody is logged in to.

    Nodes are made alike: what is missing here is missing there.

    Raises:
        InputError: with what to type.
    """
    for package in job.mlflow.also:
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"found {package}, which is not installed here; type .venv/bin/pip install -c constraints.txt -e "
                f'".[{package}]" (on every node), or take it out',
                key="mlflow.also",
            )
    online = os.environ.get("WANDB_MODE", "online") == "online"
    if "wandb" in job.mlflow.also and online and not _logged_in():
        raise InputError(
            "found wandb, and no account: export WANDB_API_KEY=..., or WANDB_MODE=offline and upload later with `wandb sync`",
            key="mlflow.also",
        )


def _logged_in() -> bool:
    """Whether there is an API key where wandb looks for one: the environment, or the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def curve(uri: str, run_id: str) -> list[Point]:
    """All that MLflow has of a run, steps ascending; of a step that has a final value, that one."""
    mlflow = client(uri)
    latest = {}
    for key in mlflow.get_run(run_id).data.metrics:
        for one in sorted(mlflow.get_metric_history(run_id, key), key=lambda m: m.timestamp):
            latest[one.step, key] = Point(key, one.value, one.timestamp, one.step, False)
    return [latest[place] for place in sorted(latest)]


class TensorBoard:
    """Event files in a folder: one run of TensorBoard.

    In a bucket they appear every `UPLOAD` seconds.
    """

    name = "TensorBoard"
    UPLOAD = 60.0

    def __init__(self, uri: str, run_id: str, folder: str):
        self.uri, self.run_id, self.folder = uri, run_id, folder
        self.writer: Any = None
        self.local = ""
        self.uploaded = time.monotonic()
        self.known: dict[str, dict[int, float]] = defaultdict(dict)

    def write(self, points: list[Point]) -> None:
        if self.writer is None:
            self._begin()
        self._add(points)
        if storage.is_remote(self.folder) and time.monotonic() - self.uploaded > self.UPLOAD:
            storage.store_folder(self.local, self.folder)
            self.uploaded = time.monotonic()

    def _begin(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        before = curve(self.uri, self.run_id)
        storage.remove(self.folder)
        self.local = tempfile.mkdtemp() if storage.is_remote(self.folder) else self.folder
        self.writer = SummaryWriter(self.local)
        try:
            self._add(before)
        except BaseException:
            self.writer, self.known = None, defaultdict(dict)  # the next try begins again
            raise

    def _add(self, points: list[Point]) -> None:
        for point in points:
            if not recorded(point, self.known[point.key]):
                self.writer.add_scalar(point.key, point.value, point.step, point.time / 1000)
                self.known[point.key][point.step] = point.value
        self.writer.flush()

    def close(self) -> None:
        if self.writer is None:
            return
        self.writer.close()
        if storage.is_remote(self.folder):
            storage.store_folder(self.local, self.folder)
            shutil.rmtree(self.local)


class WandB:
    """A run in Weights & Biases: the experiment is its project, and it has the id of the MLflow run.

    Who logs in, and whether to an account or offline, is said by wandb's own variables: WANDB_API_KEY, WANDB_MODE,
    WANDB_ENTITY, WANDB_BASE_URL. The files of an offline run lie in the run's folder, in wandb/.

    Steps are W&B's own, which only ascend: what is final of an earlier step is in the run's summary alone, where W&B shows
    the figures of a run.
    """

    name = "Weights & Biases"

    def __init__(self, uri: str, run_id: str, job: Job):
        self.uri, self.run_id, self.job = uri, run_id, job
        self.run: Any = None
        self.local = ""
        self.next = 0  # the first step that W&B still takes
        self.row: dict[str, float] = {}  # of that step
        self.final: dict[str, float] = {}
        self.known: dict[str, dict[int, float]] = defaultdict(dict)

    def write(self, points: list[Point]) -> None:
        if self.run is None:
            self._begin()
        self._add(points)

    def _begin(self) -> None:
        import wandb

        before = curve(self.uri, self.run_id)
        remote = storage.is_remote(self.job.folder)
        self.local = self.local or (tempfile.mkdtemp() if remote else self.job.folder)
        for left in glob.glob(os.path.join(glob.escape(self.local), "wandb", f"offline-run-*-{self.run_id}")):
            shutil.rmtree(left)
        self.run = wandb.init(
            project=self.job.mlflow.experiment,
            name=self.job.run.name,
            id=self.run_id,
            resume="allow",
            job_type=self.job.stage,
            config=self.job.to_dict(),
            dir=self.local,
            # The command line, the environment and the code of this process are nobody else's business.
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
        self.next = self.run.step  # above 0 where a server has the steps of an earlier process
        try:
            self._add(before)
        except BaseException:
            self.run, self.known = None, defaultdict(dict)  # the next try begins again
            raise

    def _add(self, points: list[Point]) -> None:
        new = [point for point in points if not recorded(point, self.known[point.key])]
        for step, group in itertools.groupby(new, key=lambda point: point.step):
            row = {point.key: point.value for point in group}
            if step >= self.next:
                self.run.log(row, step=step)
                self.next, self.row = step, row
            for key, value in row.items():
                self.known[key][step] = value
        self.final |= {point.key: point.value for point in points if point.final}

    def close(self) -> None:
        if self.run is None:
            return
        if self.final:
            self.run.log(
                self.row, step=self.next, commit=True
            )  # open until now, it would overwrite the summary
            self.run.summary.update(self.final)
        self.run.finish()
        if storage.is_remote(self.job.folder) and os.path.isdir(files := os.path.join(self.local, "wandb")):
            storage.store_folder(files, storage.join(self.job.folder, "wandb"))
            shutil.rmtree(self.local)
