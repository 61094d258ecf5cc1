"""The only file that knows MLflow: runs and their metrics, lineage, the gate, versions, aliases, load back.

The driver owns a run: it opens it before training, registers what came out, and ends it. Rank 0 of the workers
logs metrics to the same run by its id. A registered version is the adapter folder as it was saved (adapter, head,
tokenizer, lineage.json), with tags that say where it comes from. Whatever is registered has been downloaded again
first and compared file by file.
"""

import json
import logging
import os
import threading
import time
import warnings
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import storage
from pipeline.config import OPERATORS, Job, parse_gate
from pipeline.errors import InputError
from pipeline.lineage import folder_digests


@dataclass(frozen=True)
class Version:
    """One registered model version; `alias` is None when the gate kept it back, and `gate` says why."""

    name: str
    version: str
    alias: str | None
    gate: str

    def __str__(self) -> str:
        return f"{self.name} v{self.version}" + (f" @{self.alias}" if self.alias else "")


def tracking_uri(job: Job) -> str:
    """The tracking server of a job: its own, the environment's, or a SQLite file beside the runs."""
    return uri_of(job.mlflow.tracking_uri, job.run.storage_path)


def uri_of(given: str | None, storage_path: str) -> str:
    """The same from the two keys of a job that decide it.

    Raises:
        InputError: when the runs lie in a bucket and no server is named.
    """
    uri = given or os.environ.get("MLFLOW_TRACKING_URI")
    if uri:
        return uri
    if storage.is_remote(storage_path):
        raise InputError(
            f"mlflow.tracking_uri: missing; with run.storage_path={storage_path} there is no local folder for "
            "a SQLite file. Name a tracking server, e.g. mlflow.tracking_uri=http://HEAD:5000"
        )
    return f"sqlite:///{storage.absolute(storage_path)}/mlflow.db"


def client(uri: str) -> Any:
    """An MlflowClient that gives up within seconds instead of minutes, and whose migrations do not fill the log."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # its import sets its logger's level from this
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    # Not mlflow.set_tracking_uri: it sets MLFLOW_TRACKING_URI for this process and all jobs after this one.
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def check(job: Job) -> None:
    """Proves before any work that the tracking server answers.

    Raises:
        InputError: when it does not, with what to type next.
    """
    uri = tracking_uri(job)
    try:
        if uri.startswith("sqlite:///"):
            os.makedirs(os.path.dirname(uri.removeprefix("sqlite:///")), exist_ok=True)
        client(uri).search_experiments(max_results=1)
    except Exception as error:  # whatever the store's driver raises: it is the address that is wrong
        reason = str(error).splitlines()[0][:300]
        raise InputError(
            f"mlflow.tracking_uri: {uri!r} does not answer ({type(error).__name__}: {reason}); start the server, or "
            "leave the key out to use a SQLite file in run.storage_path"
        ) from error


# ------------------------------------------------------------------------------------------------------- runs


@contextmanager
def run(job: Job, digests: dict[str, str], anew: bool = False):
    """Opens the MLflow run of a job, yields its id, and ends it as FINISHED or FAILED.

    A run that was cut short is opened again by the same `run.name`, so that one job stays one run. `anew` starts another
    one instead; a run that its driver left RUNNING when it was killed is then ended as KILLED.
    """
    mlflow = client(tracking_uri(job))
    run_key = storage.join(storage.absolute(job.run.storage_path), str(job.run.name))
    experiment = _experiment(mlflow, job)
    found = mlflow.search_runs(
        [experiment],
        filter_string=f"tags.`pipeline.run` = '{run_key}'",
        max_results=1,
        order_by=["start_time DESC"],
    )
    before = found[0].info if found and found[0].info.status != "FINISHED" else None
    if before and not anew:
        run_id = before.run_id
        mlflow.update_run(run_id, status="RUNNING")
    else:
        if before and before.status == "RUNNING":
            mlflow.set_terminated(before.run_id, "KILLED")
        tags = {"pipeline.run": run_key, "stage": job.stage}
        run_id = mlflow.create_run(experiment, run_name=job.run.name, tags=tags).info.run_id
        _log_inputs(mlflow, run_id, job, digests)
    try:
        yield run_id
    except BaseException:
        try:
            mlflow.set_terminated(run_id, "FAILED")
        except Exception as error:  # the failure itself is what its user has to see
            print(f"warning: MLflow run {run_id} stays RUNNING: the server is away ({type(error).__name__})")
        raise
    wait_for_server(job)
    mlflow.set_terminated(run_id, "FINISHED")


def wait_for_server(job: Job, minutes: float = 10.0) -> None:
    """Returns as soon as the tracking server answers; after `minutes` whatever follows says what is wrong."""
    give_up, pause = time.monotonic() + 60 * minutes, 1.0
    while True:
        try:
            client(tracking_uri(job)).search_experiments(max_results=1)
            return
        except Exception as error:  # whatever the store's driver raises
            if time.monotonic() > give_up:
                return
            if pause == 1.0:
                print(
                    f"MLflow at {tracking_uri(job)} does not answer ({type(error).__name__}); waiting up to "
                    f"{minutes:.0f} minutes to register. The adapter is safe in {job.run.storage_path}/{job.run.name}",
                    flush=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def _experiment(mlflow: Any, job: Job) -> str:
    found = mlflow.get_experiment_by_name(job.mlflow.experiment)
    if found:
        return found.experiment_id
    location = None
    if tracking_uri(job).startswith("sqlite:"):  # a server decides for itself where artifacts go
        location = storage.join(storage.absolute(job.run.storage_path), "artifacts")
    return mlflow.create_experiment(job.mlflow.experiment, artifact_location=location)


def _log_inputs(mlflow: Any, run_id: str, job: Job, digests: dict[str, str]) -> None:
    """The resolved job, its parameters, and each data set by its digest (no row is stored or read)."""
    import mlflow as mlflow_api
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import DatasetInput, InputTag, Param

    resolved = job.to_dict()
    mlflow.log_dict(run_id, resolved, "job.json")
    params = [Param(key, str(value)[:500]) for key, value in _flatten(resolved)]
    for start in range(0, len(params), 100):  # the store's limit for one call
        mlflow.log_batch(run_id, params=params[start : start + 100])
    inputs = []
    for context, digest in digests.items():
        paths = getattr(job.data, context, None) or job.data.train
        with (
            warnings.catch_warnings()
        ):  # a local path can be a "local" source in two ways, which are the same
            warnings.simplefilter("ignore")
            source = mlflow_api.data.dataset_source_registry.resolve_dataset_source(str(_first(paths)))
        dataset = MetaDataset(source, name=context, digest=digest[:36])
        inputs.append(DatasetInput(dataset._to_mlflow_entity(), [InputTag("mlflow.data.context", context)]))
    mlflow.log_inputs(run_id, inputs)


def _first(paths: Any) -> Any:
    return paths[0] if isinstance(paths, list) else paths


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flatten(item, f"{prefix}{key}.")]
    return [] if value is None else [(prefix.rstrip("."), value)]


class Point(NamedTuple):
    """One value of one metric on its way to MLflow."""

    key: str
    value: float
    time: int  # ms
    step: int
    final: bool


class MetricLog:
    """Metrics of one run, sent by a thread of its own: training waits for no server, and a server that is away stops nothing.

    What is logged is sent in order, about once a second, 1000 values a call. A server that is away is named once and tried
    again with growing pauses; `close` waits for it a while, and says what was not recorded. A restarted worker repeats the
    steps after its checkpoint: values that the run already has are not recorded twice.
    """

    EVERY, LONGEST = 1.0, 60.0  # seconds between two calls; between two tries while the server is away
    PATIENCE = 120.0  # seconds that `close` waits for a server that is away
    ROOM = 500_000  # values kept for it, about 100 MB; beyond that the oldest are given up

    def __init__(self, uri: str, run_id: str):
        self.uri, self.run_id = uri, run_id
        self.client: Any = None  # made by the thread: its import and the store's migrations take a second
        self.pending: deque[Point] = deque()
        self.given_up = 0
        self.known: dict[str, dict[int, float]] = {}  # of each metric, what the run had before: {step: value}
        self.failures, self.closing = 0, False
        self.wake = threading.Condition()
        self.thread = threading.Thread(target=self._send_all, name="metrics", daemon=True)
        self.thread.start()

    def log(self, metrics: dict[str, float], step: int, final: bool = False) -> None:
        """Takes the numbers of `metrics`; `final` ones are also recorded beside another value of the same step."""
        now = int(time.time() * 1000)
        with self.wake:
            self.pending.extend(
                Point(_key(k), float(v), now, step, final)
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
                f"warning: {lost} metric values of run {self.run_id} were not recorded in MLflow: {self.uri} was away. The "
                "checkpoints hold the curve: the same command sends what is missing if the run goes on",
                flush=True,
            )

    def _send_all(self) -> None:
        while True:
            with self.wake:
                pause = min(self.EVERY * 2**self.failures, self.EVERY if self.closing else self.LONGEST)
                self.wake.wait_for(lambda: self.closing and not self.failures, timeout=pause)
                batch = [self.pending[i] for i in range(min(1000, len(self.pending)))]
                given_up = self.given_up
                if not batch and self.closing:
                    return
            if not batch:
                continue
            try:
                self._send(batch)
            except Exception as error:  # a ten-hour run must not die of its bookkeeping
                if not self.failures:
                    reason = str(error).splitlines()[0][:200] if str(error) else ""
                    print(
                        f"warning: MLflow at {self.uri} does not answer ({type(error).__name__}: {reason}); training goes "
                        "on, its metrics are sent later",
                        flush=True,
                    )
                self.failures = min(self.failures + 1, 10)

                continue
            self.failures = 0
            with self.wake:
                for _ in range(len(batch) - (self.given_up - given_up)):
                    if self.pending:
                        self.pending.popleft()

    def _send(self, batch: list[Point]) -> None:
        from mlflow.entities import Metric

        self.client = self.client or client(self.uri)
        for key in {point.key for point in batch} - self.known.keys():
            self.known[key] = {m.step: m.value for m in self.client.get_metric_history(self.run_id, key)}
        new = [Metric(p.key, p.value, p.time, p.step) for p in batch if not self._recorded(p)]
        if new:
            self.client.log_batch(self.run_id, metrics=new)

    def _recorded(self, point: Point) -> bool:
        before = self.known[point.key]
        return point.step in before and (not point.final or before[point.step] == point.value)


def _key(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)


# ------------------------------------------------------------------------------------------------ reading back


def find_run(uri: str, folder: str) -> str | None:
    """The id of the newest MLflow run of a run folder; None if there is none."""
    mlflow = client(uri)
    found = mlflow.search_runs(
        [experiment.experiment_id for experiment in mlflow.search_experiments()],
        filter_string=f"tags.`pipeline.run` = '{folder}'",
        max_results=1,
        order_by=["start_time DESC"],
    )
    return found[0].info.run_id if found else None


def history(uri: str, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """{metric: [(step, value)]} of a run, steps ascending; of a step that was logged twice, the later value."""
    mlflow = client(uri)
    found = {}
    for name in mlflow.get_run(run_id).data.metrics:
        points = sorted(mlflow.get_metric_history(run_id, name), key=lambda p: (p.step, p.timestamp))
        found[name] = sorted({point.step: point.value for point in points}.items())
    return found


def recorded(uri: str, run_id: str) -> dict[str, Any]:
    """What MLflow holds of a run: name, stage, status, folder, and its job and result as they were logged.

    Raises:
        InputError: when the server does not know the run.
    """
    from mlflow.exceptions import MlflowException

    mlflow = client(uri)
    try:
        found = mlflow.get_run(run_id)
    except MlflowException as error:
        raise InputError(
            f"{run_id}: no such run in {uri}; name its folder, or its server with MLFLOW_TRACKING_URI"
        ) from error
    tags = found.data.tags
    logged = {file.path for file in mlflow.list_artifacts(run_id)}
    kept = {
        name: json.loads(Path(mlflow.download_artifacts(run_id, f"{name}.json")).read_text("utf-8"))
        if f"{name}.json" in logged
        else {}
        for name in ("job", "result")
    }
    return {
        "name": found.info.run_name,
        "status": found.info.status,
        "stage": tags.get("stage", "?"),
        "folder": tags.get("pipeline.run"),
        **kept,
    }


def log_files(
    uri: str, run_id: str, files: list[str], samples: list[dict[str, Any]], plots: str | None
) -> None:
    """Adds files, a folder of plots, and samples (as a table: one row a sample) to what a run's page shows."""
    mlflow = client(uri)
    for file in files:
        mlflow.log_artifact(run_id, file)
    if plots:
        mlflow.log_artifacts(run_id, plots, "plots")
    if samples:
        # MLflow's page takes a dot in a column's name for a path, and shows the column empty.
        rows = [{key.replace(".", "_"): value for key, value in _flatten(sample)} for sample in samples]
        columns = dict.fromkeys(key for row in rows for key in row)
        mlflow.log_dict(
            run_id,
            {"columns": list(columns), "data": [[row.get(c) for c in columns] for row in rows]},
            "samples.json",
        )
        # What MLflow's table view looks for (the tag that MlflowClient.log_table sets, which would append on a rerun).
        mlflow.set_tag(
            run_id, "mlflow.loggedArtifacts", json.dumps([{"path": "samples.json", "type": "table"}])
        )


# --------------------------------------------------------------------------------------------------- versions


def passes(gate: dict[str, str], metrics: dict[str, float]) -> tuple[bool, str]:
    """(did every condition hold, the reason in words). A metric that is missing or NaN fails its condition."""
    failures = []
    for name, condition in gate.items():
        symbol, threshold = parse_gate(condition)
        value = metrics.get(name)
        if value is None or not OPERATORS[symbol](value, threshold):
            failures.append(
                f"{name} = {'missing' if value is None else f'{value:.4g}'}, required {condition}"
            )
    if failures:
        return False, "failed: " + "; ".join(failures)
    return True, "passed" if gate else "none set"


def publish(
    job: Job, run_id: str, folder: str, metrics: dict[str, float], lineage: dict[str, Any]
) -> Version:
    """Registers an adapter folder as a new version and moves the alias if the gate passes.

    The order makes a crash harmless: files first, then the comparison with what comes back, then the version,
    then the alias. A run that was already registered (a crash just before its end) is not registered twice.

    Raises:
        RuntimeError: if the files that come back from the store differ from those that were saved.
    """
    wait_for_server(job)
    mlflow = client(tracking_uri(job))
    name = str(job.mlflow.registered_model)
    ok, reason = passes(job.gate, metrics)
    known = mlflow.search_model_versions(f"run_id = '{run_id}'")
    if known:
        version = known[0].version
    else:
        model_id, source = _store(mlflow, job, run_id, folder, lineage)
        _create_registered_model(mlflow, name)
        tags = {
            **_tags(lineage),
            **{k: f"{v:.6g}" for k, v in metrics.items() if k.startswith("eval_")},
            "gate": reason,
        }
        version = mlflow.create_model_version(
            name, source=source, run_id=run_id, model_id=model_id, tags=tags
        ).version
    if ok:
        mlflow.set_registered_model_alias(name, job.mlflow.alias, version)
    return Version(name, str(version), job.mlflow.alias if ok else None, reason)


def promote(job: Job, reference: str, metrics: dict[str, float]) -> Version:
    """The gate of an evaluation: its figures become tags of the pinned version, to which the alias moves if they pass."""
    mlflow = client(tracking_uri(job))
    name, version = reference.removeprefix("models:/").split("/")
    ok, reason = passes(job.gate, metrics)
    for key, value in metrics.items():
        if key.startswith("eval_"):
            mlflow.set_model_version_tag(name, version, f"evaluate.{_key(key)}", f"{value:.6g}")
    mlflow.set_model_version_tag(name, version, "evaluate.gate", reason)
    if ok:
        mlflow.set_registered_model_alias(name, job.mlflow.alias, version)
    return Version(name, version, job.mlflow.alias if ok else None, reason)


def _store(mlflow: Any, job: Job, run_id: str, folder: str, lineage: dict[str, Any]) -> tuple[str, str]:
    """Uploads the folder as a LoggedModel, downloads it again and compares every file: (model id, location)."""
    experiment = mlflow.get_run(run_id).info.experiment_id
    model = mlflow.create_logged_model(
        experiment, name=job.stage, source_run_id=run_id, model_type=f"lora-{job.stage}", tags=_tags(lineage)
    )
    try:
        mlflow.log_model_artifacts(model.model_id, folder)
        back = _download(mlflow, model.artifact_location)
        sent, received = folder_digests(folder), folder_digests(back)
        if sent != received:
            different = sorted(k for k in {*sent, *received} if sent.get(k) != received.get(k))
            raise RuntimeError(
                f"the artifact store returned other files than were saved: {', '.join(different)}"
            )
    except BaseException:
        mlflow.finalize_logged_model(model.model_id, "FAILED")
        raise
    mlflow.finalize_logged_model(model.model_id, "READY")
    return model.model_id, model.artifact_location


def _create_registered_model(mlflow: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        mlflow.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _tags(lineage: dict[str, Any]) -> dict[str, str]:
    """Lineage as flat tags: base, tokenizer, parents, data and library versions can be searched for in MLflow."""
    flat = _flatten({key: lineage[key] for key in lineage if key not in ("parents", "data", "versions")})
    tags = {key.replace(".", "_"): str(value) for key, value in flat}
    return tags | {key: json.dumps(lineage.get(key, {})) for key in ("parents", "data", "versions")}


def pin(reference: str, uri: str) -> str:
    """`models:/name@alias` -> `models:/name/VERSION`, so that a run's inputs do not change under it.

    Folders and hub ids are returned as they are.

    Raises:
        InputError: when the model, alias or version does not exist, with the ones that do.
    """
    if not reference.startswith("models:/"):
        return reference
    from mlflow.exceptions import MlflowException

    mlflow = client(uri)
    target = reference.removeprefix("models:/")
    name, separator, alias = target.partition("@")
    try:
        if separator:
            return f"models:/{name}/{mlflow.get_model_version_by_alias(name, alias).version}"
        name, _, version = target.partition("/")
        return f"models:/{name}/{mlflow.get_model_version(name, version).version}"
    except MlflowException as error:
        raise InputError(_not_found(mlflow, reference, name, uri)) from error


def tags(reference: str, uri: str) -> dict[str, str]:
    """The tags of a pinned version (`models:/name/3`): lineage and evaluation figures; {} for a folder."""
    if not reference.startswith("models:/"):
        return {}
    name, version = reference.removeprefix("models:/").split("/")
    return dict(client(uri).get_model_version(name, version).tags)


def _not_found(mlflow: Any, reference: str, name: str, uri: str) -> str:
    models = {m.name: m for m in mlflow.search_registered_models()}
    if name not in models:
        known = ", ".join(sorted(models)) or "none yet"
        return f"{reference}: no registered model {name!r} in {uri} (registered: {known}); {_train_it(name)}"
    aliases = ", ".join(f"@{a} -> v{v}" for a, v in models[name].aliases.items()) or "none"
    newest = max(mlflow.search_model_versions(f"name = '{name}'"), key=lambda v: int(v.version), default=None)
    hint = (
        f"the newest is models:/{name}/{newest.version} (gate {newest.tags.get('gate', '?')}): by its number it can be used"
        if newest
        else ""
    )
    return (
        f"{reference}: no such alias or version of {name!r} (aliases: {aliases}); {hint or _train_it(name)}"
    )


def _train_it(name: str) -> str:
    stage = name.rpartition("-")[2]
    return (
        f"run `make {stage}` first" if stage in ("sft", "rm", "dpo", "ppo") else "train and register it first"
    )


def version(reference: str, uri: str) -> dict[str, Any]:
    """What is known about `models:/name/3`: name, version, aliases, and its tags with parents, data and versions parsed."""
    mlflow = client(uri)
    name, number = reference.removeprefix("models:/").split("/")
    found = mlflow.get_model_version(name, number)
    tags: dict[str, Any] = dict(found.tags)
    for key in ("parents", "data", "versions"):
        tags[key] = json.loads(tags.get(key, "{}"))
    return {"name": name, "version": str(found.version), "aliases": sorted(found.aliases), "tags": tags}


def fetch(reference: str, uri: str) -> str:
    """The local folder of a version (`models:/name/3`); a local folder is returned as it is. Read only.

    Raises:
        InputError: when its files are not there, or not to be reached.
    """
    if not reference.startswith("models:/"):
        return reference
    mlflow = client(uri)
    name, version = reference.removeprefix("models:/").split("/")
    location = mlflow.get_model_version_download_uri(name, version)
    try:
        return _download(mlflow, location)
    except Exception as error:  # each artifact store raises types of its own
        raise InputError(
            f"{reference}: its files cannot be fetched from {location} ({error}); bring them back, or "
            "take another version"
        ) from error


def _download(mlflow: Any, location: str) -> str:
    """The local folder of an artifact location; on a local store the stored folder itself, not a copy.

    Locations instead of `models:/` references, because those are resolved by the process-wide server, not this client's.
    """
    from mlflow import artifacts

    return artifacts.download_artifacts(location, tracking_uri=mlflow.tracking_uri)
