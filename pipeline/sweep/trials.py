"""Runs the trials of a sweep on Ray, as many at the same time as there are resources for.

    run_trials(sweep, handle, places, keep)     # returns when every trial has ended

A Ray task is the driver of each trial, and Ray starts it again if its process dies. A trial resumes from its own folder. After
the sweep's own driver was killed, the same command therefore runs the trials that have not ended.
"""

import importlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pipeline import registry, report
from pipeline.errors import in_brief, summary
from pipeline.job import Job
from pipeline.job.libraries import skip_library_checks
from pipeline.run import session
from pipeline.run.launch import launch
from pipeline.run.worker import name_output
from pipeline.settle import placement
from pipeline.settle.placement import Places
from pipeline.settle.work import SweepHandle
from pipeline.sweep import table
from pipeline.sweep.space import Sweep, SweepSettings
from pipeline.system.credentials import without_secrets
from pipeline.system.lease import hold

INTERVAL_S = 2.0  # time between two queries for new reports


def run_trials(
    sweep: Sweep, handle: SweepHandle, places: Places, keep: Callable[[dict[str, Any]], Any]
) -> dict[str, str]:
    """Runs the unfinished trials, and prints the trials' reports.

    Returns {trial: error} of the trials whose driver died too often.

    Args:
        places: the resources of one trial.
        keep: writes sweep.json, in case the driver of the sweep is killed.
    """
    import ray

    waiting = [trial for trial in sweep.trials if table.result_of(trial) is None]
    room = sweep.settings.max_concurrent_trials or placement.side_by_side(places)
    start = ray.remote(
        num_cpus=0,  # all CPUs are for the workers of the trial
        resources={"node:__internal_head__": 0.001},  # the head node outlives spot nodes
        max_retries=sweep.job.run.max_failures,
        max_calls=1,  # each trial gets a new process
    )(run_trial)
    count, at_a_time = f"{len(waiting)} of {len(sweep.trials)}", min(room, len(waiting))
    print(f"running {count} trials, {at_a_time} at a time", flush=True)
    running: dict[Any, str] = {}
    died, printed = dict[str, str](), 0
    while waiting or running:
        while waiting and len(running) < room:
            trial = waiting.pop(0)
            running[start.remote(trial.name, trial.job, handle, session.session_folder())] = trial.name
        ended, _ = ray.wait([*running], timeout=INTERVAL_S)
        for one in ended:
            name = running.pop(one)
            try:
                ray.get(one)
            except ray.exceptions.RayError as error:
                died[name] = in_brief(error)
        state = ray.get(handle.rungs.state.remote())
        if new := state["lines"][printed:]:
            printed += len(new)
            try:
                keep(state)
            except OSError as error:  # the next report, or the end of the sweep, writes sweep.json again
                new.append(f"warning: sweep.json was not written ({in_brief(error)})")
            print("\n".join(new), flush=True)
    return died


def run_trial(name: str, job: Job, handle: SweepHandle, folder: str | None) -> None:
    """Executes a trial, which is an ordinary run, in this process. An error ends only this trial.

    Args:
        folder: the session folder of the sweep's driver.
    """
    import ray

    session.belong_to(folder)
    hold(handle.lease)  # this process may outlive the sweep's driver by seconds
    skip_library_checks()
    name_output(f"{job.stage} {name}")
    ray.get(handle.rungs.begin.remote(name))
    failure = None
    try:
        recipe = importlib.import_module(f"pipeline.stages.{job.stage}").RECIPE
        with registry.nested_under(handle.run_id):
            result = launch(job, recipe, handle)
            if job.run.report:
                report.of_run(result)
    except Exception as error:
        failure = without_secrets(summary(error))
        print(f"failed: {failure}", flush=True)
    ray.get(handle.rungs.end.remote(name, failure))


# ------------------------------------------------------------------------------------------- which trials stop


class Rungs:
    """A Ray actor that gets every evaluation and decides which trials stop early, with the ASHA scheduler of Ray Tune.

    Tune itself would stop a trial by ending its process, which would leave no result (ray 2.60). This actor lets the trial stop
    like a run that stops early, with an adapter and a result.json.

    Args:
        metric: the metric that trials are compared by.
        greater: whether a larger value is better.
        known: the reports that an earlier driver recorded, as `state()["reports"]`.
    """

    def __init__(self, metric: str, greater: bool, settings: SweepSettings, known: dict[str, Any]):
        self.metric, self.factor = metric, settings.reduction_factor
        self.asha: Any = None
        if self.factor > 1:
            from ray.tune.schedulers import ASHAScheduler

            mode, grace_period = "max" if greater else "min", settings.grace_percent
            self.asha = ASHAScheduler(
                "percent", "figure", mode, max_t=100, grace_period=grace_period, reduction_factor=self.factor
            )
        self.reports: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}
        self.lines: list[str] = []  # lines that the driver prints
        for trial, reports in known.items():
            for one in reports:
                self._note(trial, one)

    def report(self, trial: str, step: int, total: int, figure: float) -> str | None:
        """Records an evaluation. Returns why the trial must stop, or None.

        Every worker of a trial reports an evaluation, and a resumed trial reports it again. All reports get the first decision.
        """
        for known in self.reports.get(trial, []):
            if known["step"] == step:
                return known["stop"]
        stop = self._note(trial, {"step": step, "of": total, "figure": figure, "time": time.time()})
        self.lines.append(f"{trial}  step {step}/{total}  {self.metric} {figure:.4g}")
        self.lines += [f"{trial}  stops: {stop}"] if stop else []
        return stop

    def _note(self, trial: str, report: dict[str, Any]) -> str | None:
        """Passes an evaluation to ASHA. Returns ASHA's decision, or the decision that an earlier driver recorded."""
        if trial not in self.reports:
            self.reports[trial] = []
            if self.asha:
                self.asha.on_trial_add(None, SimpleNamespace(trial_id=trial))
        decision = self._decide(
            trial, report
        )  # ASHA must get every evaluation, because it compares later evaluations with this one
        report.setdefault("stop", decision)
        self.reports[trial].append(report)
        return report["stop"]

    def _decide(self, trial: str, report: dict[str, Any]) -> str | None:
        if self.asha is None or report["step"] >= report["of"]:  # the trial ends anyway
            return None
        percent = 100 * report["step"] / report["of"]
        result = {"percent": percent, "figure": report["figure"]}
        if self.asha.on_trial_result(None, SimpleNamespace(trial_id=trial), result) != self.asha.STOP:
            return None
        return f"ASHA: not among the best 1/{self.factor} at {percent:.0f} % of the steps"

    def begin(self, trial: str) -> None:
        self.lines.append(f"{trial}  begins")
        self.failures.pop(trial, None)

    def end(self, trial: str, failure: str | None) -> None:
        self.lines.append(f"{trial}  failed: {failure}" if failure else f"{trial}  ended")
        if failure:
            self.failures[trial] = failure

    def state(self) -> dict[str, Any]:
        """Returns {reports: {trial: [{step, of, figure, time, stop}]}, failures: {trial: error}, lines: what to print}."""
        return {"reports": self.reports, "failures": self.failures, "lines": self.lines}
