"""Runs a job from the driver: checks the job, prepares its rows, starts the work, registers the model and prints the outcome.

    launch(job, recipe) -> the content of result.json               for a stage that runs in Ray Train's workers
    with open_run(job, earlier) as (work, rows, report): ...        for every run

Wrong input raises an error before the first worker starts. An adapter is registered only after it was reloaded, and compared with
its copy in the artifact store.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline import registry, run_folder, text
from pipeline.errors import InputError, LeaseLost, causes_of, error_summary
from pipeline.job import Job
from pipeline.job.identity import identity_of
from pipeline.job.rules import find_warnings
from pipeline.models import adapter_files
from pipeline.registry import lineage
from pipeline.registry.store import call_persistently
from pipeline.run import checkpoints, judging, resume
from pipeline.run.prepare import prepared_run, print_header
from pipeline.run.resume import Earlier
from pipeline.run.summary import how_it_ended, print_summary
from pipeline.run.worker import Worker, run_worker
from pipeline.run_folder import Result
from pipeline.settle import placement
from pipeline.settle.identity import tracking_of, with_run_name
from pipeline.settle.inputs import check_paths
from pipeline.settle.placement import Places
from pipeline.settle.work import SweepHandle, Work
from pipeline.system import console, prices, storage, terminal
from pipeline.system.credentials import without_secrets

Train = Callable[[Worker], dict[str, Any]]
Register = Callable[[Work, Result], registry.Version | None]
Companion = Callable[[Work], contextlib.AbstractContextManager[Any]]


def publish_adapter(work: Work, result: Result) -> registry.Version | None:
    """Registers the trained adapter as a version. Moves the alias to this version if training changed it and the gate passes.

    Returns None if nothing was trained, or if the job names no registered model.

    Args:
        result: the content of result.json so far.
    """
    if not (adapter := result["adapter"]):
        return None
    start = work.inputs.get("policy")
    with storage.local_copy(adapter) as folder:
        unchanged = None
        if not adapter_files.was_trained(folder, start.folder if start else None):
            cause = "The learning rate was 0 at every step, as in a run that ends within its warm-up, or no gradient reached the adapter"
            if result["metrics"].get("grad_norm/policy") == 0:
                cause = "No gradient reached the adapter, because every advantage was 0, as if all completions of a prompt get the same score"
            unchanged = f"nothing was learned: after training the adapter equals {start.version if start else 'its initialization'}. {cause}"
            print(f"warning: {unchanged}", flush=True)
        if not work.gate.model:
            return None
        facts = lineage.read(folder, adapter)
        print(f"registering {work.gate.model}", flush=True)
        run_id, stage = result["mlflow_run_id"], work.identity.stage
        return registry.publish(
            work.uri, work.gate, stage, run_id, folder, result["metrics"], facts, unchanged
        )


@dataclass(frozen=True)
class Recipe:
    """The functions that a stage runs in Ray Train's workers and on the driver."""

    train: Train  # runs in every worker, and returns the result of Worker.finish
    # f(work, result.json so far) -> the version that the run registers or promotes, or None
    register: Register = publish_adapter
    # Context manager on the driver that is open while the workers train. Each worker gets the yielded value.
    companion: Companion = lambda work: contextlib.nullcontext()
    show: Callable[[Result], None] = lambda result: None  # prints tables after the summary


def launch(job: Job, recipe: Recipe, sweep: SweepHandle | None = None) -> Result:
    """Runs one stage. Returns the content of result.json.

    Args:
        sweep: the sweep that this run is a trial of, or None.
    """
    job = with_run_name(job)
    earlier = resume.find_earlier(identity_of(job))
    result = finished_result(earlier) or _train_and_register(job, earlier, recipe, sweep)
    recipe.show(result)
    return result


def _train_and_register(job: Job, earlier: Earlier, recipe: Recipe, sweep: SweepHandle | None) -> Result:
    with terminal.output_logged() as log_into:
        with open_run(job, earlier) as (work, rows, report):
            log_into(work.folder)
            terminal.say(text.row("data", report.headline()))
            work = replace(work, sweep=sweep)
            with recipe.companion(work) as companion:
                outcome = train_in_workers(work, rows, recipe.train, companion)
            outcome |= {"mlflow_run_id": work.run_id, "tracking_uri": work.uri}
            work.lease.require()
            version = call_persistently(work.uri, work.folder, lambda: recipe.register(work, outcome))
            if ending := how_it_ended(outcome):
                set_tag = registry.client(work.uri).set_tag
                call_persistently(work.uri, work.folder, lambda: set_tag(work.run_id, "ended", ending))
            cost = cost_of(work.places, outcome.pop("usage"), outcome["train_seconds"])
            outcome |= {**version_entries(version), "cost": cost, "versions": lineage.versions()}
            result = write_result(work, report, outcome)
        print_summary(result)
    return result


def finished_result(earlier: Earlier) -> Result | None:
    """Returns the result of the finished run of this name, or None if there is none."""
    if not earlier.result:
        return None
    run = earlier.identity
    print(
        f"run {run.name} is finished ({run.folder}/result.json), and rows and aliases are not read again; run.overwrite=true starts it "
        "over, another run.name starts a new one"
    )
    resume.print_differences(earlier.result.get("job") or run.settings, run)
    return earlier.result | {"folder": run.folder}  # the folder may have been moved after the run


@contextlib.contextmanager
def open_run(job: Job, earlier: Earlier) -> Iterator[tuple[Work, dict[str, Any], Any]]:
    """Yields the Work of a run, its tokenized rows by name, and the report on the rows.

    Holds the lease of the run's folder during the block, so that no other process writes into it. Raises InputError if the job,
    its data or an input is wrong, or if the run cannot resume.
    """
    started, tracking = time.monotonic(), tracking_of(job)
    old_job = _check_before_start(job, earlier, tracking)
    with contextlib.ExitStack() as stack:
        pinned = resume.pinned_inputs(old_job, tracking.identity)
        work, rows, report = stack.enter_context(prepared_run(job, pinned))
        if report:
            print(report.render(samples=False), flush=True)
            counts = {name: split.kept for name, split in report.splits.items()}
            for line in judging.estimate_costs(work, rows, counts):
                terminal.say(line)
        content = work.digests | resume.digest_tokenizer(work.tokenizer)
        resumed = bool(old_job) and resume.same_content(old_job, work.identity, work.base["digest"], content)
        lease = stack.enter_context(resume.owned_folder(work.folder, earlier.files, work.identity.overwrite))
        checkpoints.newest_checkpoint(work.folder)  # moves damaged checkpoints away before a worker starts
        resume.record_start(work.identity, work.versions, work.base["digest"], content)
        run_id = stack.enter_context(_mlflow_run(work, new_run=not resumed))
        work = replace(work, lease=lease, started=started, run_id=run_id)
        stack.enter_context(failure_recorded(work))
        yield work, rows, report


def _check_before_start(job: Job, earlier: Earlier, tracking: registry.Tracking) -> dict[str, Any]:
    """Makes the checks that take seconds and need neither the base nor the rows. Returns resume.resumable_job(earlier)."""
    prices.read_prices()  # raises an error early if the price file is invalid
    check_paths(job)
    print_header(f"{job.stage}  run {job.run.name}  {job.source}")
    registry.check_trackers(tracking.trackers)
    with console.print_if_slow("opening MLflow"):
        registry.check_store(tracking)
    old_job = resume.resumable_job(earlier)
    for warning in find_warnings(job):
        print(f"warning: {warning}", flush=True)
    return old_job


def _mlflow_run(work: Work, new_run: bool) -> contextlib.AbstractContextManager[str | None]:
    """Opens the MLflow run of a stage that runs in Ray Train's workers. Stages outside Ray Train have no MLflow run."""
    if work.spec.runs_in != "train":
        return contextlib.nullcontext()
    return registry.mlflow_run(work.tracking, work.digests, new_run=new_run)


def write_result(work: Work, report: Any, entries: Result) -> Result:
    """Writes result.json, which marks the run as finished, and returns the content.

    Args:
        report: the report on the rows, or None if the job reads no rows.
        entries: entries that only this stage has.
    """
    if report:
        entries |= {"data": {"digests": work.digests, "report": report.to_dict()}}
    if judges := judging.read_costs(work):
        entries |= {"judges": judges}
        for name, costs in judges.items():
            numbers = "  ".join(f"{key} {value:g}" for key, value in costs.items())
            terminal.say(f"judge of {name}: {numbers}", result=True)
    work.lease.require()
    run = work.identity
    result: Result = {
        "stage": run.stage,
        "name": run.name,
        "folder": run.folder,
        "inputs": work.versions,
        **entries,
        "seconds": round(time.monotonic() - work.started, 2),
        "job": run.settings,
    }
    # Deletes a report that `rlhf report` drew of the unfinished run, so that the finished run gets a new one.
    storage.remove(storage.join(run.folder, run_folder.REPORT))
    storage.write_json(storage.join(run.folder, run_folder.RESULT), result)
    # Deletes the parts only after the result is written, because an interrupted run resumes from its parts.
    storage.remove(storage.join(run.folder, run_folder.PARTS))
    return result


@contextlib.contextmanager
def failure_recorded(work: Work) -> Iterator[None]:
    """Writes failed.json, which the report shows, if the block raises an error.

    An interruption (Ctrl-C or SIGTERM) is not recorded as a failure. The exception gets a note with the run's name, and
    the command line prints how to continue the run.
    """
    path = storage.join(work.folder, run_folder.FAILED)
    storage.remove(path)  # the attempt that this run continues may have left failed.json
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as interrupt:
        interrupt.add_note(f"run.name={work.identity.name}")
        raise
    except Exception as error:
        if any(isinstance(cause, LeaseLost) for cause in causes_of(error)):
            raise  # another process owns the folder now
        failure = {
            "error": without_secrets(error_summary(error)),
            "traceback": without_secrets("".join(traceback.format_exception(error)))[-8000:],
            "seconds": round(time.monotonic() - work.started, 2),
            "mlflow_run_id": work.run_id,
            "tracking_uri": work.uri,
        }
        # Errors while writing must not hide the failure itself, for example if the disk is full.
        with contextlib.suppress(Exception):
            storage.write_json(path, failure)
        raise


def train_in_workers(work: Work, rows: dict[str, Any], train: Train, companion: Any) -> Result:
    """Runs `train(worker)` in every worker. Returns the result of Worker.finish, with the paths of checkpoint and adapter."""
    from pipeline.run.fit import fit

    places, run = work.places, work.identity
    if not places.in_process:
        plural = "s" * (places.workers.most > 1)
        print(f"starting {places.count} worker{plural}: importing torch and transformers", flush=True)
    started = time.monotonic()
    try:
        config = {"train": train, "work": work, "companion": companion}
        outcome = fit(places, work.run, run_worker, config, rows)
    except Exception as error:
        if any(isinstance(cause, InputError | LeaseLost) for cause in causes_of(error)):
            raise  # the user cannot resume with the same command
        with contextlib.suppress(OSError):  # reading the run's folder may fail too
            newest = next(reversed(checkpoints.complete_checkpoints(run.folder)), None)
            effect = f"continues from {newest}" if newest else "starts it over: no checkpoint is complete yet"
            advice = f"the same command with run.name={run.name} {effect}"
            terminal.say(f"run {run.name} failed; {advice}", result=True)
        raise
    checkpoint = storage.join(run.folder, checkpoints.complete_checkpoints(run.folder)[-1])
    adapter = storage.join(checkpoint, "adapter")
    return outcome | {
        "checkpoint": checkpoint,
        "adapter": adapter if storage.exists(adapter) else None,
        "train_seconds": round(time.monotonic() - started, 2),
    }


def cost_of(places: Places, usage: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns the cost of the GPUs that workers and rollout workers of a run used; see prices.cost_of_run."""
    gpus = 0.0
    if usage["gpu"]:
        gpus = usage["workers"] * places.workers.each.resources.get("GPU", 0)
        gpus += places.rollout.most * places.rollout.each.resources.get("GPU", 0) if places.rollout else 0
    return prices.cost_of_run({**usage, "gpus": gpus}, seconds, not placement.on_cluster())


def version_entries(version: registry.Version | None) -> Result:
    """Returns the entries of result.json about the version that a run registered or promoted."""
    return {
        "registered_model": version.name if version else None,
        "version": version.version if version else None,
        "alias": version.alias if version else None,
        "gate": version.gate if version else None,
        "champion": asdict(version.champion) if version else None,
    }
