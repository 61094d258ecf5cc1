"""Runs a job with several values of some keys on Ray Tune, and registers the best trial.

    make sweep JOB=jobs/demo/rm.yaml SWEEP="trainer.learning_rate=1e-3,2e-3,4e-3 lora.r=8,16"
    python -m pipeline sweep jobs/demo/rm.yaml trainer.learning_rate=1e-3,2e-3,4e-3 lora.r=8,16 [section.key=value ...]

As many trials run in parallel as the resources allow. Trials are compared by run.metric_for_best_model. ASHA stops the worse half
of the trials after 25 % of the steps, and again after 50 %. The same command resumes an interrupted sweep, and retries failed
trials.
"""

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline import registry, run_folder
from pipeline.errors import Failure, InputError
from pipeline.job import ALL_STAGES
from pipeline.job.identity import identity_of
from pipeline.job.libraries import check_with_libraries
from pipeline.run import launch as runs
from pipeline.run import resume
from pipeline.run.prepare import prepared_run
from pipeline.settle.identity import gate_of, tracking_of
from pipeline.settle.inputs import by_version, check_paths
from pipeline.settle.work import SweepHandle, Work
from pipeline.sweep import space, table, trials
from pipeline.sweep.space import Sweep
from pipeline.system import console, process, storage


def run(path: str, arguments: list[str]) -> dict[str, Any]:
    """Runs a sweep. Returns the content of sweep.json. Checks the jobs of all trials before the first trial starts."""
    sweep = space.read_sweep(path, arguments)
    files = resume.check_folder(sweep.folder, "a sweep", "sweep")
    recorded = read_recorded_sweep(sweep, files)
    if recorded.get("ended") and not [row for row in recorded["trials"] if row["state"] == "failed"]:
        print(f"sweep {sweep.job.run.name} has ended ({sweep.folder}); set run.overwrite=true to start over")
        print(end_of_sweep(sweep, recorded), flush=True)
        return recorded
    check_paths(sweep.job)
    sweep = with_one_store(sweep)
    print(f"\n== sweep  {sweep.job.stage}  {sweep.job.run.name}  {sweep.job.source}", flush=True)
    tracking = tracking_of(sweep.job)
    with console.print_if_slow("opening MLflow"):
        registry.check_store(tracking)
    first_job = sweep.trials[0].job
    for trial in sweep.trials:
        check_with_libraries(trial.job)
    with prepared_run(first_job, recorded.get("inputs", {})) as (work, _, report):
        print(report.render(samples=False), flush=True)
        sweep = with_versions(sweep, work.versions)
        with resume.owned_folder(sweep.folder, files, sweep.job.run.overwrite) as lease, output_in_log(sweep):
            summary = run_all(
                sweep, recorded, replace(work, identity=tracking.identity, tracking=tracking, lease=lease)
            )
    print(end_of_sweep(sweep, summary), flush=True)
    return summary


def read_recorded_sweep(sweep: Sweep, files: dict[str, str]) -> dict[str, Any]:
    """Returns the sweep.json that an earlier driver wrote, or {}. Raises InputError if the file belongs to a different sweep."""
    job = sweep.job
    keys = ("job", "metric", "trials", "reports")
    if job.run.overwrite or not (recorded := resume.read_left(sweep.folder, files, run_folder.SWEEP, *keys)):
        return {}
    if recorded["job"] != resume.deciding_settings(identity_of(job)) or recorded["metric"] != sweep.metric:
        raise InputError(
            f"{job.run.name!r} is a sweep of a different job; choose another name, or set run.overwrite=true",
            key="run.name",
        )
    names = {trial.name for trial in sweep.trials}
    return recorded if names == {row["trial"] for row in recorded["trials"]} else recorded | {"ended": False}


def with_one_store(sweep: Sweep) -> Sweep:
    """Returns the sweep. Every trial's job gets the sweep's MLflow store."""
    uri = tracking_of(sweep.job).uri
    return replace(
        sweep,
        trials=[
            replace(trial, job=replace(trial.job, mlflow=replace(trial.job.mlflow, tracking_uri=uri)))
            for trial in sweep.trials
        ],
    )


def with_versions(sweep: Sweep, inputs: dict[str, str]) -> Sweep:
    """Returns the sweep, with model versions in place of aliases in every trial, because aliases may move during the sweep."""
    shared = {name: version for name, version in inputs.items() if name.partition(".")[0] not in sweep.keys}
    return replace(sweep, trials=[replace(t, job=by_version(t.job, shared)) for t in sweep.trials])


def run_all(sweep: Sweep, recorded: dict[str, Any], work: Work) -> dict[str, Any]:
    """Runs the trials that have not ended, and registers the best trial. Returns the content of sweep.json.

    Args:
        recorded: content of the sweep.json that an earlier driver wrote, or {}.
        work: the Work of the first trial.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # The actor runs on the head node, which outlives spot nodes.
    head_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    rungs = ray.remote(num_cpus=0, scheduling_strategy=head_node)(trials.Rungs).remote(
        sweep.metric,
        sweep.greater,
        sweep.settings,
        recorded.get("reports", {}),
        [trial.name for trial in sweep.trials if table.result_of(trial)],
    )
    header: dict[str, Any] = {
        "stage": sweep.job.stage,
        "name": sweep.job.run.name,
        "folder": sweep.folder,
        "job": resume.deciding_settings(work.identity),
        "inputs": work.versions,
        "metric": sweep.metric,
        "greater_is_better": sweep.greater,
        "tracking_uri": work.uri,
    }
    path = storage.join(sweep.folder, run_folder.SWEEP)

    def keep(state: dict[str, Any], failures: dict[str, str] | None = None, **entries: Any) -> dict[str, Any]:
        rows = table.trial_rows(sweep, state, failures or {})
        summary = {**header, "ended": False, "trials": rows, "reports": state["reports"], **entries}
        storage.write_json(path, summary)
        return summary

    # The parent run logs the datasets, because two trials that log a new dataset at the same time fail (mlflow 3.17).
    with registry.mlflow_run(work.tracking, work.digests, new_run=not recorded) as run_id:
        header["mlflow_run_id"] = run_id
        keep(ray.get(rungs.state.remote()))
        with trials_ended(sweep), trials.watch_trials(sweep, rungs, keep):
            failures = trials.run_trials(sweep, SweepHandle(rungs, run_id, work.lease), work.places)
        state = ray.get(rungs.state.remote())
        work.lease.require()
        rows = keep(state, failures)["trials"]
        if (best := table.best_row(sweep, rows)) is None:
            print(table.table_text(sweep, rows), flush=True)
            raise Failure(
                f"no trial finished; {sweep.folder} contains the trials' folders; run the same command again to retry"
            )
        # Registers the best trial, and adds the version to the trial's result.json.
        result = storage.read_json(file := storage.join(best["folder"], run_folder.RESULT))
        version = runs.version_entries(runs.publish_adapter(replace(work, gate=gate_of(sweep.job)), result))
        storage.write_json(file, result | version)
        values = [f"{key}={value}" for key, value in best["values"].items()]
        args = [arg for arg in sweep.arguments if not arg.startswith(("run.name=", "run.overwrite="))]
        command = shlex.join(["python", "-m", "pipeline", sweep.job.stage, sweep.job.source, *args, *values])
        summary = keep(state, failures, ended=True, best=best["trial"], registered=version, command=command)
    return summary


@contextlib.contextmanager
def trials_ended(sweep: Sweep) -> Iterator[None]:
    """Sets the status of the trials' MLflow runs to KILLED if the sweep is interrupted during the `with` block."""
    try:
        yield
    except BaseException:
        with process.signals_ignored():
            for trial in sweep.trials:
                registry.end_interrupted(tracking_of(trial.job))
        raise


@contextlib.contextmanager
def output_in_log(sweep: Sweep) -> Iterator[None]:
    """Writes the output of the trials to output.log in the sweep's folder, unless the folder is in a bucket."""
    if storage.is_remote(sweep.folder):
        yield
        return
    with open(f"{sweep.folder}/output.log", "a", encoding="utf-8") as log:
        console.attach_ray_printer(ALL_STAGES, log)
        try:
            yield
        finally:
            console.attach_ray_printer(ALL_STAGES)


def end_of_sweep(sweep: Sweep, summary: dict[str, Any]) -> str:
    """Returns the summary that a sweep prints at its end."""
    best = next(row for row in summary["trials"] if row["trial"] == summary["best"])
    values = " ".join(f"{key}={value}" for key, value in best["values"].items())
    version = summary["registered"]
    lines = ["", table.table_text(sweep, summary["trials"])]
    lines.append(f"   best: {values}  ({sweep.metric} {best['figure']:.4g})")
    if version["version"]:
        alias = f" @{version['alias']}" if version["alias"] else ""
        lines.append(
            f"   registered {version['registered_model']} v{version['version']}{alias}  (gate {version['gate']})"
        )
    lines.append(f"   to repeat the best trial: {summary['command']}")
    lines.append(f"   {sweep.folder}/{run_folder.SWEEP}; each trial has a folder")
    return "\n".join(lines)
