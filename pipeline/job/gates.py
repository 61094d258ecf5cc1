"""Determines which metrics a job can measure, and which metrics can compare evaluations. Parses the conditions of gates.

gate: {eval_accuracy: ">= 0.95", eval_loss: "<= champion"}
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from pipeline.errors import shorten, show_value
from pipeline.job.stages import STAGE_SPECS
from pipeline.metrics import METRICS, SPEED, Metric, find_metric

OPERATORS: dict[str, Callable[[float, float], bool]]
OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

HELD_OUT_ROWS = "held-out rows (data.eval or data.eval_fraction)"
# Keys of `trainer` that define the eval loss. Losses are comparable only if these keys have the same values.
LOSS = """beta loss_type loss_weights label_smoothing label_smoothing_factor center_rewards_coefficient desirable_weight
    undesirable_weight f_divergence_type f_alpha_divergence_coef discopop_tau ld_alpha use_weighting rpo_alpha reference_free
    router_aux_loss_coef""".split()
# Keys of `trainer` that affect the completions of an evaluation, or the scores or the KL of these completions.
SAMPLING = "response_length min_new_tokens temperature missing_eos_penalty reward_clip kl_estimator".split()


def parse_gate(rule: Any) -> tuple[str, float | None]:
    """Returns (">=", 0.95) for `">= 0.95"`, and ("<=", None) for `"<= champion"`. Raises ValueError if the rule is invalid.

    `champion` means the value of the metric for the champion, the version with the alias mlflow.alias.
    """
    pattern = r"\s*(>=|<=|>|<)\s*(champion|[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*"
    match = re.fullmatch(pattern, rule) if isinstance(rule, str) else None
    threshold = None if match is None or match[2] == "champion" else float(match[2])
    if match is None or not math.isfinite(threshold or 0.0):
        expected = 'expected a comparison in quotes, with >= <= > or <: ">= 0.95" or ">= champion"'
        raise ValueError(f"found {show_value(rule)}, {expected}")
    return match[1], threshold


@dataclass(frozen=True)
class Measurable:
    """The metrics that a job can measure."""

    stage: str
    absent: Mapping[str, str]  # {word in Metric.needs that the job does not meet: description}
    rewards: int = 0  # number of rewards in the job

    def lacking(self, metric: Metric) -> str:
        """Returns a description of what the job lacks to measure a metric, or "" if the job can measure the metric."""
        needs = [need for need in metric.needs.split() if metric.at != "result" or need != "rows"]
        needs += ["start"] * (metric.at == "initial" and STAGE_SPECS[self.stage].trl)
        return next((self.absent[need] for need in needs if need in self.absent), "")

    @cached_property
    def lacks(self) -> dict[str, str]:
        """Returns {metric: `lacking(metric)`} for all metrics that the stage can measure."""
        metrics = [m for m in METRICS if self.stage in m.stages.split() and m.at != "curve"]
        lacks = {metric.name: self.lacking(metric) for metric in metrics if "*" not in metric.name}
        if self.stage == "ppo":
            rewards = ["reward", *(f"reward_{index}" for index in range(1, self.rewards))]
            lacks |= {f"rewards/{reward}/mean": "" for reward in rewards}
        return lacks

    @property
    def compared(self) -> dict[str, str]:
        """Returns the entries of `lacks` for metrics that can compare two evaluations of a model."""
        return {k: v for k, v in self.lacks.items() if k.startswith("eval_") and not SPEED.search(k)}

    @property
    def default(self) -> str:
        """Returns the default metric for comparing evaluations: eval_loss, or for ppo eval_judge (eval_reward without a judge).

        The loss is the default because it also distinguishes models with equal accuracies. For ppo, a judge is preferred,
        because PPO maximizes the reward.
        """
        if STAGE_SPECS[self.stage].trl:
            return "eval_loss"
        return "eval_reward" if "judge" in self.absent else "eval_judge"

    def is_open(self, metric: str) -> bool:
        """Returns True if the job measures a metric whose full name is known only in the run, e.g. with a value from the rows."""
        row = find_metric(metric, self.stage)
        return bool(row and "*" in row.name and row.name.startswith("eval_") and not self.lacking(row))

    def unknown(self, metric: str, names: Iterable[str]) -> str:
        """Returns an error message about a metric that is not in `names`."""
        similar = get_close_matches(metric, names, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"expected one of {', '.join(list(names)[:40])}"
        return f"`{self.stage}` has no such metric ({shorten(metric)}); {hint}"

    def why_not_compared(self, metric: str | None, greater_is_better: bool | None) -> str | None:
        """Returns why run.metric_for_best_model cannot compare evaluations, or None if the metric is suitable or not set."""
        compared = self.compared
        if metric is None:
            return None
        if metric not in compared:
            return self.unknown(metric, [name for name, lacking in compared.items() if not lacking])
        if compared[metric]:
            return f"{metric} needs {compared[metric]}, which the job does not have"
        if greater_is_better is None and (row := find_metric(metric)) and row.greater_is_better is None:
            return f"is a larger {metric} better? Set run.greater_is_better=true or false"
        return None
