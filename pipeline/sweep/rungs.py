"""Decides which trials of a sweep stop early: an actor that every evaluation is reported to.

ASHA is Ray Tune's. Tune would stop a trial by ending its process (ray 2.60): its workers' resources would stay reserved, and
the run would leave no result. Here the trial itself stops early, with an adapter and a result.json.
"""

import time
from types import SimpleNamespace
from typing import Any


class Rungs:
    """The evaluations of all trials, and the decision about each.

    Args:
        metric: what the trials are compared by.
        greater: True if a larger value is better.
        grace_period: percent of a trial's steps before which it is not stopped.
        reduction_factor: the best 1 / reduction_factor of the compared trials continue; 1 stops none.
        known: `state()["reports"]` of an earlier driver.
        ended: the trials that ended under that driver.
    """

    def __init__(
        self,
        metric: str,
        greater: bool,
        grace_period: int,
        reduction_factor: int,
        known: dict[str, Any],
        ended: list[str],
    ):
        self.metric, self.factor = metric, reduction_factor
        self.asha: Any = None
        if reduction_factor > 1:
            from ray.tune.schedulers import ASHAScheduler

            self.asha = ASHAScheduler(
                time_attr="percent",
                metric="figure",
                mode="max" if greater else "min",
                max_t=100,
                grace_period=grace_period,
                reduction_factor=reduction_factor,
            )
        self.reports: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}
        self.running: list[str] = []
        self.ended = ended
        self.lines: list[str] = []  # for the terminal, of this driver
        for trial, reports in known.items():
            for report in reports:
                self._note(trial, report)

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
        report.setdefault("stop", self._decide(trial, report))  # ASHA hears of it in any case
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
