"""Reads the folder of a run or sweep: who owns the folder, what an earlier process left, and which keys may differ on a resume.

    earlier = find_earlier(run)                         # reads the folder once
    old_job = resumable_job(earlier)                    # raises InputError if this job would give different results
    with owned_folder(folder, files, overwrite) as lease:   # one driver at a time (lease.py)
        ...

A run writes job.json before the work begins. job.json has the resolved job, and the state of its inputs when the work began: the
versions that aliases pointed to, the digests of base and rows, and the versions of the libraries.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pipeline import run_folder
from pipeline.errors import InputError, in_brief
from pipeline.input_uri import InputURI
from pipeline.job.identity import Identity
from pipeline.job.stages import INPUTS
from pipeline.registry import lineage
from pipeline.registry.store import flatten
from pipeline.run import checkpoints
from pipeline.system import lease, storage

# {file: owner of a folder that has this file}
OWNERS = {run_folder.JOB: "a run", run_folder.RESULT: "a run", run_folder.SWEEP: "a sweep"}
# Sections and keys that a resumed run may change, because they do not affect results, or affect only the order of summation.
MAY_CHANGE = (
    "run", "mlflow", "gate", "scaling", "source", "data.cache_dir",
    "model.attn_implementation",
    "trainer.logging_steps", "trainer.logging_strategy", "trainer.logging_first_step",
    "trainer.save_steps", "trainer.save_strategy", "trainer.eval_steps", "trainer.eval_strategy",
    "trainer.per_device_eval_batch_size", "trainer.max_tokens_per_micro_batch",
    "trainer.gradient_checkpointing", "trainer.gradient_checkpointing_kwargs",
    "trainer.dataloader_num_workers", "trainer.dataloader_prefetch_factor", "trainer.dataloader_pin_memory",
    "rollout.num_workers", "rollout.use_gpu", "rollout.resources_per_worker", "rollout.label_selector", "rollout.worker_wait_timeout_s",
    "rollout.chunk_timeout_s", "rollout.tensor_parallel_size", "rollout.gpu_memory_utilization",
)  # fmt: skip
# Losses of TRL's DPOTrainer that combine the rows of a micro-batch: a mean over tokens, or sorted margins
BATCH_LOSSES = {"sft", "aot", "aot_unpaired"}
# Keys that a resumed run may not change if it compares its evaluations. The keys decide which step is saved and when training
# stops.
COMPARISON = (
    "run.load_best_model_at_end", "run.metric_for_best_model", "run.greater_is_better", "run.early_stopping_patience", "run.stop_if",
    # logging_steps is the default of eval_steps. KTO's KL estimate, min_reward and max_reward depend on the batch size.
    "trainer.eval_steps", "trainer.eval_strategy", "trainer.logging_steps", "trainer.per_device_eval_batch_size", "judge",
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- the folder


def check_folder(folder: str, owner: str, example: str) -> dict[str, str]:
    """Checks the folder of a run or sweep. Returns the folder's owner_files().

    Raises InputError if the folder is not writable, or belongs to a different kind of owner, whose files run.overwrite=true would
    delete.

    Args:
        owner: `a run` or `a sweep`.
        example: prefix of the name that the error message proposes instead.
    """
    storage_path, _, name = folder.rpartition("/")
    storage.require_writable(storage_path)
    if not storage.is_remote(folder) and os.path.lexists(folder) and not os.path.isdir(folder):
        problem = f"{folder} is not a folder, or is a broken link; remove it, or choose another run.name"
        raise InputError(problem, "run.name")
    for file in (files := owner_files(folder)):
        if OWNERS[file] != owner:
            raise InputError(
                f"{name!r} is the name of {OWNERS[file]} ({folder}); choose another name, for example run.name={example}-{name}",
                key="run.name",
            )
    return files


def owner_files(folder: str) -> dict[str, str]:
    """Returns {file: content} for each file in OWNERS that exists in a folder."""
    paths = {file: storage.join(folder, file) for file in OWNERS}
    return {file: "\n".join(storage.read_lines(path)) for file, path in paths.items() if storage.exists(path)}


@contextlib.contextmanager
def owned_folder(folder: str, files: dict[str, str], overwrite: bool) -> Iterator[lease.Lease]:
    """Yields the lease of a folder. This process holds the lease until the block ends.

    Raises InputError if another process has the lease, or has changed the folder.

    Args:
        files: owner_files() of the folder when this process read it.
        overwrite: whether to empty the folder.
    """
    with lease.held(folder) as folder_lease:
        if not overwrite and owner_files(folder) != files:
            raise InputError(
                f"another process has run {folder} meanwhile; run the same command again", key="run.name"
            )
        if overwrite:  # deletes the old run only after the new job was checked
            for name in storage.names(folder).keys() - {lease.FOLDER}:
                storage.remove(storage.join(folder, name))
        yield folder_lease


# --------------------------------------------------------------------------------------- what a run has left


def record_start(run: Identity, inputs: dict[str, str], base: str, rows: dict[str, str]) -> None:
    """Writes job.json, which marks the start of the run."""
    facts = {"inputs": inputs, "base": base, "rows": rows, "versions": lineage.versions()}
    storage.write_json(storage.join(run.folder, run_folder.JOB), run.settings | {"begun_with": facts})


def digest_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Returns {description of tokenizer and chat template: digest}, an entry of `rows` in record_start and same_content."""
    from pipeline.models.tokenizer import template_digest, tokenizer_digest

    name = "the tokenizer or the chat template (model.name_or_path, model.chat_template)"
    return {name: f"{tokenizer_digest(tokenizer)} {template_digest(tokenizer)}"}


def read_left(folder: str, files: dict[str, str], file: str, *keys: str) -> dict[str, Any]:
    """Returns a JSON object that an earlier process left in a folder, or {} if there is none.

    Raises InputError if the file is unreadable, or lacks one of `keys`.

    Args:
        files: owner_files() of the folder.
    """
    if file not in files:
        return {}
    try:
        content = json.loads(files[file])
        for key in keys:
            content[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{storage.join(folder, file)} cannot be read ({in_brief(error)}); restore it, choose another run.name, or set run.overwrite=true to start "
            "over",
            key="run.name",
        ) from error
    return content


@dataclass(frozen=True)
class Earlier:
    """What earlier attempts at a run left in its folder."""

    identity: Identity
    files: dict[str, str]  # owner_files() of the run's folder
    job: dict[str, Any]  # job.json of an unfinished run, or {} if there is none or run.overwrite starts over
    result: run_folder.Result  # result.json of a finished run, or {}


def find_earlier(run: Identity) -> Earlier:
    """Returns what earlier attempts at a run left in its folder.

    Raises InputError if a run of another stage has this name, or if the storage path is not writable.
    """
    files = check_folder(run.folder, "a run", run.stage)
    if run.overwrite:
        return Earlier(run, files, {}, {})
    result = _read(run, files, run_folder.RESULT)
    return Earlier(
        run, files, {} if result else _read(run, files, run_folder.JOB), cast(run_folder.Result, result)
    )


def _read(run: Identity, files: dict[str, str], file: str) -> dict[str, Any]:
    """Returns job.json or result.json, or {} if the file is missing. Raises InputError if another stage wrote the file."""
    content = read_left(run.folder, files, file, "stage")
    if content and content["stage"] != run.stage:
        kind = "an unfinished" if file == run_folder.JOB else "a finished"
        raise InputError(
            f"{run.name!r} is the name of {kind} {content['stage']} run in {run.storage_path}; choose another name, for "
            f"example run.name={run.stage}-{run.name}",
            key="run.name",
        )
    return content


def resumable_job(earlier: Earlier) -> dict[str, Any]:
    """Returns job.json of the run that this command resumes, or {} if this command starts a new run.

    A run without a checkpoint or a part file has nothing to resume, so its job may still be edited. Raises InputError if this job
    would give different results from the job that began the run.
    """
    run, old_job = earlier.identity, earlier.job
    if not old_job:
        return {}
    changes = blocking_changes(old_job, run)
    differences = [f"{key}={_shown(old)} (now {_shown(new)})" for key, (old, new) in changes.items()]
    if changes and not _has_progress(run.folder):
        print(f"run {run.name} starts over: it began with {', '.join(differences)}, and left no checkpoint")
        return {}
    if changes:
        raise InputError(
            f"{run.name!r} began with {', '.join(differences)} and cannot resume with different settings. Restore them, choose "
            "another run.name, or set run.overwrite=true. Keys that do not affect the results may change, such as mlflow, gate, and scaling (in sft, rm, dpo and kto only if data.batch_size is "
            "set)",
            key="run.name",
        )
    old, new = old_job.get("begun_with", {}).get("versions", {}), lineage.versions()
    if libraries := [
        f"{name} {old[name]} (now {new.get(name)})" for name in old if old[name] != new.get(name)
    ]:
        print(
            f"warning: {run.name!r} began with {', '.join(libraries)}, so its results may differ from here on",
            flush=True,
        )
    return old_job


def blocking_changes(old_job: dict[str, Any], run: Identity) -> dict[str, tuple[Any, Any]]:
    """Returns {section.key: (value then, value now)} for the changed settings that prevent an unfinished run from resuming.

    Args:
        old_job: job.json of the unfinished run.
    """
    spec, settings = run.spec, run.settings
    ignored = [*MAY_CHANGE, *_resolved(run), "begun_with"]
    losses = settings["trainer"].get("loss_type") or []
    per_row = BATCH_LOSSES.isdisjoint([losses] if isinstance(losses, str) else losses)
    if spec.online or (settings["data"]["batch_size"] and per_row):  # the key only limits the rows in memory
        ignored.append("trainer.per_device_train_batch_size")
    if spec.learns:  # in other stages, these keys set the judge of the output and the size of the parts
        ignored += ["judge", "trainer.local_rollout_forward_batch_size"]
    sections = (old_job.get("run", {}), settings["run"])
    compares = any(
        section.get(key)
        for section in sections
        for key in ("load_best_model_at_end", "early_stopping_patience", "stop_if")
    )
    changes = {
        key: values
        for key, values in changed_settings(old_job, run).items()
        if not _among(key, ignored) or (compares and _among(key, COMPARISON))
    }
    # Without data.batch_size, each worker adds rows to the batch of a step.
    old, new = (job.get("scaling", {}).get("num_workers") for job in (old_job, settings))
    if spec.trl and not settings["data"]["batch_size"] and (old or 1) != (new or 1):
        changes["scaling.num_workers"] = (old, new)
    return changes


def pinned_inputs(old_job: dict[str, Any], run: Identity) -> dict[str, str]:
    """Returns {input: version} that the run began with, for the inputs whose references in the job have not changed."""
    inputs = old_job.get("begun_with", {}).get("inputs", {})
    return {
        key: version
        for key, version in inputs.items()
        if old_job.get(name := key.partition(".")[0]) == run.settings[name]
    }


def same_content(old_job: dict[str, Any], run: Identity, base: str, rows: dict[str, str]) -> bool:
    """Returns True if the run began with this base and these rows, or False if the run must start over.

    Raises InputError if the run must start over, but has left checkpoints or part files.

    Args:
        base: digest of the base.
        rows: digests of the rows, of Python functions, and of the tokenizer.
    """
    start = old_job.get("begun_with", {})
    old_base = start.get("base", base)
    changed = [f"model.name_or_path ({run.settings['model']['name_or_path']})"] if old_base != base else []
    names = [name for name, digest in start.get("rows", {}).items() if rows.get(name, digest) != digest]
    changed += [name if name in INPUTS or "." in name else f"data.{name}" for name in names]
    if changed and _has_progress(run.folder):
        commit = old_base.partition("commit:")[2]
        advice = f"Set model.revision={commit}" if commit and old_base != base else "Restore the files"
        raise InputError(
            f"the content of {', '.join(changed)} has changed since {run.name!r} began, so it cannot resume. {advice}, "
            "choose another run.name, or set run.overwrite=true",
            key="run.name",
        )
    return not changed


# --------------------------------------------------------------------------------------------- differences


def deciding_settings(run: Identity) -> dict[str, Any]:
    """Returns {section.key: value} of the settings that affect the results of a run that compares its evaluations."""
    return {
        key: value
        for key, value in flatten(run.settings).items()
        if _among(key, COMPARISON) or not _among(key, MAY_CHANGE)
    }


def changed_settings(
    old_job: dict[str, Any], run: Identity, excluded: Sequence[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Returns {section.key: (value in a recorded job, value in this run)} of different values, except for keys in `excluded`."""
    old, new = flatten(old_job), flatten(run.settings)
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _among(key, excluded)
    }


def _among(key: str, keys: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in keys)


def print_differences(old_job: dict[str, Any], run: Identity) -> None:
    """Prints the settings of this command that differ from those of a finished run."""
    changed = changed_settings(old_job, run, ("run", "source", *_resolved(run)))
    if changed:
        print("the run used other settings; the settings of this command are ignored:")
    for key, (old, new) in changed.items():
        print(f"   {key}: was {_shown(old)}, is {_shown(new)}")


def _resolved(run: Identity) -> tuple[str, ...]:
    """Returns the keys of section `model` that a run records in resolved form. `same_content` compares the base itself."""
    registered = InputURI.parse(run.settings["model"]["name_or_path"]).is_registered
    return ("model.name_or_path", "model.revision") if registered else ("model.revision",)


def _has_progress(folder: str) -> bool:
    """Returns True if a run left something to resume: a checkpoint, even a damaged one, or output parts."""
    folders = storage.folders(folder)
    return (
        run_folder.PARTS in folders
        or run_folder.DAMAGED in folders
        or bool(checkpoints.complete_checkpoints(folder))
    )


def _shown(value: Any) -> str:
    text = "not given" if value is None else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
