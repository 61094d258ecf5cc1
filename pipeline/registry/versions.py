"""Versions: the gate, registering with a load back, aliases, lineage as tags and description; from a reference to a folder."""

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import OPERATORS, Job, make, parse_gate
from pipeline.config.stages import TRAINED
from pipeline.data.versions import most_frequent
from pipeline.errors import InputError
from pipeline.models import hub
from pipeline.registry.description import DIGEST, describe
from pipeline.registry.lineage import folder_digests
from pipeline.registry.server import client, first_line, like, metric_key, tracking_uri, wait_for_server
from pipeline.system import deadline
from pipeline.system.credentials import without_credentials

# Ends of the names of figures that say nothing about the model.
CLOCKS = ("_runtime", "_per_second", "_num_tokens", "_time")


@dataclass(frozen=True)
class Version:
    """One registered model version; `alias` is None when the gate kept it back, and `gate` says why."""

    name: str
    version: str
    alias: str | None
    gate: str

    def __str__(self) -> str:
        return f"{self.name} v{self.version}" + (f" @{self.alias}" if self.alias else "")


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
    job: Job,
    run_id: str,
    folder: str,
    metrics: dict[str, float],
    lineage: dict[str, Any],
    problem: str | None = None,
) -> Version:
    """Registers an adapter folder as a new version and moves the alias if the gate passes.

    The order makes a crash harmless: files first, then the comparison with what comes back, then the version,
    then the alias. A run that was already registered (a crash just before its end) is not registered twice.

    Args:
        problem: why the gate does not pass, whatever the metrics are; None: they decide.

    Raises:
        RuntimeError: if the files that come back from the store differ from those that were saved.
    """
    wait_for_server(job)
    mlflow = client(tracking_uri(job))
    name = str(job.mlflow.registered_model)
    ok, reason = (False, f"failed: {problem}") if problem else passes(job.gate, metrics)
    run = mlflow.get_run(run_id).info
    description = describe(job.stage, metrics, lineage, reason, (run.experiment_id, run_id, run.run_name))
    known = [one for one in mlflow.search_model_versions(f"run_id = '{run_id}'") if one.name == name]
    if known:
        version = known[0].version
        mlflow.set_model_version_tag(name, version, "gate", reason)  # it may have been changed meanwhile
        mlflow.update_model_version(name, version, description)
    else:
        model_id, source = _store(mlflow, job, run.experiment_id, run_id, folder, lineage)
        _create_registered_model(mlflow, name)
        tags = {
            **_tags(lineage),
            **{k: f"{v:.6g}" for k, v in metrics.items() if k.startswith("eval_") and not k.endswith(CLOCKS)},
            "gate": reason,
        }
        version = mlflow.create_model_version(
            name, source=source, run_id=run_id, model_id=model_id, tags=tags, description=description
        ).version
    if ok:
        mlflow.set_registered_model_alias(name, job.mlflow.alias, version)
    return Version(name, str(version), job.mlflow.alias if ok else None, reason)


def other_base(job: Job, base: dict[str, Any]) -> str | None:
    """A warning if the newest version of the job's registered model was trained on another base; None: nothing to say.

    One name should stand for one base: whoever loads it by its alias expects an adapter of the base that they use.

    Args:
        base: identity of the job's base.
    """
    name = job.mlflow.registered_model
    newest = _newest(client(tracking_uri(job)), name) if name else None
    if newest is None:
        return None
    trained_on = newest.tags.get("base_name_or_path", "?")
    digest = newest.tags.get("base_digest")
    if digest == base["digest"][:DIGEST] or (digest is None and trained_on in ("?", base["name_or_path"])):
        return None
    suggested = (
        f"{name}-{re.sub(r'[^A-Za-z0-9._-]+', '-', os.path.basename(base['name_or_path'].rstrip('/')))}"
    )
    return (
        f"mlflow.registered_model: the newest version of {name!r}, v{newest.version}, was trained on base {trained_on} "
        f"({digest}), this run trains on {base['name_or_path']} ({base['digest'][:DIGEST]}); models:/{name}@"
        f"{job.mlflow.alias} would then be an adapter of another base. Type mlflow.registered_model={suggested}"
    )


def promote(job: Job, reference: str, metrics: dict[str, float]) -> Version:
    """The gate of an evaluation: its figures become tags of the pinned version, to which the alias moves if they pass."""
    wait_for_server(job)
    mlflow = client(tracking_uri(job))
    name, version = reference.removeprefix("models:/").split("/")
    ok, reason = passes(job.gate, metrics)
    for key, value in metrics.items():
        if key.startswith("eval_"):
            mlflow.set_model_version_tag(name, version, f"evaluate.{metric_key(key)}", f"{value:.6g}")
    mlflow.set_model_version_tag(name, version, "evaluate.gate", reason)
    if ok:
        mlflow.set_registered_model_alias(name, job.mlflow.alias, version)
    return Version(name, version, job.mlflow.alias if ok else None, reason)


def _store(
    mlflow: Any, job: Job, experiment: str, run_id: str, folder: str, lineage: dict[str, Any]
) -> tuple[str, str]:
    """Uploads the folder as a LoggedModel, downloads it again and compares every file: (model id, location)."""
    model = mlflow.create_logged_model(
        experiment, name=job.stage, source_run_id=run_id, model_type=f"lora-{job.stage}", tags=_tags(lineage)
    )
    try:
        mlflow.log_model_artifacts(model.model_id, folder)
        with tempfile.TemporaryDirectory() as into:
            sent = folder_digests(folder)
            received = folder_digests(_download(mlflow, model.artifact_location, into))
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
    """What one searches for in MLflow, short enough for its pages: lineage.json, beside the adapter, has all of it in full."""
    base, reward = lineage.get("base", {}), lineage.get("reward", {})
    tags = {
        key: str(lineage[key]) for key in ("stage", "step", "tokenizer", "chat_template") if lineage.get(key)
    }
    tags |= {f"base_{key}": str(base[key]) for key in ("name_or_path", "revision", "digest") if base.get(key)}
    tags |= {f"reward_{key}": f"{value:.6g}" for key, value in reward.items()}
    tags |= {key: tags[key][:DIGEST] for key in ("tokenizer", "chat_template", "base_digest") if key in tags}
    data = {name: digest[:12] for name, digest in lineage.get("data", {}).items()}
    rows_from = most_frequent(lineage.get("rows_from", {}), 20)
    return tags | {
        "parents": json.dumps(lineage.get("parents", {})),
        "data": json.dumps(data),
        **({"rows_from": json.dumps(rows_from)} if rows_from else {}),
    }


def pin(reference: str, uri: str, job_file: str = "") -> str:
    """`models:/name@alias` -> `models:/name/VERSION`, so that a run's inputs do not change under it.

    A hub id becomes `hf://org/name@COMMIT`. Folders are returned as they are.

    Args:
        job_file: that names it, for what an error advises to type.

    Raises:
        InputError: when the model, alias or version does not exist, with the ones that do.
    """
    if hub.is_reference(reference):
        return hub.pin(reference)
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
        raise InputError(_not_found(mlflow, reference, name, uri, job_file)) from error


def aliases(name: str, uri: str) -> dict[str, str]:
    """{alias: models:/name/VERSION} of a registered model. Raises MLflow's errors."""
    found = client(uri).get_registered_model(name).aliases
    return {alias: f"models:/{name}/{version}" for alias, version in found.items()}


def tags(reference: str, uri: str) -> dict[str, str]:
    """The tags of a pinned version (`models:/name/3`): lineage and evaluation figures; {} for a folder."""
    if not reference.startswith("models:/"):
        return {}
    name, version = reference.removeprefix("models:/").split("/")
    return dict(client(uri).get_model_version(name, version).tags)


def parameters(reference: str, uri: str) -> dict[str, str]:
    """{section.key: value} of the job that registered a pinned version; {} for a folder, and where MLflow lost the run."""
    from mlflow.exceptions import MlflowException

    if not reference.startswith("models:/"):
        return {}
    name, version = reference.removeprefix("models:/").split("/")
    mlflow = client(uri)
    try:
        return dict(mlflow.get_run(mlflow.get_model_version(name, version).run_id).data.params)
    except MlflowException:
        return {}


def _not_found(mlflow: Any, reference: str, name: str, uri: str, job_file: str) -> str:
    models = {m.name: m for m in mlflow.search_registered_models()}
    if name not in models:
        known = ", ".join(sorted(models)) or "none yet"
        return f"{reference}: no registered model {name!r} in {uri} (registered: {known}); {_train_it(name, job_file)}"
    aliases = ", ".join(f"@{a} -> v{v}" for a, v in models[name].aliases.items()) or "none"
    newest = _newest(mlflow, name)
    hint = (
        f"the newest is models:/{name}/{newest.version} (gate {newest.tags.get('gate', '?')}); type that to use it anyway"
        if newest
        else ""
    )
    return f"{reference}: no such alias or version of {name!r} (aliases: {aliases}); {hint or _train_it(name, job_file)}"


def _newest(mlflow: Any, name: str) -> Any:
    """The newest version of a registered model; None if there is none."""
    versions = [v for v in mlflow.search_model_versions(like("name", name)) if v.name == name]
    return max(versions, key=lambda v: int(v.version), default=None)


def _train_it(name: str, job_file: str) -> str:
    stage = name.rpartition("-")[2]
    return f"run `{make(stage, job_file)}` first" if stage in TRAINED else "train and register it first"


def version(reference: str, uri: str) -> dict[str, Any]:
    """What is known about `models:/name/3`: name, version, aliases, and its tags with parents, data and rows_from parsed."""
    mlflow = client(uri)
    name, number = reference.removeprefix("models:/").split("/")
    registered = mlflow.get_model_version(name, number)
    tags: dict[str, Any] = dict(registered.tags)
    for key in ("parents", "data", "rows_from"):
        tags[key] = json.loads(tags.get(key, "{}"))
    return {
        "name": name,
        "version": str(registered.version),
        "aliases": sorted(registered.aliases),
        "tags": tags,
    }


def fetch(reference: str, uri: str, patient: bool = False) -> str:
    """The local folder of a version (`models:/name/3`) or of an adapter on the hub, both pinned. Read only.

    A local folder is returned as it is, and so is a model on the hub that is no adapter.

    What a bucket or a server holds is downloaded once for all processes and runs of a machine: a version never changes.

    Args:
        patient: waits for a store that is slow to answer, as one that many workers ask at the same time may be.

    Raises:
        InputError: when its files are not there, or not to be reached.
    """
    if reference.startswith(hub.SCHEME):
        return hub.fetch(reference)
    if not reference.startswith("models:/"):
        return reference
    mlflow = client(uri)
    name, version = reference.removeprefix("models:/").split("/")
    location = mlflow.get_model_version_download_uri(name, version)
    try:
        return _download(mlflow, location) if _is_here(location) else _kept(mlflow, location, patient)
    except Exception as error:  # each artifact store raises types of its own
        raise InputError(
            f"{reference}: its files cannot be fetched from {without_credentials(location)} ({first_line(error)}); bring them "
            "back, or take another version"
        ) from error


def _kept(mlflow: Any, location: str, patient: bool) -> str:
    """The copy of a location in the user's cache, made if there is none; it appears there whole or not at all."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.path.join(caches, "rlhf-pipeline", "versions")
    kept = os.path.join(cache, hashlib.sha256(location.encode()).hexdigest()[:32])
    if not os.path.isdir(kept):
        if not patient:
            deadline.answer(_listed, mlflow, location)
        os.makedirs(cache, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as into:
            folder = _download(mlflow, location, into)
            try:
                os.rename(folder, kept)
            except OSError:
                if not os.path.isdir(kept):  # else another process was first, with the same files
                    raise
    return kept


def _listed(mlflow: Any, location: str) -> list[Any]:
    from mlflow import artifacts

    return artifacts.list_artifacts(location, tracking_uri=mlflow.tracking_uri)


def _is_here(location: str) -> bool:
    return urlsplit(location).scheme in ("", "file")


def _download(mlflow: Any, location: str, into: str | None = None) -> str:
    """The local folder of an artifact location: of a local store the stored folder itself, not a copy.

    Locations instead of `models:/` references, because those are resolved by the process-wide server, not this client's.
    """
    from mlflow import artifacts

    into = None if _is_here(location) else into
    return artifacts.download_artifacts(location, dst_path=into, tracking_uri=mlflow.tracking_uri)
