"""The folder of a run or sweep: who owns it, what an earlier process left there, and what may differ on a resume.

    with owned(folder, seen, overwrite) as lease:       # one driver at a time (lease.py)
        ...

`job.json` is written before the work begins: the resolved job, and what its inputs were at that moment (versions behind
aliases, digests of base and rows, versions of the libraries). A run resumes only with a job that gives the same results.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline import run_folder
from pipeline.errors import InputError, in_brief
from pipeline.input_uri import InputURI
from pipeline.job.identity import Identity
from pipeline.job.stages import INPUTS
from pipeline.registry import lineage
from pipeline.registry.store import flatten
from pipeline.run import checkpoints
from pipeline.system import lease, storage

# {file: owner of a folder of run.storage_path that contains it}
OWNERS = {run_folder.JOB: "a run", run_folder.RESULT: "a run", run_folder.SWEEP: "a sweep"}
# sections that do not affect a job's results
ELSEWHERE = ("run", "mlflow", "scaling", "source")
# keys that do not affect results, or affect only the order of summation
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
# Keys that decide which step is kept and where training stops, in a run that compares its evaluations.
COMPARISON = (
    "run.load_best_model_at_end", "run.metric_for_best_model", "run.greater_is_better", "run.early_stopping_patience", "run.stop_if",
    # logging_steps is the default of eval_steps. KTO's KL and extremes depend on the size of the batches.
    "trainer.eval_steps", "trainer.eval_strategy", "trainer.logging_steps", "trainer.per_device_eval_batch_size", "judge",
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- the folder


def check_folder(folder: str, owner: str, example: str) -> dict[str, list[str]]:
    """Returns the state() of a folder that is writable and has no run of another kind, which run.overwrite=true would delete.

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
def owned(folder: str, seen: dict[str, list[str]], overwrite: bool) -> Iterator[lease.Lease]:
    """Yields the lease of a folder, held by this process until the block ends; `overwrite` empties the folder.

    Raises InputError if another process has the folder, or changed it since this process saw its state().
    """
    with lease.held(folder) as mine:
        if not overwrite and state(folder) != seen:
            raise InputError(
                f"another process has run {folder} meanwhile; run the same command again", key="run.name"
            )
        if overwrite:  # only now: a mistake in the job must not delete the old run
            for name in storage.names(folder).keys() - {lease.FOLDER}:
                storage.remove(storage.join(folder, name))
        yield mine


# --------------------------------------------------------------------------------------- what a run has left


def record(run: Identity, inputs: dict[str, str], base: str, rows: dict[str, str]) -> None:
    """Writes job.json, which marks the start of the run."""
    facts = {"inputs": inputs, "base": base, "rows": rows, "versions": lineage.versions()}
    storage.write_json(storage.join(run.folder, run_folder.JOB), run.settings | {"begun_with": facts})


def left_in(folder: str, file: str, overwrite: bool, *keys: str) -> dict[str, Any]:
    """Returns a JSON object of an earlier process in a folder, or {} if there is none or `overwrite` starts over.

    Raises InputError if it is unreadable, or lacks one of `keys`.
    """
    path = storage.join(folder, file)
    if overwrite or not storage.exists(path):
        return {}
    try:
        left = storage.read_json(path)
        for key in keys:
            left[key]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({in_brief(error)}); restore it, choose another run.name, or set run.overwrite=true to start "
            "over",
            key="run.name",
        ) from error
    return left


def read(run: Identity, file: str) -> dict[str, Any]:
    """Returns job.json or result.json of the run of this name, as left_in. Raises InputError if it is another stage's."""
    left = left_in(run.folder, file, run.overwrite, "stage")
    if left and left["stage"] != run.stage:
        kind = "an unfinished" if file == run_folder.JOB else "a finished"
        raise InputError(
            f"{run.name!r} is the name of {kind} {left['stage']} run in {run.storage_path}; choose another name, for "
            f"example run.name={run.stage}-{run.name}",
            key="run.name",
        )
    return left


def unfinished(run: Identity) -> dict[str, Any]:
    """Returns job.json of the run that this one resumes, or {} if it starts one, or starts it over.

    Without a checkpoint or a part there is nothing to resume: the job may then be edited, and is another run.
    Raises InputError if this job would give other results than the one that began the run.
    """
    if not (left := read(run, run_folder.JOB)):
        return {}
    free = [*MAY_CHANGE, *_resolved(run), "begun_with"]
    if run.settings["data"]["batch_size"] or run.facts.online:  # the key then only limits the rows in memory
        free.append("trainer.per_device_train_batch_size")
    if run.facts.learns:  # others use the judge's scores, and make parts of as many rows
        free += ["judge", "trainer.local_rollout_forward_batch_size"]
    changed = differences(left, run, free)
    workers = [one.get("scaling", {}).get("num_workers") for one in (left, run.settings)]
    if run.facts.trl and not run.settings["data"]["batch_size"] and (workers[0] or 1) != (workers[1] or 1):
        changed["scaling.num_workers"] = (workers[0], workers[1])  # each worker adds its rows to a step
    # The rule that compares evaluations affects the result only if a job keeps the best step or may stop early.
    for given in (left.get("run", {}), run.settings["run"]):
        if (
            given.get("load_best_model_at_end")
            or given.get("early_stopping_patience")
            or given.get("stop_if")
        ):
            changed |= {key: two for key, two in differences(left, run).items() if _among(key, COMPARISON)}
    if changed and not _has_progress(run.folder):
        return {}
    if changed:
        different = [f"{key}={_shown(then)} (now {_shown(now)})" for key, (then, now) in changed.items()]
        raise InputError(
            f"{run.name!r} began with {', '.join(different)} and cannot resume with different settings. Restore them, choose "
            "another run.name, or set run.overwrite=true. Keys that do not decide the numbers may change: run, mlflow, gate, ...; with data.batch_size also scaling",
            key="run.name",
        )
    then, now = left.get("begun_with", {}).get("versions", {}), lineage.versions()
    if other := [
        f"{name} {then[name]} (now {now.get(name)})" for name in then if then[name] != now.get(name)
    ]:
        print(
            f"warning: {run.name!r} began with {', '.join(other)}, so its numbers may differ from here on",
            flush=True,
        )
    return left


def pinned_inputs(left: dict[str, Any], run: Identity) -> dict[str, str]:
    """Returns {input: version} that the run began with, for the inputs whose names have not changed since then."""
    inputs = left.get("begun_with", {}).get("inputs", {})
    return {
        key: version
        for key, version in inputs.items()
        if left.get(name := key.partition(".")[0]) == run.settings[name]
    }


def same_content(left: dict[str, Any], run: Identity, base: str, rows: dict[str, str]) -> bool:
    """Returns True if base and `rows` (digests of rows and functions) are what the run began with, False if it starts again.

    Raises InputError, with what changed since the run began, if it left checkpoints or parts.
    """
    was = left.get("begun_with", {})
    begun_on = was.get("base", base)
    changed = [f"model.name_or_path ({run.settings['model']['name_or_path']})"] if begun_on != base else []
    names = [name for name, digest in was.get("rows", {}).items() if rows.get(name, digest) != digest]
    changed += [name if name in INPUTS or "." in name else f"data.{name}" for name in names]
    if changed and _has_progress(run.folder):
        commit = begun_on.partition("commit:")[2]
        restore = f"Set model.revision={commit}" if commit and begun_on != base else "Restore the files"
        raise InputError(
            f"the content of {', '.join(changed)} has changed since {run.name!r} began, so it cannot resume. {restore}, "
            "choose another run.name, or set run.overwrite=true",
            key="run.name",
        )
    return not changed


# --------------------------------------------------------------------------------------------- differences


def essence(run: Identity, *but: str) -> dict[str, Any]:
    """Returns the settings that affect a run's results, as plain data, without the sections `but`."""
    kept = {key: value for key, value in run.settings.items() if key not in (*ELSEWHERE, *but)}
    return kept | {"data": {key: value for key, value in kept["data"].items() if key != "cache_dir"}}


def differences(left: dict[str, Any], run: Identity, but: Sequence[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Returns {section.key: (value in a recorded job, value in this run)} where they differ, except for `but`."""
    then, now = flatten(left), flatten(run.settings)
    return {
        key: (then.get(key), now.get(key))
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key) and not _among(key, but)
    }


def _among(key: str, keys: Sequence[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def print_differences(left: dict[str, Any], run: Identity) -> None:
    """Prints the settings of this command that differ from a finished run's."""
    changed = differences(left, run, ("run", "source", *_resolved(run)))
    if changed:
        print("it ran with other settings; this command's were not used:")
    for key, (then, now) in changed.items():
        print(f"   {key}: was {_shown(then)}, is {_shown(now)}")


def _resolved(run: Identity) -> tuple[str, ...]:
    """Returns the keys whose resolved value a run records: the base of a registered version, the commit on the hub.

    The base's content is compared later.
    """
    named = InputURI.parse(run.settings["model"]["name_or_path"]).is_registered
    return ("model.name_or_path", "model.revision") if named else ("model.revision",)


def _has_progress(folder: str) -> bool:
    """Returns True if a run left something to resume: a checkpoint, even a damaged one, or output parts."""
    folders = storage.folders(folder)
    return run_folder.PARTS in folders or run_folder.DAMAGED in folders or bool(checkpoints.complete(folder))


def _shown(value: Any) -> str:
    shown = "not given" if value is None else json.dumps(value)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
