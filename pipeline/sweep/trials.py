"""Runs the trials of a sweep on Ray Tune, as many in parallel as the resources allow.

    with watch_trials(sweep, rungs, keep):              # prints what the trials report, and calls keep(state) after each change
        run_trials(sweep, handle, places)               # returns when every trial has ended

Tune starts a driver for each trial, and restarts a driver that dies. A trial resumes from its own folder. If the sweep's driver
was killed, the next driver passes the unfinished trials to a new Tuner. Tuner.restore is not used, because it loads pickles that
only the same version of Ray can read.
"""

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from pipeline import registry, report
from pipeline.errors import error_summary, in_brief
from pipeline.job.libraries import skip_library_checks
from pipeline.run import session
from pipeline.run.launch import launch
from pipeline.run.worker import name_output
from pipeline.settle import placement
from pipeline.settle.placement import Places
from pipeline.settle.work import SweepHandle
from pipeline.sweep import table
from pipeline.sweep.space import Sweep, SweepSettings
from pipeline.system import storage
from pipeline.system.credentials import without_secrets
from pipeline.system.lease import hold

INTERVAL_S = 2.0  # time between two queries for new reports
TUNE = "tune"  # folder of Ray Tune's own files, which this code does not read
ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # otherwise Tune prints a banner even with RunConfig.verbose=0
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # writes no CSV, JSON and TensorBoard files
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # otherwise Tune would treat an interrupted sweep as finished
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",  # disables a warning
}


def run_trials(sweep: Sweep, handle: SweepHandle, places: Places) -> dict[str, str]:
    """Runs the unfinished trials. Returns {trial: error} of the trials whose driver died too often.

    Args:
        places: the resources of one trial.
    """
    os.environ.update(ENVIRONMENT)
    from ray import tune

    unfinished = [trial.name for trial in sweep.trials if table.result_of(trial) is None]
    if not unfinished:
        return {}
    slots = sweep.settings.max_concurrent_trials or placement.side_by_side(places)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    tuner = tune.Tuner(
        # The trials' drivers reserve no CPUs, so that workers can use all CPUs. The drivers run on the head node, which outlives
        # spot nodes.
        tune.with_resources(_trainable(sweep, handle), {"node:__internal_head__": 0.001}),
        param_space={"trial": tune.grid_search(unfinished)},
        tune_config=tune.TuneConfig(max_concurrent_trials=slots),
        run_config=tune.RunConfig(
            name=TUNE,
            storage_path=sweep.folder,
            failure_config=tune.FailureConfig(max_failures=sweep.job.run.max_failures),
            callbacks=[_silent()],
            verbose=0,
        ),
    )
    count, at_a_time = f"{len(unfinished)} of {len(sweep.trials)}", min(slots, len(unfinished))
    print(f"running {count} trials, {at_a_time} at a time", flush=True)
    grid = tuner.fit()
    storage.remove(storage.join(sweep.folder, TUNE))
    return {trial.config["trial"]: in_brief(trial.error) for trial in grid if trial.error and trial.config}


def _silent() -> Any:
    """Returns a silent replacement for Tune's progress reporter, which prints lines even with verbose=0 (ray 2.60)."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class Silent(TrialProgressCallback):
        def on_trial_result(self, *_: Any, **__: Any) -> None: ...
        def on_trial_error(self, *_: Any, **__: Any) -> None: ...
        def on_trial_complete(self, *_: Any, **__: Any) -> None: ...

    return Silent()


def _trainable(sweep: Sweep, handle: SweepHandle) -> Any:
    """Returns the function that Tune calls for each trial. The function launches a run. An error ends only one trial."""
    jobs = {trial.name: trial.job for trial in sweep.trials}
    folder = session.session_folder()

    def trial(config: dict[str, Any]) -> None:
        import ray

        session.belong_to(folder)
        hold(handle.lease)  # holds the lease, because this process may outlive the sweep's driver by seconds
        skip_library_checks()
        name, failure = config["trial"], None
        job = jobs[name]
        name_output(f"{job.stage} {name}")
        ray.get(handle.rungs.begin.remote(name))
        try:
            recipe = importlib.import_module(f"pipeline.stages.{job.stage}").RECIPE
            with registry.nested_under(handle.run_id):
                result = launch(job, recipe, handle)
                if job.run.report:
                    report.of_run(result)
        except Exception as error:
            failure = without_secrets(error_summary(error))
            print(f"failed: {failure}", flush=True)
        ray.get(handle.rungs.end.remote(name, failure))

    return trial


@contextlib.contextmanager
def watch_trials(sweep: Sweep, rungs: Any, keep: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Prints the trials' reports during the `with` block. Writes sweep.json after each report, because the driver may be killed.

    Args:
        keep: writes sweep.json.
    """
    import ray

    ended, count, printed = threading.Event(), len(sweep.trials), 0

    def look() -> None:
        nonlocal printed
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may shut down before this thread ends
            state = ray.get(rungs.state.remote())
            if not (lines := state["lines"][printed:]):
                return
            printed += len(lines)
            lines[-1] += f"   [{len(state['ended'])} of {count} ended, {len(state['running'])} running]"
            try:
                keep(state)
            except OSError as error:  # the next report, or the end of the sweep, writes sweep.json again
                lines.append(f"warning: sweep.json was not written ({in_brief(error)})")
            print("\n".join(lines), flush=True)

    def look_until_the_end() -> None:
        while not ended.wait(INTERVAL_S):
            look()
        look()  # prints the last reports

    thread = threading.Thread(target=look_until_the_end, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# ------------------------------------------------------------------------------------------- which trials stop


class Rungs:
    """A Ray actor that gets every evaluation and decides which trials stop early, with the ASHA scheduler of Ray Tune.

    Tune itself would stop a trial by ending its process (ray 2.60). The workers of the trial would keep their resources, and the
    run would leave no result. With this actor, a trial stops like a run with early stopping, with an adapter and a result.json.

    Args:
        metric: the metric that trials are compared by.
        greater: whether a larger value is better.
        recorded: the reports that an earlier driver recorded, as `state()["reports"]`.
        ended: the trials that ended under the earlier driver.
    """

    def __init__(
        self, metric: str, greater: bool, settings: SweepSettings, recorded: dict[str, Any], ended: list[str]
    ):
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
        self.running: list[str] = []
        self.ended = ended
        self.lines: list[str] = []  # lines that the driver will print
        for trial, reports in recorded.items():
            for evaluation in reports:
                self._note(trial, evaluation)

    def report(self, trial: str, step: int, total: int, figure: float) -> str | None:
        """Records an evaluation. Returns the reason to stop the trial, or None.

        Every worker of a trial reports each evaluation, and a resumed trial may report an evaluation again. All reports of a step
        get the same decision.
        """
        for evaluation in self.reports.get(trial, []):
            if evaluation["step"] == step:
                return evaluation["stop"]
        stop = self._note(trial, {"step": step, "of": total, "figure": figure, "time": time.time()})
        self.lines.append(f"{trial}  step {step}/{total}  {self.metric} {figure:.4g}")
        self.lines += [f"{trial}  stops: {stop}"] if stop else []
        return stop

    def _note(self, trial: str, evaluation: dict[str, Any]) -> str | None:
        """Passes an evaluation to ASHA. Returns ASHA's decision, or the decision that an earlier driver recorded."""
        if trial not in self.reports:
            self.reports[trial] = []
            if self.asha:
                self.asha.on_trial_add(None, SimpleNamespace(trial_id=trial))
        # Passes every evaluation to ASHA, even if its decision is known, because ASHA compares later evaluations with this one.
        decision, percent = None, 100 * evaluation["step"] / evaluation["of"]
        if self.asha and percent < 100:
            result = {"percent": percent, "figure": evaluation["figure"]}
            if self.asha.on_trial_result(None, SimpleNamespace(trial_id=trial), result) == self.asha.STOP:
                decision = f"ASHA: not among the best 1/{self.factor} at {percent:.0f} % of the steps"
        evaluation.setdefault("stop", decision)
        self.reports[trial].append(evaluation)
        return evaluation["stop"]

    def begin(self, trial: str) -> None:
        if trial not in self.running:  # a running trial begins again if its process died
            self.running.append(trial)
            self.lines.append(f"{trial}  begins")
        self.failures.pop(trial, None)

    def end(self, trial: str, failure: str | None) -> None:
        self.running = [name for name in self.running if name != trial]
        self.ended.append(trial)
        self.lines.append(f"{trial}  failed: {failure}" if failure else f"{trial}  ended")
        if failure:
            self.failures[trial] = failure

    def state(self) -> dict[str, Any]:
        """Returns {reports: {trial: [{step, of, figure, time, stop}]}, failures: {trial: error}, running, ended, lines}."""
        return {key: getattr(self, key) for key in ("reports", "failures", "running", "ended", "lines")}
