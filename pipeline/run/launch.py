"""The life of a run on the driver: check everything, prepare the rows, do the work, register, print the outcome.

    launch(job, train) -> the content of result.json        for a stage that runs in Ray Train's workers
    with open_run(job) as run: ...                          what every run has in common

Mistakes are found before the first worker starts. An adapter is registered only after it has been reloaded, and compared with
its copy in the artifact store.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline import registry, run_folder, text
from pipeline.errors import InputError, LeaseLost, causes, summary
from pipeline.job import Job
from pipeline.job.identity import Identity, identity_of
from pipeline.job.rules import find_warnings
from pipeline.models import adapter_files
from pipeline.registry import lineage
from pipeline.registry.store import call_persistently
from pipeline.run import checkpoints, judging, resume
from pipeline.run.prepare import announce, prepared
from pipeline.run.summary import how_it_ended, print_summary
from pipeline.run.worker import Worker, main
from pipeline.settle import placement
from pipeline.settle.identity import named, tracking_of
from pipeline.settle.placement import Places
from pipeline.settle.work import SweepHandle, Work
from pipeline.system import console, prices, storage, terminal
from pipeline.system.credentials import without_secrets

Train = Callable[[Worker], dict[str, Any]]  # a stage in a worker
# f(work, the future result.json) -> the version that a stage registers or promotes, or None
Register = Callable[[Work, dict[str, Any]], registry.Version | None]
# runs next to a stage's workers during training; each worker gets its value
Companion = Callable[[Work], contextlib.AbstractContextManager[Any]]


@dataclass
class OpenRun:
    """A prepared run, on the driver."""

    work: Work  # gets its run_id when the MLflow run is open
    rows: dict[str, Any]  # tokenized, by name: train, eval, pairs
    report: Any  # report on the rows, or None if the job reads none
    started: float  # time.monotonic() of the command
    continues: bool = False  # whether it resumes from a checkpoint or part of an earlier attempt

    @property
    def folder(self) -> str:
        return self.work.folder

    def data(self) -> dict[str, Any]:
        """Returns the facts about the rows for result.json."""
        return {"digests": self.work.digests, "report": self.report.to_dict()}

    def finish(self, **more: Any) -> dict[str, Any]:
        """Writes result.json: the entries of every run, and `more`. This finishes the run."""
        if judges := judging.costs(self.work):
            more["judges"] = judges
            for name, one in judges.items():
                numbers = "  ".join(f"{key} {value:g}" for key, value in one.items())
                terminal.say(f"judge of {name}: {numbers}", result=True)
        self.work.lease.require()
        run = self.work.run
        result = {
            "stage": run.stage,
            "name": run.name,
            "folder": run.folder,
            "inputs": self.work.versions,
            **more,
            "seconds": round(time.monotonic() - self.started, 2),
            "job": run.settings,
        }
        storage.write_json(storage.join(run.folder, run_folder.RESULT), result)
        return result


def launch(
    job: Job,
    train: Train,
    register: Register | None = None,
    sweep: SweepHandle | None = None,
    companion: Companion | None = None,
) -> dict[str, Any]:
    """Runs one stage from its job to its result.json; `train(worker)` is what every worker executes.

    Args:
        register: makes or promotes the run's version before it counts as finished. None registers the adapter.
        sweep: the sweep that the run is a trial of.
        companion: what runs while the workers train.
    """
    job = named(job)
    if result := finished(identity_of(job)):
        return result
    with terminal.logged() as log_into:
        with (
            open_run(job) as run,
            registry.mlflow_run(run.work.tracking, run.work.digests, new_run=not run.continues) as run_id,
        ):
            log_into(run.folder)
            terminal.say(text.row("data", run.report.headline()))
            run.work = replace(run.work, run_id=run_id, sweep=sweep)
            with companion(run.work) if companion else contextlib.nullcontext() as running:
                outcome = train_in_workers(run.work, run.rows, train, running)
            uri = run.work.uri
            outcome |= {"mlflow_run_id": run_id, "tracking_uri": uri, "inputs": run.work.versions}
            outcome["digests"] = run.work.digests
            run.work.lease.require()
            version = call_persistently(uri, run.folder, lambda: (register or publish)(run.work, outcome))
            if ended := how_it_ended(outcome):
                call_persistently(
                    uri, run.folder, lambda: registry.client(uri).set_tag(run_id, "ended", ended)
                )
            cost = cost_of(run.work.places, outcome.pop("usage"), outcome["train_seconds"])
            result = run.finish(
                **outcome, **described(version), cost=cost, versions=lineage.versions(), data=run.data()
            )
        print_summary(result)
    return result


def finished(run: Identity) -> dict[str, Any] | None:
    """Returns the result of the finished run of this name, or None if there is none.

    Raises InputError if the name belongs to another kind of run, or the storage path cannot be written to.
    """
    resume.check_folder(run.folder, "a run", run.stage)
    result = resume.read(run, run_folder.RESULT)
    if not result:
        resume.read(run, run_folder.JOB)  # raises if it is another stage's
        return None
    print(
        f"run {run.name} is finished ({run.folder}/result.json); run.overwrite=true starts it over, another run.name starts a "
        "new one"
    )
    resume.print_differences(result.get("job") or run.settings, run)
    return result | {"folder": run.folder}  # the folder may have been moved


@contextlib.contextmanager
def open_run(job: Job) -> Iterator[OpenRun]:
    """Yields a run that may write: checked, alone in its folder, and continuing what an earlier process left there.

    Raises InputError if the job, its data or an input is wrong, or it cannot resume what is there.
    """
    prices.read()  # a wrong file must be an error before the work
    started, tracking = time.monotonic(), tracking_of(job)
    seen = resume.state(job.folder)
    announce(job)
    registry.check_trackers(tracking.also)
    with console.waiting("opening MLflow"):
        registry.check_store(tracking)
    left = resume.unfinished(tracking.run)
    for warning in find_warnings(job):
        print(f"warning: {warning}", flush=True)
    with prepared(job, resume.pinned_inputs(left, tracking.run)) as (work, rows, report):
        run = OpenRun(work, rows, report, started)
        if run.report:
            print(run.report.render(samples=False), flush=True)
            counts = {name: split.kept for name, split in run.report.splits.items()}
            for line in judging.estimates(work, rows, counts):
                terminal.say(line)
        if left:
            run.continues = resume.same_content(left, work.run, work.base["digest"], work.digests)
        with resume.owned(run.folder, seen, job.run.overwrite) as lease:
            run.work = replace(work, lease=lease)
            checkpoints.newest(run.folder)  # moves damaged ones away before any worker starts
            resume.record(work.run, work.versions, work.base["digest"], work.digests)
            with failure_recorded(run):
                try:
                    yield run
                except (KeyboardInterrupt, SystemExit) as stop:  # the command line says how to continue
                    stop.add_note(f"run.name={job.run.name}")
                    raise


@contextlib.contextmanager
def failure_recorded(run: OpenRun) -> Iterator[None]:
    """Leaves failed.json in the folder of a run that fails, for its report. A run that is interrupted has not failed."""
    path = storage.join(run.folder, run_folder.FAILED)
    storage.remove(path)  # left by the attempt that this one continues
    try:
        yield
    except Exception as error:
        if any(isinstance(one, LeaseLost) for one in causes(error)):
            raise  # the folder is another process's
        failure = {
            "error": without_secrets(summary(error)),
            "traceback": without_secrets("".join(traceback.format_exception(error)))[-8000:],
            "seconds": round(time.monotonic() - run.started, 2),
            "mlflow_run_id": run.work.run_id,
            "tracking_uri": run.work.uri,
        }
        # For example of a full disk: the user has to see the failure itself
        with contextlib.suppress(Exception):
            storage.write_json(path, failure)
        raise


def train_in_workers(work: Work, rows: dict[str, Any], train: Train, companion: Any = None) -> dict[str, Any]:
    """Runs `train(worker)` in every worker; see on_ray.fit. Returns the outcome (Worker.finish) and where it is."""
    from pipeline.run.fit import fit

    places, run = work.places, work.run
    if not places.in_process:
        many = "s" * (places.workers.most > 1)
        print(f"starting {places.count} worker{many}: importing torch and transformers", flush=True)
    started = time.monotonic()
    try:
        config = {"train": train, "work": work, "companion": companion}
        outcome = fit(places, work.options, main, config, rows)
    except Exception as error:
        if any(isinstance(one, InputError | LeaseLost) for one in causes(error)):
            raise  # something else has to change first
        with contextlib.suppress(OSError):  # the disk itself may have failed
            newest = next(reversed(checkpoints.complete(run.folder)), None)
            does = f"continues from {newest}" if newest else "starts it over: no checkpoint is complete yet"
            again = f"the same command with run.name={run.name} {does}"
            terminal.say(f"run {run.name} failed; {again}", result=True)
        raise
    checkpoint = storage.join(run.folder, checkpoints.complete(run.folder)[-1])
    adapter = storage.join(checkpoint, "adapter")
    return outcome | {
        "checkpoint": checkpoint,  # the last one
        "adapter": adapter if storage.exists(adapter) else None,
        "train_seconds": round(time.monotonic() - started, 2),
    }


def publish(work: Work, result: dict[str, Any]) -> registry.Version | None:
    """Registers the adapter that was trained; the alias moves to it if it has learned anything and the gate passes.

    Returns None if nothing was trained, or the job names no registered model. `result` is as in result.json.
    """
    if not (adapter := result["adapter"]):
        return None
    start = work.inputs.get("policy")
    with storage.local_copy(adapter) as folder:
        unchanged = None
        if not adapter_files.learned(folder, start.folder if start else None):
            why = "The learning rate was 0 at every step, as in a run that ends within its warm-up, or no gradient reached the adapter"
            if result["metrics"].get("grad_norm/policy") == 0:
                why = "No gradient reached it: every advantage was 0, as if all completions of a prompt get the same score"
            unchanged = f"nothing was learned: after training the adapter equals {start.version if start else 'its initialization'}. {why}"
            print(f"warning: {unchanged}", flush=True)
        if not work.gate.model:
            return None
        facts = lineage.read(folder, adapter)
        print(f"registering {work.gate.model}", flush=True)
        run_id, stage = result["mlflow_run_id"], work.run.stage
        return registry.publish(
            work.uri, work.gate, stage, run_id, folder, result["metrics"], facts, unchanged
        )


def cost_of(places: Places, usage: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns what a run cost: the GPUs of its workers and of all rollout workers that the job allows; see prices.of_run."""
    gpus = 0.0
    if usage["gpu"]:
        gpus = usage["workers"] * places.workers.each.resources.get("GPU", 0)
        gpus += places.rollout.most * places.rollout.each.resources.get("GPU", 0) if places.rollout else 0
    return prices.of_run({**usage, "gpus": gpus}, seconds, not placement.on_cluster())


def described(version: registry.Version | None) -> dict[str, Any]:
    """Returns what result.json says about the version that a run registered or promoted."""
    return {
        "registered_model": version.name if version else None,
        "version": version.version if version else None,
        "alias": version.alias if version else None,
        "gate": version.gate if version else None,
        "champion": asdict(version.champion) if version else None,
    }
