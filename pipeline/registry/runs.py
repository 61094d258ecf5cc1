"""Opens and ends MLflow runs, logs jobs, datasets and tables to them, and reads runs back from MLflow."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pipeline import run_folder
from pipeline.errors import LeaseLost, causes_of
from pipeline.job.identity import Identity
from pipeline.registry import store
from pipeline.registry.store import Tracking
from pipeline.system import process, storage
from pipeline.system.credentials import without_credentials

RUN_TAG = "pipeline.run"  # tag of an MLflow run, whose value is the path of the run's folder
# Tag that makes MLflow's page of an experiment show runs instead of traces. Training logs no traces.
KIND = {"mlflow.experimentKind": "custom_model_development"}

_parent: ContextVar[str | None] = ContextVar("parent", default=None)


@contextmanager
def nested_under(run_id: str) -> Iterator[None]:
    """Makes the MLflow runs that are opened in this `with` block children of the MLflow run `run_id`."""
    token = _parent.set(run_id)
    try:
        yield
    finally:
        _parent.reset(token)


@contextmanager
def mlflow_run(tracking: Tracking, digests: dict[str, str], new_run: bool = False) -> Iterator[str]:
    """Opens an MLflow run for the `with` block, and yields its id. Reopens the MLflow run of the same run folder if the run has
    not finished. At the end, sets the status to FINISHED, to FAILED after an error, or to KILLED after Ctrl-C or SIGTERM.

    Args:
        new_run: whether to start a new MLflow run even if the run folder has an unfinished one. If the unfinished run still has
            the status RUNNING because its driver was killed, the status becomes KILLED.
    """
    run = tracking.identity
    mlflow = store.client(tracking.uri)
    experiment = _experiment(mlflow, tracking)
    if new_run:
        end_interrupted(tracking)
    newest = _newest(mlflow, [experiment], storage.absolute(run.folder))
    if newest and newest.info.status != "FINISHED" and not new_run:
        run_id = newest.info.run_id
        mlflow.update_run(run_id, status="RUNNING")
    else:
        run_id = mlflow.create_run(experiment, run_name=run.name, tags=_tags(run)).info.run_id
        _log_inputs(mlflow, run_id, tracking, digests)
    try:
        yield run_id
    except BaseException as failure:
        if any(isinstance(cause, LeaseLost) for cause in causes_of(failure)):
            raise  # the run continues in another process
        with process.signals_ignored():
            try:
                mlflow.set_terminated(run_id, "FAILED" if isinstance(failure, Exception) else "KILLED")
            except Exception as error:  # an error of MLflow must not hide the error of the run
                problem = f"server unreachable ({type(error).__name__})"
                print(f"warning: cannot mark MLflow run {run_id} as ended: {problem}", flush=True)
        raise
    store.call_persistently(tracking.uri, run.folder, lambda: mlflow.set_terminated(run_id, "FINISHED"))


def end_finished(uri: str, run_id: str) -> None:
    """Marks a run as FINISHED if its driver was killed after it wrote result.json."""
    mlflow = store.client(uri)
    if mlflow.get_run(run_id).info.status == "RUNNING":
        mlflow.set_terminated(run_id, "FINISHED")


def end_interrupted(tracking: Tracking) -> None:
    """Marks a run as KILLED if its driver was killed and left the status RUNNING."""
    mlflow = store.client(tracking.uri)
    newest = _newest(mlflow, [_experiment(mlflow, tracking)], storage.absolute(tracking.identity.folder))
    if newest and newest.info.status == "RUNNING":
        mlflow.set_terminated(newest.info.run_id, "KILLED")


def _tags(run: Identity) -> dict[str, str]:
    """Returns tags with the run's folder and stage, and the tags that mlflow.start_run sets (user, source, commit, parent)."""
    from mlflow.tracking.context.registry import resolve_tags  # private in mlflow 3.17
    from mlflow.utils import mlflow_tags

    tags = {RUN_TAG: storage.absolute(run.folder), "stage": run.stage}
    if run.source:
        tags[mlflow_tags.MLFLOW_SOURCE_NAME] = run.source
    if parent := _parent.get():
        tags[mlflow_tags.MLFLOW_PARENT_RUN_ID] = parent
    return {key: without_credentials(str(value)) for key, value in resolve_tags(tags).items()}


def _experiment(mlflow: Any, tracking: Tracking) -> str:
    """Returns the id of the experiment. Creates the experiment if it is missing."""
    from mlflow.exceptions import MlflowException

    name, location = tracking.experiment, None
    if store.file_of_uri(tracking.uri):  # a server chooses where it stores artifacts
        path = storage.join(storage.absolute(tracking.identity.storage_path), "artifacts")
        # MLflow would misread a path with # or %20 that is not a URI
        location = path if storage.is_remote(path) else Path(path).as_uri()
    try:
        if experiment := mlflow.get_experiment_by_name(name):
            return experiment.experiment_id
        return mlflow.create_experiment(name, artifact_location=location, tags=KIND)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return mlflow.get_experiment_by_name(name).experiment_id  # another process has created it


def _log_inputs(mlflow: Any, run_id: str, tracking: Tracking, digests: dict[str, str]) -> None:
    """Logs the job, its parameters, and the source and digest of each dataset. Does not read or upload the rows."""
    import mlflow as mlflow_api
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import Dataset, DatasetInput, InputTag, Param

    settings = tracking.identity.settings
    mlflow.log_dict(run_id, settings, run_folder.JOB)
    params = [
        Param(store.metric_key(key), str(value)[:500]) for key, value in store.flatten(settings).items()
    ]
    for start in range(0, len(params), 100):  # maximum number of parameters in one call
        mlflow.log_batch(run_id, params=params[start : start + 100])
    inputs = []
    for context, paths in tracking.sources.items():
        if context not in digests:
            continue
        # MLflow warns that a local path matches two source types, both named "local"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = mlflow_api.data.dataset_source_registry.resolve_dataset_source(paths)
        dataset = MetaDataset(source, name=context, digest=digests[context][:36])
        inputs.append(DatasetInput(Dataset(**dataset.to_dict()), [InputTag("mlflow.data.context", context)]))
    mlflow.log_inputs(run_id, inputs)


def find_run(uri: str, folder: str) -> str | None:
    """Returns the id of the newest MLflow run of a run folder, or None."""
    mlflow = store.client(uri)
    newest = _newest(mlflow, [experiment.experiment_id for experiment in mlflow.search_experiments()], folder)
    return newest.info.run_id if newest else None


def _newest(mlflow: Any, experiments: list[str], folder: str) -> Any:
    """Returns the newest run of a run folder in the experiments, or None."""
    runs = mlflow.search_runs(
        experiments,
        filter_string=store.search_filter(f"tags.`{RUN_TAG}`", folder),
        max_results=20,
        order_by=["start_time DESC"],
    )
    return next((run for run in runs if run.data.tags[RUN_TAG] == folder), None)


def read_curves(uri: str, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Returns {metric: [(step, value)]} of a run, sorted by step. If a step was logged twice, returns the later value."""
    mlflow = store.client(uri)
    curves = {}
    for name in mlflow.get_run(run_id).data.metrics:
        points = sorted(mlflow.get_metric_history(run_id, name), key=lambda p: (p.step, p.timestamp))
        curves[name] = sorted({point.step: point.value for point in points}.items())
    return curves


def log_files(uri: str, run_id: str, files: list[str], samples: list[dict[str, Any]]) -> None:
    """Adds files to an MLflow run, and a table with one row per sample."""
    mlflow = store.client(uri)
    for file in files:
        mlflow.log_artifact(run_id, file)
    if not samples:
        return
    # MLflow's page shows a column as empty if its name has a dot.
    rows = [
        {key.replace(".", "_"): value for key, value in store.flatten(sample).items()} for sample in samples
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}
    mlflow.log_dict(run_id, table, "samples.json")
    # MLflow's table view needs this tag. MlflowClient.log_table sets it too, but would append to the table on a rerun.
    tag = json.dumps([{"path": "samples.json", "type": "table"}])
    mlflow.set_tag(run_id, "mlflow.loggedArtifacts", tag)
