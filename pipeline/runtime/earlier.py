"""What an earlier process left in the folder of a run, and which keys of the job may differ when the run goes on.

`job.json` is written before the work begins: the resolved job, and what its inputs were at that moment (versions behind
aliases, digests of base and rows). What a run left, checkpoints or parts of its output, is continued only by a job that
leads to the same end.
"""

import json
from collections.abc import Callable
from typing import Any

from pipeline.config import Job
from pipeline.config.stages import INPUTS, STAGE
from pipeline.errors import InputError, in_brief
from pipeline.references import Ref
from pipeline.runtime import checkpoints
from pipeline.system import storage

FILE = "job.json"
PARTS = "parts"  # the folder of what batch inference has done
# What the entries of job.json and result.json are, where somebody relies on them.
KINDS: dict[str, Any] = {
    "stage": str, "name": str, "begun_with": dict, "inputs": dict, "metrics": dict, "samples": list, "job": dict,
    "data": dict, "seconds": (int, float), "mlflow_run_id": str, "tracking_uri": str,
}  # fmt: skip
# Whose a folder of run.storage_path is, by the file that it has.
OWNERS = {FILE: "a run", "result.json": "a run", "iterate.json": "an iteration", "sweep.json": "a sweep"}
BEGUN_WITH = {"inputs": dict, "base": str, "rows": dict}
# What does not decide the numbers, or only the order in which they are summed up.
MAY_CHANGE = (
    "run", "mlflow", "gate", "scaling", "source", "data.cache_dir",
    "model.attn_implementation",
    "trainer.logging_steps", "trainer.logging_strategy", "trainer.logging_first_step",
    "trainer.save_steps", "trainer.save_strategy", "trainer.eval_steps", "trainer.eval_strategy",
    "trainer.per_device_eval_batch_size", "trainer.micro_batch_tokens",
    "trainer.gradient_checkpointing", "trainer.gradient_checkpointing_kwargs",
    "trainer.dataloader_num_workers", "trainer.dataloader_prefetch_factor", "trainer.dataloader_pin_memory",
    "rollout.num_workers", "rollout.use_gpu", "rollout.resources_per_worker", "rollout.label_selector", "rollout.patience_s",
    "rollout.heartbeat_timeout_s", "rollout.chunk_timeout_s", "rollout.tensor_parallel_size", "rollout.gpu_memory_utilization",
)  # fmt: skip
# Of these, what decides which step is kept and where training stops, in a run that compares its evaluations.
COMPARISON = (
    "run.keep", "run.metric_for_best_model", "run.greater_is_better", "run.early_stopping_patience",
    # eval_steps is logging_steps where it is not set; figures of whole batches (KTO's KL, extremes) depend on their size.
    "trainer.eval_steps", "trainer.eval_strategy", "trainer.logging_steps", "trainer.per_device_eval_batch_size", "judge",
)  # fmt: skip


def record(job: Job, inputs: dict[str, str], base: str, rows: dict[str, str]) -> None:
    """Writes job.json: from here on the run is begun."""
    facts = {"inputs": inputs, "base": base, "rows": rows}
    storage.write_json(storage.join(job.folder, FILE), job.to_dict() | {"begun_with": facts})


def check_owner(folder: str, own: str, example: str) -> None:
    """Refuses a folder that something else has; run.fresh=true, too, would delete what is not its own.

    Args:
        own: what is to be in it: `a run`, `an iteration` or `a sweep`.
        example: what another name may begin with.
    """
    for file, owner in OWNERS.items():
        if owner != own and storage.exists(storage.join(folder, file)):
            name = folder.rpartition("/")[2]
            raise InputError(
                f"{name!r} is the name of {owner} ({folder}); choose another, for example run.name={example}-{name}",
                key="run.name",
            )


def read_object(
    path: str, kinds: dict[str, Any], check: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """A JSON object that a run left in its folder; `kinds` are the types of its entries, of which the first must be there.

    Args:
        check: of what else the object must hold; raises ValueError, KeyError or TypeError.

    Raises:
        InputError: when it cannot be read, or holds other things than a run writes.
    """
    try:
        left = storage.read_json(path)
        left[next(iter(kinds))]
        _check_kinds(left, kinds)
        _check_kinds(left.get("begun_with", {}), BEGUN_WITH)
        check(left)
        flat(left)  # or its nesting is deeper than any walk over it
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({in_brief(error)}); restore it, choose another run.name, or "
            "type run.fresh=true to start the run over",
            key="run.name",
        ) from error
    return left


def read(job: Job, path: str) -> dict[str, Any]:
    """A JSON file that a run left: job.json or result.json.

    Raises:
        InputError: when it cannot be read, or belongs to another stage.
    """
    left = read_object(path, KINDS)
    stage = left.get("stage")
    if stage != job.stage:
        state = "an unfinished" if path.endswith(FILE) else "a finished"
        raise InputError(
            f"{job.run.name!r} is the name of {state} {stage} run in {job.run.storage_path}; "
            f"choose another name, e.g. run.name={job.stage}-{job.run.name}",
            key="run.name",
        )
    return left


def _check_kinds(left: dict[str, Any], kinds: dict[str, Any]) -> None:
    """Raises TypeError for an entry that is of another kind than a run writes; older versions lack some."""
    for key, kind in kinds.items():
        if key in left and not isinstance(left[key], kind):
            raise TypeError(
                f"{key}: found {left[key]!r:.80}, expected {getattr(kind, '__name__', 'a number')}"
            )
    for key in kinds.keys() & {"inputs", "rows"}:
        if not all(isinstance(value, str) for value in left.get(key, {}).values()):
            raise TypeError(f"{key}: found {left[key]!r:.80}, expected texts")


def recorded(job: Job) -> dict[str, Any] | None:
    """job.json of the run of this name; None where there is none, or it is to be started over."""
    path = storage.join(job.folder, FILE)
    return None if job.run.fresh or not storage.exists(path) else read(job, path)


def unfinished(job: Job) -> dict[str, Any] | None:
    """job.json of the run that this job continues; None for one to be started, or started over.

    Without a checkpoint or a part there is nothing to continue: there the job may be mended, and is then another run.

    Raises:
        InputError: when this job would continue what is there to another end.
    """
    left = recorded(job)
    if left is None:
        return None
    free = _free(job)
    changed = differences(left, job, (*free, *_resolved(job), "begun_with")) | _other_comparison(left, job)
    different = [f"{key}={_shown(then)} (now {_shown(now)})" for key, (then, now) in changed.items()]
    if different and not _has_progress(job):
        return None
    if different:
        raise InputError(
            f"{job.run.name!r} was begun with {_first(different)}; what it left cannot be continued to "
            "the same end. Restore those values, or type another run.name or run.fresh=true. These may change: "
            f"{_first([key for key in free if key != 'source'])}",
            key="run.name",
        )
    then, now = differences(left, job, ()).get("scaling.num_workers", (None, None))
    if then != now and STAGE[job.stage].runs_in == "train":
        print(
            f"run {job.run.name} continues with scaling.num_workers={now} instead of {then}: the same batches, but sums in "
            "another order",
            flush=True,
        )
    return left


def pinned_inputs(left: dict[str, Any], job: Job) -> dict[str, str]:
    """{input: version} that the run was begun with, of the inputs that this job names as it did: aliases may have moved."""
    inputs = left.get("begun_with", {}).get("inputs", {})
    return {
        key: version
        for key, version in inputs.items()
        if left.get(name := key.partition(".")[0]) == getattr(job, name)
    }


def differences(left: dict[str, Any], job: Job, but: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """{section.key: (the value of a job that was run, this job's value)} where they differ, `but` some keys or sections."""
    then, now = (flat(tree) for tree in (left, json.loads(json.dumps(job.to_dict(), default=str))))
    return {
        key: (then.get(key), now.get(key))
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key) and not _in(key, but)
    }


def _other_comparison(left: dict[str, Any], job: Job) -> dict[str, tuple[Any, Any]]:
    """Differences in how evaluations are compared, where either of the two jobs keeps the best step or may stop early."""
    compares = (
        keys.get("run.keep") == "best" or "run.early_stopping_patience" in keys
        for keys in (flat(left), flat(job.to_dict()))
    )
    if not any(compares):
        return {}
    return {key: pair for key, pair in differences(left, job, ()).items() if key in COMPARISON}


def print_differences(left: dict[str, Any], job: Job, most: int = 5) -> None:
    """Of a run that is finished: the settings of this command that it was not run with."""
    changed = differences(left, job, ("run", "source", *_resolved(job)))
    if changed:
        print("it ran with other settings; those of this command were not used:")
    for key, (then, now) in list(changed.items())[:most]:
        print(f"   {key}: was {_shown(then)}, is {_shown(now)}")
    if len(changed) > most:
        print(f"   and {len(changed) - most} more")


def _resolved(job: Job) -> tuple[str, ...]:
    """Keys of which a run records what they stood for: the base of a registered version, the commit of one on the hub.

    The base's content is compared later.
    """
    named = Ref.parse(job.model.name_or_path).is_registered
    return ("model.name_or_path", "model.revision") if named else ("model.revision",)


def same_content(left: dict[str, Any], job: Job, base: str, rows: dict[str, str]) -> bool:
    """Whether base, rows and Python functions are still those that the run was begun with; if not, and it left nothing, it
    starts anew.

    Args:
        rows: digests, of sets of rows and of functions.

    Raises:
        InputError: naming what changed since the run began, when it left checkpoints or parts.
    """
    was = left.get("begun_with", {})
    begun_on = was.get("base", base)
    changed = [f"model.name_or_path ({job.model.name_or_path})"] if begun_on != base else []
    changed += changed_content(was.get("rows", {}), rows)
    if changed and _has_progress(job):
        raise InputError(
            f"the content of {', '.join(changed)} has changed since {job.run.name!r} began; it cannot be continued. "
            f"{_restore(begun_on, base)}, or type another run.name or run.fresh=true",
            key="run.name",
        )
    return not changed


def changed_content(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Keys of the job whose rows or functions have other digests now."""
    names = [name for name, digest in then.items() if now.get(name, digest) != digest]
    return [name if name in INPUTS else f"data.{name}" for name in names]


def _restore(begun_on: str, base: str) -> str:
    """What brings back a base of that digest; of rows, their files."""
    commit = begun_on.partition("commit:")[2]
    return f"Type model.revision={commit}" if commit and begun_on != base else "Restore the files"


def _free(job: Job) -> tuple[str, ...]:
    """The keys that may change."""
    free: tuple[str, ...] = MAY_CHANGE
    if job.data.batch_size or job.stage == "ppo":  # rows in memory, not rows of a step
        free += ("trainer.per_device_train_batch_size",)
    if STAGE[job.stage].learns:  # nothing is trained on its scores
        free += ("judge",)
    if STAGE[job.stage].runs_in == "train":  # elsewhere it decides which rows make a part
        free += ("trainer.local_rollout_forward_batch_size",)
    return free


def _has_progress(job: Job) -> bool:
    """Returns True if the run has left something to continue: a checkpoint, even a damaged one, or parts of its output."""
    folders = storage.folders(job.folder)
    return PARTS in folders or checkpoints.DAMAGED in folders or bool(checkpoints.complete(job.folder))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{section.key: value} of all in a tree that is not null."""
    if not isinstance(tree, dict):
        return {} if tree is None else {prefix.rstrip("."): tree}
    return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}{key}.").items()}


def _in(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(one + ".") for one in sections)


def _first(names: list[str], most: int = 5) -> str:
    """The first few of a list, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _shown(value: Any) -> str:
    shown = "not given" if value is None else json.dumps(value)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
