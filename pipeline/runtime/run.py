"""The life of a run on the driver: check everything, prepare the rows, do the work, register, print the outcome.

    launch(job, train) -> the content of result.json        for a stage that runs in Ray Train's workers
    with open_run(job) as run: ...                          what every run has in common, whatever it does inside

Mistakes are found before the first worker starts, and nothing is registered until an adapter exists, reloads as it was
saved, and has been compared with what the artifact store gives back.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pipeline import registry
from pipeline.config import Job, rules
from pipeline.config.stages import STAGE
from pipeline.errors import InputError, summary
from pipeline.registry import lineage
from pipeline.report.headline import how_it_ended
from pipeline.runtime import checkpoints, driver, earlier
from pipeline.runtime.claim import claim, clear, wait_for_old_workers
from pipeline.runtime.driver import Outcome
from pipeline.runtime.host import Sweep, Work
from pipeline.runtime.preparation import Run, announce, prepared
from pipeline.runtime.summary import print_summary
from pipeline.runtime.worker import Worker
from pipeline.system import console, storage
from pipeline.system.credentials import without_credentials

# What a stage registers or promotes: from the run and its outcome to a version, or None.
Register = Callable[[Run, Outcome], registry.Version | None]
# What a stage runs beside its workers while they train: its value is handed to each of them.
Beside = Callable[[Work], contextlib.AbstractContextManager[Any]]


def unless_finished(job: Job, execute: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    """The result of a job: read from the run of its name if that one is finished, else that of `execute(job)`.

    Raises:
        InputError: when the name belongs to a run of another stage, an iteration or a sweep, or the storage path cannot be
            written to.
    """
    job = driver.name_run(job)
    storage.require_writable(job.run.storage_path)
    earlier.check_owner(job.folder, "a run", job.stage)
    return finished_result(job) or execute(job)


def launch(
    job: Job,
    train: Callable[[Worker], dict[str, Any]],
    register: Register | None = None,
    sweep: Sweep | None = None,
    beside: Beside | None = None,
) -> dict[str, Any]:
    """Runs one stage from its job to its result.json; `train(worker)` is what every worker executes.

    Args:
        register: makes or promotes the run's version before it counts as finished; None: registers the adapter.
        sweep: that the run is a trial of; None: it stands by itself.
        beside: what runs while the workers train. None: nothing.

    Raises:
        InputError: when the job, the data or an input is wrong; nothing has been registered then.
    """

    def execute(job: Job) -> dict[str, Any]:
        with open_run(job) as run:
            result = _train_and_register(
                run, train, register or publish, sweep, beside or (lambda _: contextlib.nullcontext())
            )
        print_summary(result, _draw_report(result) if job.run.report else None)
        return result

    return unless_finished(job, execute)


def _draw_report(result: dict[str, Any]) -> str | None:
    """Where the report was drawn, if it could be."""
    from pipeline import report

    try:
        with console.waiting("drawing the report"):
            return report.attach(result)
    except (KeyboardInterrupt, SystemExit):
        print_summary(result, None)
        print(f"the run is finished; its report is drawn by make report RUN={result['folder']}", flush=True)
        raise


@contextlib.contextmanager
def open_run(job: Job) -> Iterator[Run]:
    """A run that may write: checked, alone in its folder, and continuing what an earlier process left there.

    A failure inside leaves failed.json, for the run's report; a run that goes on again removes it.

    Raises:
        InputError: when the job, the data or an input is wrong, another process runs under that name, or this job
            cannot continue what is there.
    """
    announce(job)
    registry.check_trackers(job)
    with console.waiting("opening MLflow"):
        registry.check(job)
    left_behind = earlier.recorded(job)
    left = earlier.unfinished(job)
    pinned = earlier.pinned_inputs(left, job) if left else {}
    for warning in rules.warnings(job):
        print(f"warning: {warning}", flush=True)
    with prepared(job, pinned) as run:
        if run.report:
            print(run.report.render(samples=not run.report.reused), flush=True)
        if STAGE[job.stage].learns and (other_base := registry.other_base(run.job, run.work.base)):
            print(f"warning: {other_base}", flush=True)
        if left:
            run.continues = earlier.same_content(left, run.job, run.work.base["digest"], run.work.digests)
        with claim(run.folder):
            if not job.run.fresh and storage.exists(storage.join(run.folder, "result.json")):
                raise InputError(
                    f"{job.run.name!r} was finished by another process meanwhile; the same command shows its result",
                    key="run.name",
                )
            if earlier.recorded(job) != left_behind:
                raise InputError(
                    f"{job.run.name!r} was begun by another process meanwhile; type the same command again",
                    key="run.name",
                )
            wait_for_old_workers(run.folder)
            if job.run.fresh:  # not before: a mistake in the job must not cost the run that it was to replace
                clear(run.folder)
            checkpoints.newest(run.folder)  # sets damaged ones aside before any worker starts
            earlier.record(run.job, run.work.inputs, run.work.base["digest"], run.work.digests)
            with failure_recorded(run):
                try:
                    yield run
                except (KeyboardInterrupt, SystemExit) as stop:  # the command line says how to continue
                    stop.add_note(f"{job.stage}.run.name={job.run.name}")
                    raise


def _train_and_register(
    run: Run,
    train: Callable[[Worker], dict[str, Any]],
    register: Register,
    sweep: Sweep | None,
    beside: Beside,
) -> dict[str, Any]:
    """From a run that is open to its result.json."""
    job, parent = run.job, sweep.run_id if sweep else None
    with registry.mlflow_run(job, run.work.digests, anew=not run.continues, parent=parent) as run_id:
        run.mlflow_run_id = run_id
        work = replace(run.work, run_id=run_id, sweep=sweep)
        with beside(work) as what:
            outcome = driver.fit(work, run.rows, train, what)
        version = register(run, outcome)
        result = describe(run, outcome, version)
        if ended := how_it_ended(result):
            registry.tag_run(registry.tracking_uri(job), run_id, "ended", ended)
        storage.write_json(storage.join(run.folder, "result.json"), result)
    return result


def publish(run: Run, outcome: Outcome) -> registry.Version | None:
    """Registers the adapter that was trained; the alias moves to it if it has learned anything and the gate lets it."""
    if not outcome.adapter:
        return None
    assert run.mlflow_run_id
    start = run.work.inputs.get("policy")
    return publish_adapter(run.job, run.mlflow_run_id, outcome.adapter, outcome.metrics, start)


def publish_adapter(
    job: Job, run_id: str, adapter: str, metrics: dict[str, float], start: str | None
) -> registry.Version | None:
    """Registers the adapter that an MLflow run has trained; None where the job names no registered model.

    Args:
        metrics: of the run; they decide the gate.
        start: the policy that training began with, pinned; None: there was none.
    """
    with storage.local_copy(adapter) as folder:
        unchanged = nothing_learned(job, folder, start)
        if unchanged:
            print(f"warning: {unchanged}", flush=True)
        if not job.mlflow.registered_model:
            return None
        facts = lineage.read(folder, adapter)
        print(f"registering {job.mlflow.registered_model}", flush=True)
        return registry.publish(job, run_id, folder, metrics, facts, unchanged)


def nothing_learned(job: Job, adapter: str, start: str | None) -> str | None:
    """Why the alias must not move to an adapter that is, to the last bit, the one that training began with; None: it is not."""
    from pipeline.models import adapter_files

    if adapter_files.learned(adapter, start and registry.fetch(start, registry.tracking_uri(job))):
        return None
    return (
        f"nothing was learned: after training the adapter equals {start or 'its initialisation'}. The learning rate was 0 at "
        "every step, as in a run that ends within its warm-up, or no gradient reached the adapter"
    )


@contextlib.contextmanager
def failure_recorded(run: Run) -> Iterator[None]:
    """Leaves failed.json in the folder of a run that fails, for its report; a run that goes on again removes it.

    A run that was interrupted has not failed: it is unfinished.
    """
    path = storage.join(run.folder, "failed.json")
    storage.remove(path)
    try:
        yield
    except Exception as error:
        failure = {
            "error": without_credentials(summary(error)),
            "traceback": without_credentials("".join(traceback.format_exception(error)))[-8000:],
            "seconds": round(time.monotonic() - run.started, 2),
            "mlflow_run_id": run.mlflow_run_id,
            "tracking_uri": registry.tracking_uri(run.job),
        }
        try:
            storage.write_json(path, failure)
        except Exception as other:  # a full disk, say: the failure itself is what its user has to see
            print(f"warning: {path} was not written ({summary(other)})", flush=True)
        raise


def finished_result(job: Job) -> dict[str, Any] | None:
    """The result of a run of this name that already ended; None for one to be continued, or to be started over.

    Raises:
        InputError: when the name belongs to a run of another stage, whose checkpoints this one cannot continue.
    """
    if job.run.fresh:
        return None
    path, unfinished = (storage.join(job.folder, name) for name in ("result.json", earlier.FILE))
    if not storage.exists(path):
        if storage.exists(unfinished):
            earlier.read(job, unfinished)
        return None
    result = earlier.read(job, path)
    print(
        f"run {job.run.name} is finished ({path}); run.fresh=true starts it over, another run.name starts a new one"
    )
    if result.get("job"):
        earlier.print_differences(result["job"], job)
    return result | {"folder": job.folder}  # where it is now: it may have been moved since


def describe(run: Run, outcome: Outcome, version: registry.Version | None) -> dict[str, Any]:
    """What result.json says: how a script, or the next stage, learns what happened."""
    return {
        "stage": run.job.stage,
        "name": run.job.run.name,
        "folder": run.folder,
        "metrics": outcome.metrics,
        **outcome.end,
        "samples": outcome.samples,
        "checkpoint": outcome.checkpoint,
        "adapter": outcome.adapter,
        "mlflow_run_id": run.mlflow_run_id,
        "tracking_uri": registry.tracking_uri(run.job),
        "registered_model": version.name if version else None,
        "version": version.version if version else None,
        "alias": version.alias if version else None,
        "gate": version.gate if version else None,
        "inputs": run.work.inputs,
        "data": {"digests": run.work.digests, "report": run.report.to_dict()},
        "seconds": round(time.monotonic() - run.started, 2),
        "train_seconds": round(outcome.seconds, 2),
        "peak_memory_bytes": outcome.peak_memory,
        "versions": lineage.versions(),
        "job": run.job.to_dict(),
    }
