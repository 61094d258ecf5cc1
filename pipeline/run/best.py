"""Tracks the best evaluation of a run, whose adapter the run keeps, and decides whether training stops early.

    best = make_tracker(run, gate, parameters) # None if the run compares no evaluations
    best.compare(metrics, step)                # after each evaluation, on every rank with the same metrics
    best.exhausted                             # True if training must stop
    best.save(folder), best.load(folder)       # parts of every checkpoint
    best.restore()                             # restores the weights of best.step

The weights of the best step are in memory and in each checkpoint. Evaluations therefore need no checkpoint, and run.num_to_keep
cannot delete the best weights.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pipeline import run_folder
from pipeline.errors import Failure, SelfCheckFailed
from pipeline.job import gates
from pipeline.job.job import Run
from pipeline.registry import Gate
from pipeline.system.hub import json_object

FIX = "remove this checkpoint, so that the run resumes from an earlier one"
WEIGHTS = "best.safetensors"
# f(value of an evaluation, step) reports the evaluation to a sweep. Returns the reason to stop the trial, or None.
Report = Callable[[float, int], str | None]


@dataclass
class Best:
    """The best evaluation of a run so far, and the weights at that step."""

    metric: str
    greater_is_better: bool
    # Training stops after this many evaluations without improvement. None means no limit.
    patience: int | None
    # Trainable parameters to restore at the best step, or {} if the run keeps the last weights.
    parameters: dict[str, torch.nn.Parameter]
    report: Report | None = None
    stop_if: dict[str, str] = field(default_factory=dict)  # {metric: condition that ends training}
    step: int | None = None  # step of the best evaluation, or None before the first finite value
    value: float | None = None
    stale: int = 0  # number of evaluations since the best step
    stopped: str | None = None  # why the sweep or run.stop_if ended training
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def compare(self, metrics: dict[str, float], step: int) -> None:
        """Copies the current weights if the metric is better than at all earlier steps. A value of NaN is never better."""
        for metric in (self.metric, *self.stop_if):
            if metric not in metrics:
                key = "metric_for_best_model" if metric == self.metric else "stop_if"
                eval_metrics = ", ".join(sorted(name for name in metrics if name.startswith("eval_")))
                raise Failure(f"run.{key}: the evaluation has no metric {metric}, but {eval_metrics}")
        value = float(metrics[self.metric])
        if self.report:
            if not math.isfinite(value):
                raise SelfCheckFailed(f"{self.metric} is {value} at step {step}; the trial ends")
            self.stopped = self.report(value, step)
        for metric, condition in self.stop_if.items():
            symbol, threshold = gates.parse_gate(condition)
            metric_value = float(metrics[metric])
            if threshold is not None and gates.OPERATORS[symbol](metric_value, threshold):
                self.stopped = f"{metric} is {metric_value:.4g} (run.stop_if: {condition})"
        sign = 1.0 if self.greater_is_better else -1.0
        if sign * value > (-math.inf if self.value is None else sign * self.value):
            self.step, self.value, self.stale = step, value, 0
            self.weights = {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}
        else:
            self.stale += 1

    @property
    def exhausted(self) -> bool:
        """Returns True if training must stop because of run.early_stopping_patience, run.stop_if or the sweep."""
        return bool(self.stopped) or (self.patience is not None and self.stale >= self.patience)

    def restore(self) -> int | None:
        """Restores the best weights. Returns the step of the best weights, or None if the run keeps the last weights."""
        if not self.weights:
            return None
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.weights[name])
        return self.step

    def save(self, folder: str) -> None:
        """Writes the files that `load` reads. Only rank 0 calls this method, because all ranks have the same state."""
        state = {key: getattr(self, key) for key in ("step", "value", "stale", "stopped")}
        with open(os.path.join(folder, run_folder.BEST), "w", encoding="utf-8") as file:
            json.dump(state, file)
        save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, f"{folder}/{WEIGHTS}")

    def load(self, folder: str) -> None:
        vars(self).update(json_object(os.path.join(folder, run_folder.BEST), FIX))
        self.weights = load_file(os.path.join(folder, WEIGHTS))

    def reason(self) -> str:
        predicate = "was no number in" if self.step is None else "has not improved for"
        return self.stopped or f"{self.metric} {predicate} {self.stale} evaluation{'s' * (self.stale != 1)}"


def make_tracker(
    run: Run, gate: Gate, parameters: dict[str, torch.nn.Parameter], report: Report | None = None
) -> Best | None:
    """Returns the tracker of a run, or None if the run keeps the last step, never stops early and is not a trial of a sweep."""
    if (
        not run.load_best_model_at_end
        and run.early_stopping_patience is None
        and not run.stop_if
        and report is None
    ):
        return None
    params = parameters if run.load_best_model_at_end else {}
    return Best(gate.metric, gate.greater_is_better, run.early_stopping_patience, params, report, run.stop_if)


def describe_end(best: Best | None, best_step: int | None, last_step: int, total: int) -> dict[str, Any]:
    """Returns the entries of result.json about the step whose weights were kept, and about the end of training.

    Args:
        best_step: the best step, or None if the run keeps the last step.
        last_step, total: the last step of this run, and the number of steps that the job sets.
    """
    criterion = {"by": best.metric, "value": best.value} if best and best_step is not None else {"by": None}
    reason = best.reason() if best and best.exhausted and last_step < total else None
    return {
        "kept": {"step": last_step if best_step is None else best_step, **criterion},
        "ended": {"step": last_step, "of": total, "early": reason},
    }
