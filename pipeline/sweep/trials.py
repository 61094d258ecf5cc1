"""Runs the trials of a sweep on Ray Tune, as many at a time as fit.

    with watching(sweep, rungs, keep):      # prints what they report; keep(state) is called after each change
        run(sweep, handle)                  # returns when every trial has ended

Tune starts the trials' drivers, and restarts a driver whose process died. A trial resumes from its own folder. So after the
sweep's driver was killed, a new Tuner gets the trials that have not ended. (Tuner.restore would load pickles from the folder,
of the same version of Ray only.)
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
from pipeline.errors import in_brief, summary
from pipeline.job.libraries import skip_library_checks
from pipeline.run import session
from pipeline.run.launch import launch
from pipeline.run.worker import name_output
from pipeline.settle import placement
from pipeline.settle.placement import Places
from pipeline.settle.work import SweepHandle
from pipeline.sweep import table
from pipeline.sweep.space import Sweep, SweepSettings
from pipeline.system import storage, terminal
from pipeline.system.credentials import without_secrets
from pipeline.system.lease import hold

INTERVAL_S = 2.0  # time between two queries of the rungs
TUNE = "tune"  # folder of Ray Tune's files, which are not used
ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # prints a banner even with RunConfig.verbose=0
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # no CSV, JSON and TensorBoard files
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # otherwise Ctrl-C ends the sweep as if it were finished
    "TUNE_WARN_INSUFFICENT_RESOURCE_THRESHOLD_S": "1000000000",  # a trial's driver needs none
}


def run(sweep: Sweep, handle: SweepHandle, places: Places) -> dict[str, str]:
    """Runs the unfinished trials. Returns {trial: why its process died} for trials that could not run.

    Args:
        places: places of a trial.
    """
    os.environ.update(ENVIRONMENT)
    from ray import tune

    waiting = [trial.name for trial in sweep.trials if table.result_of(trial) is None]
    if not waiting:
        return {}
    room = sweep.settings.max_concurrent_trials or placement.side_by_side(places)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    tuner = tune.Tuner(
        # The trials' drivers take no resources of workers. They run on the head, which outlives spot nodes.
        tune.with_resources(_trainable(sweep, handle), {"node:__internal_head__": 0.001}),
        param_space={"trial": tune.grid_search(waiting)},
        tune_config=tune.TuneConfig(max_concurrent_trials=room),
        run_config=tune.RunConfig(
            name=TUNE,
            storage_path=sweep.folder,
            failure_config=tune.FailureConfig(max_failures=sweep.job.run.max_failures),
            callbacks=[_silent()],
            verbose=0,
        ),
    )
    count, at_a_time = f"{len(waiting)} of {len(sweep.trials)}", min(room, len(waiting))
    print(f"running {count} trials, {at_a_time} at a time", flush=True)
    ended = tuner.fit()
    storage.remove(storage.join(sweep.folder, TUNE))
    return {one.config["trial"]: in_brief(one.error) for one in ended if one.error and one.config}


def _silent() -> Any:
    """Returns a replacement of Tune's printer, which prints a line for each trial even with verbose=0 (ray 2.60)."""
    from ray.tune.progress_reporter import TrialProgressCallback

    class Silent(TrialProgressCallback):
        def on_trial_result(self, *_: Any, **__: Any) -> None: ...
        def on_trial_error(self, *_: Any, **__: Any) -> None: ...
        def on_trial_complete(self, *_: Any, **__: Any) -> None: ...

    return Silent()


def _trainable(sweep: Sweep, handle: SweepHandle) -> Any:
    """Returns the function that Tune starts for each trial: an ordinary run in its process. An error ends only this trial."""
    jobs = {trial.name: trial.job for trial in sweep.trials}
    own = session.session_folder()

    def trial(config: dict[str, Any]) -> None:
        import ray

        from pipeline.stages.ppo import rollout_workers

        session.belong_to(own)
        hold(handle.lease)  # this process may outlive the sweep's driver by seconds
        name, failure = config["trial"], None
        job = jobs[name]
        skip_library_checks()
        name_output(f"{job.stage} {name}")
        ray.get(handle.rungs.begin.remote(name))
        try:
            train = importlib.import_module(f"pipeline.stages.{job.stage}").train
            with registry.nested_under(handle.run_id):
                report.of_run(launch(job, train, sweep=handle, companion=rollout_workers))
        except Exception as error:
            failure = without_secrets(summary(error))
            print(f"failed: {failure}", flush=True)
        ray.get(handle.rungs.end.remote(name, failure))

    return trial


@contextlib.contextmanager
def watching(sweep: Sweep, rungs: Any, keep: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Prints the trials' reports during the block, and keeps sweep.json up to date in case the driver is killed."""
    import ray

    ended, count, printed = threading.Event(), len(sweep.trials), 0
    started, before = time.monotonic(), done(ray.get(rungs.state.remote()))

    def look() -> None:
        nonlocal printed
        with contextlib.suppress(ray.exceptions.RayError):  # Ray ends before this thread
            state = ray.get(rungs.state.remote())
            if not (new := state["lines"][printed:]):
                return
            printed += len(new)
            new[-1] += f"   [{overall(state, count, time.monotonic() - started, before)}]"
            try:
                keep(state)
            except OSError as error:  # the next report, or the end, writes it again
                new.append(f"warning: sweep.json was not written ({in_brief(error)})")
            print("\n".join(new), flush=True)

    def looks() -> None:
        while not ended.wait(INTERVAL_S):
            look()
        look()  # show the last changes

    thread = threading.Thread(target=looks, name="sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def overall(state: dict[str, Any], count: int, seconds: float, before: float) -> str:
    """Returns a text with the numbers of finished and running trials, and the time left at the speed since `before`."""
    text = f"{len(state['ended'])} of {count} ended, {len(state['running'])} running"
    new, left = done(state) - before, count - done(state)
    if new > 0 and left > 0:
        text += f", left {terminal.duration(seconds / new * left)}"
    return text


def done(state: dict[str, Any]) -> float:
    """Returns the number of finished trials. A running one counts by its share of steps."""
    reports = {trial: reports[-1] for trial, reports in state["reports"].items() if reports}
    shares = {trial: last["step"] / last["of"] for trial, last in reports.items()}
    return sum((shares | dict.fromkeys(state["ended"], 1.0)).values())


# ------------------------------------------------------------------------------------------- which trials stop


class Rungs:
    """An actor that gets every evaluation and decides which trials stop early.

    ASHA is Ray Tune's. Tune would stop a trial by ending its process (ray 2.60). Its workers' resources would stay reserved,
    and the run would leave no result. Here the trial itself stops early, with an adapter and a result.json.

    Args:
        metric: the metric that trials are compared by.
        greater: whether a larger value is better.
        known: `state()["reports"]` of an earlier driver.
        ended: the trials that ended under that driver.
    """

    def __init__(
        self, metric: str, greater: bool, settings: SweepSettings, known: dict[str, Any], ended: list[str]
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
        self.lines: list[str] = []  # this driver's lines for the terminal
        self.ended = ended
        for trial, reports in known.items():
            for one in reports:
                self._note(trial, one)

    def report(self, trial: str, step: int, total: int, figure: float) -> str | None:
        """Records an evaluation. Returns why the trial must stop, or None.

        Every worker of a trial reports the evaluation, and a resumed trial reports it again. All get the first decision.
        """
        for known in self.reports.get(trial, []):
            if known["step"] == step:
                return known["stop"]
        stop = self._note(trial, {"step": step, "of": total, "figure": figure, "time": time.time()})
        self.lines.append(f"{trial}  step {step}/{total}  {self.metric} {figure:.4g}")
        self.lines += [f"{trial}  stops: {stop}"] if stop else []
        return stop

    def _note(self, trial: str, report: dict[str, Any]) -> str | None:
        """Passes an evaluation to ASHA and returns its decision. A decision of an earlier driver is not changed."""
        if trial not in self.reports:
            self.reports[trial] = []
            if self.asha:
                self.asha.on_trial_add(None, SimpleNamespace(trial_id=trial))
        report.setdefault("stop", self._decide(trial, report))  # ASHA gets the evaluation in any case
        self.reports[trial].append(report)
        return report["stop"]

    def _decide(self, trial: str, report: dict[str, Any]) -> str | None:
        if self.asha is None or report["step"] >= report["of"]:  # the trial ends anyway
            return None
        percent = 100 * report["step"] / report["of"]
        result = {"percent": percent, "figure": report["figure"]}
        if self.asha.on_trial_result(None, SimpleNamespace(trial_id=trial), result) != self.asha.STOP:
            return None
        return f"ASHA: at {percent:.0f} % of the steps not among the best 1/{self.factor}"

    def begin(self, trial: str) -> None:
        if trial not in self.running:
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
        """Returns {reports: {trial: [{step, of, figure, time, stop}]}, failures: {trial: why}, running, ended, lines}."""
        return {key: getattr(self, key) for key in ("reports", "failures", "running", "ended", "lines")}
