"""The folder of a run or sweep: who owns it, what an earlier process left there, and what may differ on a resume.

    with owned(folder, seen, fresh) as lease:       # one driver at a time (lease.py)
        ...

`job.json` is written before the work begins: the resolved job, and what its inputs were at that moment (versions behind
aliases, digests of base and rows). A run resumes only with a job that gives the same results.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config import Job
from pipeline.config.stages import INPUTS, STAGE
from pipeline.errors import InputError, in_brief
from pipeline.references import Ref
from pipeline.registry.store import flatten
from pipeline.runtime import checkpoints, lease
from pipeline.system import storage

FILE = "job.json"
PARTS = "parts"  # the folder of the finished parts of batch inference and of an evaluation
# Who owns a folder of run.storage_path, by the file in it.
OWNERS = {FILE: "a run", "result.json": "a run", "sweep.json": "a sweep"}
# Sections that do not decide the numbers of a job.
ELSEWHERE = ("run", "mlflow", "scaling", "source")
# Keys that do not decide the numbers, or only the order in which they are summed up.
MAY_CHANGE = (
    "run", "mlflow", "gate", "scaling", "source", "data.cache_dir",
    "model.attn_implementation",
    "trainer.logging_steps", "trainer.logging_strategy", "trainer.logging_first_step",
    "trainer.save_steps", "trainer.save_strategy", "trainer.eval_steps", "trainer.eval_strategy",
    "trainer.per_device_eval_batch_size", "trainer.micro_batch_tokens",
    "trainer.gradient_checkpointing", "trainer.gradient_checkpointing_kwargs",
    "trainer.dataloader_num_workers", "trainer.dataloader_prefetch_factor", "trainer.dataloader_pin_memory",
    "rollout.num_workers", "rollout.use_gpu", "rollout.resources_per_worker", "rollout.label_selector", "rollout.patience_s",
    "rollout.chunk_timeout_s", "rollout.tensor_parallel_size", "rollout.gpu_memory_utilization",
)  # fmt: skip
# Keys that decide which step is kept and where training stops, in a run that compares its evaluations.
COMPARISON = (
    "run.keep", "run.metric_for_best_model", "run.greater_is_better", "run.early_stopping_patience", "run.stop_if",
    # logging_steps is the default of eval_steps. KTO's KL and extremes depend on the size of the batches.
    "trainer.eval_steps", "trainer.eval_strategy", "trainer.logging_steps", "trainer.per_device_eval_batch_size", "judge",
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- the folder


def named(job: Job) -> Job:
    """Returns the job with a run name, by default of stage and time, and an absolute storage path."""
    name = job.run.name or f"{job.stage}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid() % 10000:04d}"
    return replace(job, run=replace(job.run, name=name, storage_path=storage.absolute(job.run.storage_path)))


def check_folder(folder: str, owner: str, example: str) -> dict[str, list[str]]:
    """Returns the state() of a folder that is writable and has no run of another kind, which run.fresh=true would delete.

    Args:
        owner: `a run` or `a sweep`.
        example: what another name may begin with.
    """
    storage_path, _, name = folder.rpartition("/")
    storage.require_writable(storage_path)
    if not storage.is_remote(folder) and os.path.lexists(folder) and not os.path.isdir(folder):
        why = f"{folder} is no folder, or links to none; remove it, or choose another run.name"
        raise InputError(why, "run.name")
    for file in (seen := state(folder)):
        if OWNERS[file] != owner:
            raise InputError(
                f"{name!r} is the name of {OWNERS[file]} ({folder}); choose another name, for example run.name={example}-{name}",
                key="run.name",
            )
    return seen


def state(folder: str) -> dict[str, list[str]]:
    """Returns the content of the files that show the owner of a folder."""
    paths = {file: storage.join(folder, file) for file in OWNERS}
    return {file: list(storage.read_lines(path)) for file, path in paths.items() if storage.exists(path)}


@contextlib.contextmanager
def owned(folder: str, seen: dict[str, list[str]], fresh: bool) -> Iterator[lease.Lease]:
    """Yields the lease of a folder, held by this process until the block ends; `fresh` empties the folder.

    Raises InputError if another process has the folder, or changed it since this process saw its state().
    """
    with lease.held(folder) as mine:
        if not fresh and state(folder) != seen:
            raise InputError(
                f"another process has run {folder} meanwhile; run the same command again", key="run.name"
            )
        if fresh:  # only now: a mistake in the job must not delete the old run
            for name in storage.names(folder).keys() - {lease.FOLDER}:
                storage.remove(storage.join(folder, name))
        yield mine


# --------------------------------------------------------------------------------------- what a run has left


def record(job: Job, inputs: dict[str, str], base: str, rows: dict[str, str]) -> None:
    """Writes job.json: from here on the run has begun."""
    facts = {"inputs": inputs, "base": base, "rows": rows}
    storage.write_json(storage.join(job.folder, FILE), job.to_dict() | {"begun_with": facts})


def left_in(folder: str, file: str, fresh: bool, *keys: str) -> dict[str, Any]:
    """Returns a JSON object that an earlier process left in a folder, or {} if it left none, or `fresh` starts over.

    Raises InputError if it cannot be read, or lacks one of `keys`.
    """
    path = storage.join(folder, file)
    if fresh or not storage.exists(path):
        return {}
    try:
        left = storage.read_json(path)
        for key in keys:
            left[key]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({in_brief(error)}); restore it, choose another run.name, or set run.fresh=true to start "
            "over",
            key="run.name",
        ) from error
    return left


def read(job: Job, file: str) -> dict[str, Any]:
    """Returns job.json or result.json of the run of this name, as left_in. Raises InputError if it is another stage's."""
    left = left_in(job.folder, file, job.run.fresh, "stage")
    if left and left["stage"] != job.stage:
        kind = "an unfinished" if file == FILE else "a finished"
        raise InputError(
            f"{job.run.name!r} is the name of {kind} {left['stage']} run in {job.run.storage_path}; choose another name, for "
            f"example run.name={job.stage}-{job.run.name}",
            key="run.name",
        )
    return left


def unfinished(job: Job) -> dict[str, Any]:
    """Returns job.json of the run that this job resumes, or {} if it starts one, or starts it over.

    Without a checkpoint or a part there is nothing to resume: the job may then be edited, and is another run.
    Raises InputError if this job would give other results than the one that began the run.
    """
    if not (left := read(job, FILE)):
        return {}
    free = [*MAY_CHANGE, *_resolved(job), "begun_with"]
    if job.data.batch_size or job.stage == "ppo":  # the key then only limits the rows in memory
        free.append("trainer.per_device_train_batch_size")
    if STAGE[job.stage].learns:  # others use the judge's scores, and make parts of as many rows
        free += ["judge", "trainer.local_rollout_forward_batch_size"]
    changed = differences(left, job, free)
    # How evaluations are compared decides the result only if one of the jobs keeps the best step or may stop early.
    for run in (left.get("run", {}), job.to_dict()["run"]):
        if run.get("keep") == "best" or run.get("early_stopping_patience") or run.get("stop_if"):
            changed |= {key: two for key, two in differences(left, job).items() if _among(key, COMPARISON)}
    if changed and not _has_progress(job):
        return {}
    if changed:
        different = [f"{key}={_shown(then)} (now {_shown(now)})" for key, (then, now) in changed.items()]
        raise InputError(
            f"{job.run.name!r} began with {', '.join(different)} and cannot resume with different settings. Restore them, choose "
            "another run.name, or set run.fresh=true. Keys that do not decide the numbers may change: run, mlflow, gate, scaling, ...",
            key="run.name",
        )
    return left


def pinned_inputs(left: dict[str, Any], job: Job) -> dict[str, str]:
    """Returns {input: version} that the run began with, for the inputs whose names have not changed since then."""
    inputs = left.get("begun_with", {}).get("inputs", {})
    return {
        key: version
        for key, version in inputs.items()
        if left.get(name := key.partition(".")[0]) == getattr(job, name)
    }


def same_content(left: dict[str, Any], job: Job, base: str, rows: dict[str, str]) -> bool:
    """Returns True if base and `rows` (digests of rows and functions) are what the run began with, False if it starts again.

    Raises InputError, with what changed since the run began, if it left checkpoints or parts.
    """
    was = left.get("begun_with", {})
    begun_on = was.get("base", base)
    changed = [f"model.name_or_path ({job.model.name_or_path})"] if begun_on != base else []
    names = [name for name, digest in was.get("rows", {}).items() if rows.get(name, digest) != digest]
    changed += [name if name in INPUTS or "." in name else f"data.{name}" for name in names]
    if changed and _has_progress(job):
        commit = begun_on.partition("commit:")[2]
        restore = f"Set model.revision={commit}" if commit and begun_on != base else "Restore the files"
        raise InputError(
            f"the content of {', '.join(changed)} has changed since {job.run.name!r} began, so it cannot resume. {restore}, "
            "choose another run.name, or set run.fresh=true",
            key="run.name",
        )
    return not changed


# --------------------------------------------------------------------------------------------- differences


def essence(job: Job, *but: str) -> dict[str, Any]:
    """Returns what decides the numbers of a job, as plain data, without the sections `but`."""
    kept = {key: value for key, value in job.to_dict().items() if key not in (*ELSEWHERE, *but)}
    kept["data"] = {key: value for key, value in kept["data"].items() if key != "cache_dir"}
    return json.loads(json.dumps(kept))


def differences(left: dict[str, Any], job: Job, but: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns {section.key: (value in a recorded job, value in this job)} where they differ, except for `but`."""
    then, now = (flatten(tree) for tree in (left, json.loads(json.dumps(job.to_dict(), default=str))))
    return {
        key: (then.get(key), now.get(key))
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key) and not _among(key, but)
    }


def _among(key: str, keys: Sequence[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def print_differences(left: dict[str, Any], job: Job) -> None:
    """Prints the settings of this command that a finished run did not use."""
    changed = differences(left, job, ("run", "source", *_resolved(job)))
    if changed:
        print("it ran with other settings; this command's were not used:")
    for key, (then, now) in changed.items():
        print(f"   {key}: was {_shown(then)}, is {_shown(now)}")


def _resolved(job: Job) -> tuple[str, ...]:
    """Returns the keys whose resolved value a run records: the base of a registered version, the commit on the hub.

    The base's content is compared later.
    """
    named = Ref.parse(job.model.name_or_path).is_registered
    return ("model.name_or_path", "model.revision") if named else ("model.revision",)


def _has_progress(job: Job) -> bool:
    """Returns True if the run left something to resume: a checkpoint, even a damaged one, or output parts."""
    folders = storage.folders(job.folder)
    return PARTS in folders or checkpoints.DAMAGED in folders or bool(checkpoints.complete(job.folder))


def _shown(value: Any) -> str:
    shown = "not given" if value is None else json.dumps(value)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
