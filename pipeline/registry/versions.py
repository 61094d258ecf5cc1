"""Registers model versions with tags and descriptions, moves aliases, and downloads the versions that a job names."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pipeline.data.counts import most_frequent
from pipeline.errors import InputError, error_summary
from pipeline.input_uri import InputURI
from pipeline.job import make_target
from pipeline.job.stages import TRAINED, headline_metrics
from pipeline.metrics import SPEED, Metric
from pipeline.registry.champion import Champion, Gate, champion_of, evaluate_gate, measured_on
from pipeline.registry.lineage import folder_digests
from pipeline.registry.store import client, metric_key, search_filter
from pipeline.system import hub, storage
from pipeline.system.credentials import without_credentials

DIGEST = 19  # length of a shortened digest, `sha256:...` or `commit:...`


class Missing(InputError):
    """Raised if a job names a model version that is not registered."""


@dataclass(frozen=True)
class Version:
    """A registered model version. If the gate failed, `alias` is None, and `gate` contains the reason."""

    name: str
    version: str
    alias: str | None
    gate: str
    champion: Champion = field(default_factory=Champion)

    def __str__(self) -> str:
        return f"{self.name} v{self.version}" + (f" @{self.alias}" if self.alias else "")


# ------------------------------------------------------------------------------------------------- registration


def publish(
    uri: str,
    gate: Gate,
    stage: str,
    run_id: str,
    folder: str,
    metrics: dict[str, float],
    lineage: dict[str, Any],
    problem: str | None = None,
) -> Version:
    """Registers an adapter folder as a new version, and moves the alias if the gate passes.

    Uploads the files, checks the uploaded files, registers the version, and then moves the alias. After a crash, the caller can
    call this function again, because a run registers at most one version.

    Args:
        problem: None, or the reason why the gate fails regardless of the metrics.
    """
    from mlflow.exceptions import MlflowException

    mlflow, name = client(uri), str(gate.model)
    versions = [v for v in mlflow.search_model_versions(f"run_id = '{run_id}'") if v.name == name]
    own_version = str(versions[0].version) if versions else None
    tags = _tags(lineage, gate)
    champion = champion_of(mlflow, gate, name, own_version, metrics, tags)
    ok, reason = (
        (False, f"failed: {problem}") if problem else evaluate_gate(gate.conditions, metrics, champion)
    )
    run = mlflow.get_run(run_id).info
    description = describe_version(stage, metrics, lineage, reason, run)
    if versions:
        version = versions[0].version
        mlflow.set_model_version_tag(name, version, "gate", reason)  # the job's gate may have changed
        mlflow.update_model_version(name, version, description)
    else:
        model_id, source = _store(mlflow, stage, run, folder, tags)
        try:
            mlflow.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tags |= _held_out(metrics) | {"gate": reason}
        version = mlflow.create_model_version(
            name, source, run_id, model_id=model_id, tags=tags, description=description
        ).version
    if ok:
        mlflow.set_registered_model_alias(name, gate.alias, version)
    return Version(name, str(version), gate.alias if ok else None, reason, champion)


def _held_out(metrics: dict[str, float]) -> dict[str, str]:
    """Returns the metrics on held-out rows as tags of a version, except for metrics of speed."""
    held_out = {key: value for key, value in metrics.items() if key.startswith("eval_")}
    return {metric_key(key): f"{value:.6g}" for key, value in held_out.items() if not SPEED.search(key)}


def promote(
    uri: str, gate: Gate, reference: str, metrics: dict[str, float], measured: dict[str, str]
) -> Version:
    """Applies an `evaluate` job's gate to a pinned version. Adds the metrics as tags. Moves the alias if the gate passes.

    A version that failed the gate of its training job also fails this gate. `measured` is the result of `measured_on`.
    """
    mlflow = client(uri)
    ref = InputURI.parse(reference)
    champion = champion_of(mlflow, gate, ref.name, ref.version, metrics, measured, "evaluate.")
    ok, reason = evaluate_gate(gate.conditions, metrics, champion)
    training_gate = mlflow.get_model_version(ref.name, ref.version).tags.get("gate", "")
    if ok and training_gate.startswith("failed"):
        cause = training_gate.removeprefix("failed: ")
        ok, reason = False, f"failed: the gate of the training job failed, too ({cause})"
    for key, value in (_held_out(metrics) | measured | {"gate": reason}).items():
        mlflow.set_model_version_tag(ref.name, ref.version, f"evaluate.{key}", value)
    if ok:
        mlflow.set_registered_model_alias(ref.name, gate.alias, ref.version)
    return Version(ref.name, str(ref.version), gate.alias if ok else None, reason, champion)


def _store(mlflow: Any, stage: str, run: Any, folder: str, tags: dict[str, str]) -> tuple[str, str]:
    """Uploads the folder as a LoggedModel, downloads it again and compares all files. Returns (model id, artifact location)."""
    sent = folder_digests(folder)
    # An earlier attempt may have created the LoggedModel
    models = mlflow.search_logged_models([run.experiment_id], f"source_run_id = '{run.run_id}'")
    model = next((model for model in models if model.status != "FAILED"), None)
    if model is None:
        fields = {"name": stage, "model_type": f"lora-{stage}", "tags": tags}
        model = mlflow.create_logged_model(run.experiment_id, source_run_id=run.run_id, **fields)
    mlflow.log_model_artifacts(model.model_id, folder)
    with tempfile.TemporaryDirectory() as scratch:
        received = folder_digests(_download(mlflow, model.artifact_location, scratch))
    if sent != received:
        mlflow.finalize_logged_model(model.model_id, "FAILED")
        paths = sorted(k for k in {*sent, *received} if sent.get(k) != received.get(k))
        raise RuntimeError(f"files in the artifact store differ from the saved files: {', '.join(paths)}")
    mlflow.finalize_logged_model(model.model_id, "READY")
    return model.model_id, model.artifact_location


def _tags(lineage: dict[str, Any], gate: Gate) -> dict[str, str]:
    """Returns tags for searches in MLflow. Long values are shortened; the adapter's lineage.json has the full values."""
    base, reward = lineage.get("base", {}), lineage.get("reward", {})
    tags = {
        key: str(lineage[key]) for key in ("stage", "step", "tokenizer", "chat_template") if lineage.get(key)
    }
    tags |= {f"base_{key}": str(base[key]) for key in ("name_or_path", "revision", "digest") if base.get(key)}
    tags |= {f"reward_{key}": f"{value:.6g}" for key, value in reward.items()}
    tags |= {key: tags[key][:DIGEST] for key in ("tokenizer", "chat_template", "base_digest") if key in tags}
    tags |= measured_on(lineage.get("data", {}), lineage.get("parents", {}), gate)
    if rows_from := most_frequent(lineage.get("rows_from", {}), 20):
        tags["rows_from"] = json.dumps(rows_from)
    return tags


def describe_version(
    stage: str, metrics: dict[str, float], lineage: dict[str, Any], gate: str, run: Any
) -> str:
    """Returns a Markdown description of a version. `run` is the RunInfo of the MLflow run that trained the version."""
    base, parents = lineage.get("base", {}), lineage.get("parents", {})
    lines = [
        f"- {metric.label}: "
        + (f"{_shown(metrics[metric.before], metric)} → " if metric.before in metrics else "")
        + f"**{_shown(metrics[metric.name], metric)}**"
        for metric in headline_metrics(stage, metrics)
    ]
    lines += [
        f"- gate: {gate}",
        "",
        f"Trained by [{run.run_name}](#/experiments/{run.experiment_id}/runs/{run.run_id}) ({stage}) "
        f"on `{base.get('name_or_path', '?')}` ({base.get('digest', '?')[:DIGEST]})"
        + (", from" if parents else "."),
    ]
    lines += [f"- {role}: {_link(source)}" for role, source in parents.items()]
    return "\n".join(lines)


def _shown(value: float, metric: Metric) -> str:
    return f"{100 * value:.1f} %" if metric.is_share else f"{value:.4g} {metric.unit_shown}".strip()


def _link(source: str) -> str:
    """Returns a Markdown link to a registered version's page in MLflow. Formats a source that is not registered as code."""
    ref = InputURI.parse(source)
    if not ref.version:
        return f"`{source}`"
    return f"[{ref.name} v{ref.version}](#/models/{ref.name}/versions/{ref.version})"


# ---------------------------------------------------------------------------------------------------- references


def pin(reference: str, uri: str, job_file: str = "") -> str:
    """Returns `models:/NAME/VERSION` for `models:/NAME@ALIAS`, so that a run keeps its inputs if the alias moves.

    A model on the Hub becomes `hf://org/name@COMMIT`. Returns folders unchanged. Error messages suggest a command with the job
    file `job_file`.
    """
    from mlflow.exceptions import MlflowException

    if hub.is_reference(reference):
        return hub.pin_hub(reference)
    ref = InputURI.parse(reference)
    if not ref.is_registered:
        return reference
    mlflow = client(uri)
    try:
        if ref.alias:
            model_version = mlflow.get_model_version_by_alias(ref.name, ref.alias)
        else:
            model_version = mlflow.get_model_version(ref.name, ref.version)
        return str(InputURI(ref.name, version=str(model_version.version)))
    except MlflowException as error:
        newest, stage = _newest(mlflow, ref.name), ref.name.rpartition("-")[2]
        if newest is None:
            listing = ", ".join(sorted(m.name for m in mlflow.search_registered_models())) or "none yet"
            fix = (
                f"run `{make_target(stage, job_file)}` first"
                if stage in TRAINED
                else "train and register it first"
            )
            problem = f"no registered model {ref.name!r} in {uri} (registered: {listing}); {fix}"
        else:
            aliases = mlflow.get_registered_model(ref.name).aliases
            listing = ", ".join(f"@{alias} -> v{number}" for alias, number in aliases.items()) or "none"
            problem = (
                f"no such alias or version of {ref.name!r} (aliases: {listing}); the newest is models:/{ref.name}/"
                f"{newest.version} (gate {newest.tags.get('gate', '?')}); name this version to use it anyway"
            )
        raise Missing(f"{ref}: {problem}") from error


def read_parameters(reference: str, uri: str) -> dict[str, str]:
    """Returns {section.key: value} of the job that trained a pinned version, or {} for a folder or if MLflow has no such run."""
    from mlflow.exceptions import MlflowException

    ref = InputURI.parse(reference)
    if not ref.version:
        return {}
    mlflow = client(uri)
    try:
        return dict(mlflow.get_run(mlflow.get_model_version(ref.name, ref.version).run_id).data.params)
    except MlflowException:
        return {}


def read_version(reference: str, uri: str) -> dict[str, Any]:
    """Returns the aliases and tags of a pinned version. Parses the JSON in the tags `parents`, `data` and `rows_from`."""
    ref = InputURI.parse(reference)
    version = client(uri).get_model_version(ref.name, ref.version)
    tags: dict[str, Any] = dict(version.tags)
    for key in ("parents", "data", "rows_from"):
        tags[key] = json.loads(tags.get(key, "{}"))
    return {"aliases": sorted(version.aliases), "tags": tags}


def _newest(mlflow: Any, name: str) -> Any:
    """Returns the newest version of a registered model, or None."""
    versions = [v for v in mlflow.search_model_versions(search_filter("name", name)) if v.name == name]
    return max(versions, key=lambda v: int(v.version), default=None)


# --------------------------------------------------------------------------------------------------------- files


def fetch(reference: str, uri: str) -> str:
    """Returns a local folder with the files of a pinned version (`models:/name/3`) or of a pinned adapter on the Hub. Callers
    must not write to the returned folder.

    Returns other references unchanged. Files from a bucket or a server are downloaded once per user and machine. All processes
    and runs share the downloaded copy, because the files of a version never change.
    """
    if reference.startswith(hub.SCHEME):
        return hub.fetch_adapter(reference)
    ref = InputURI.parse(reference)
    if not ref.version:
        return reference
    mlflow = client(uri)
    location = mlflow.get_model_version_download_uri(ref.name, ref.version)
    try:
        if _is_here(location):
            return _download(mlflow, location)
        # the URI is part of the hash, because an mlflow-artifacts:/ location does not name its server
        copy = storage.cache("versions", hashlib.sha256(f"{uri} {location}".encode()).hexdigest()[:32])
        if not os.path.isdir(copy):  # os.rename makes the complete folder appear at once
            with tempfile.TemporaryDirectory(dir=os.path.dirname(copy)) as scratch:
                folder = _download(mlflow, location, scratch)
                try:
                    os.rename(folder, copy)
                except OSError:
                    if not os.path.isdir(copy):  # if the folder exists, another process has just made it
                        raise
        return copy
    except Exception as error:  # each artifact store raises its own types of errors
        raise InputError(
            f"{reference}: its files cannot be fetched from {without_credentials(location)} ({error_summary(error)}); restore them, or "
            "use another version. If the folder of the runs has moved, move it back, or make a link at its old place"
        ) from error


def _is_here(location: str) -> bool:
    return urlsplit(location).scheme in ("", "file")


def _download(mlflow: Any, location: str, folder: str | None = None) -> str:
    """Downloads an artifact location and returns the local folder. For a local store, returns the stored folder without a copy.

    `location` must not be a `models:/` reference, because MLflow would look it up on the server of this process's environment
    instead of the client's server.
    """
    from mlflow import artifacts

    folder = None if _is_here(location) else folder
    return artifacts.download_artifacts(location, dst_path=folder, tracking_uri=mlflow.tracking_uri)
