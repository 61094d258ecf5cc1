"""Metrics of a job: which ones it measures, the conditions of its gate, and run.metric_for_best_model.

gate: {eval_accuracy: ">= 0.95", eval_loss: "<= champion"}
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from pipeline.errors import short, show
from pipeline.input_uri import InputURI
from pipeline.job.job import Job
from pipeline.metrics import METRICS, SPEED, Metric, find

Problems = Iterator[tuple[str, str]]  # (key of the job, its error)

OPERATORS: dict[str, Callable[[float, float], bool]]
OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

HELD_OUT_ROWS = "held-out rows (data.eval or data.eval_fraction)"
# keys of `trainer` that change the meaning of the eval loss, so that losses cannot be compared
LOSS = """beta loss_type loss_weights label_smoothing label_smoothing_factor center_rewards_coefficient desirable_weight
    undesirable_weight f_divergence_type f_alpha_divergence_coef discopop_tau ld_alpha use_weighting rpo_alpha reference_free
    router_aux_loss_coef""".split()
# Keys of `trainer` that change the completions of an evaluation, and what their scores and KL measure.
SAMPLING = "response_length min_new_tokens temperature missing_eos_penalty reward_clip kl_estimator".split()


def parse_gate(rule: Any) -> tuple[str, float | None]:
    """Returns (">=", 0.95) for `">= 0.95"`, and ("<=", None) for `"<= champion"`. Raises ValueError.

    The operator is a key of OPERATORS. `champion` is the metric of the version that mlflow.alias names.
    """
    pattern = r"\s*(>=|<=|>|<)\s*(champion|[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*"
    match = re.fullmatch(pattern, rule) if isinstance(rule, str) else None
    threshold = None if match is None or match[2] == "champion" else float(match[2])
    if match is None or not math.isfinite(threshold or 0.0):
        says = 'expected a comparison in quotes, with >= <= > or <: ">= 0.95" or ">= champion"'
        raise ValueError(f"found {show(rule)}, {says}")
    return match[1], threshold


class Metrics:
    """The metrics that the stage of a job can measure."""

    def __init__(self, job: Job) -> None:
        self.job, self.facts = job, job.facts

    @cached_property
    def absent(self) -> dict[str, str]:
        """Returns {what a metric needs: its description} of what the job lacks."""
        job, rollout = self.job, self.job.rollout_config
        rows = HELD_OUT_ROWS if self.facts.learns else "prompts to answer (data.eval)"
        needs = {
            "rows": (job.held_out, rows),
            "start": (job.trainer.get("eval_on_start"), "trainer.eval_on_start=true"),
            "teacher": (job.teacher, "a teacher"),
            "workers": (rollout.num_workers, "rollout workers (rollout.num_workers)"),
            "off_policy": (rollout.corrects or rollout.staleness, "rollout.staleness or rollout.correction"),
            "reward": (job.reward, "a reward"),
            "judge": (job.judge, "a judge"),
            "pairs": (job.data.pairs, "pairs to evaluate the reward on (data.pairs)"),
            "subset": (job.data.subset, "a column of them (data.subset)"),
            "benchmarks": (job.data.benchmarks, "rows of it (data.benchmarks)"),
            "probes": (job.trainer.get("probes"), "probes of the reward (trainer.probes=true)"),
            "best_of_n": (job.trainer.get("best_of_n"), "a search (trainer.best_of_n=16)"),
        }
        return {need: description for need, (there, description) in needs.items() if not there}

    def lacking(self, metric: Metric) -> str:
        """Returns what the job lacks for a metric, or ""."""
        needs = [need for need in metric.needs.split() if metric.at != "result" or need != "rows"]
        needs += ["start"] * (metric.at == "initial" and self.facts.trl)
        return next((self.absent[need] for need in needs if need in self.absent), "")

    @cached_property
    def lacks(self) -> dict[str, str]:
        """Returns {metric: what the job lacks for it, or ""} for every metric that the stage can measure."""
        own = [one for one in METRICS if self.job.stage in one.stages.split() and one.at != "curve"]
        lacks = {one.name: self.lacking(one) for one in own if "*" not in one.name}
        if self.job.stage == "ppo":
            rewards = ["reward", *(f"reward_{index}" for index in range(1, len(self.job.rewards)))]
            lacks |= {f"rewards/{reward}/mean": "" for reward in rewards}
        return lacks

    @property
    def compared(self) -> dict[str, str]:
        """Returns `lacks` of the metrics of an evaluation that rate the model."""
        return {k: v for k, v in self.lacks.items() if k.startswith("eval_") and not SPEED.search(k)}

    @property
    def default(self) -> str:
        """Returns eval_loss, or for ppo the judge's score, else the reward's.

        The loss also distinguishes models that rank all pairs the same way. PPO maximizes the reward: a judge
        says whether what raises it is better.
        """
        if self.facts.trl:
            return "eval_loss"
        return "eval_judge" if self.job.judge else "eval_reward"

    def of_rows(self, metric: str) -> bool:
        """Returns True if the metric is named after a value of the rows or a probe, which are not known here."""
        found = find(metric, self.job.stage)
        return (
            found is not None
            and found.name.startswith("eval_")
            and "*" in found.name
            and not self.lacking(found)
        )

    def problems(self) -> Problems:
        """Yields invalid conditions of `gate` and `run.stop_if`, and evaluations that cannot be compared."""
        yield from self._keep_problems()
        learns, judged = self.facts.learns, self.job.inputs.get("policy") or self.job.reward
        known = self.lacks if self.job.gate else {}
        # If the command line removes the held-out rows that the file's gate needs, the run starts, but moves no alias.
        removed = {"data.eval", "data.eval_fraction"} & {*self.job.overridden}
        for metric, rule in self.job.gate.items():
            key = f"gate.{short(metric)}"
            yield from self._condition_problems(key, metric, rule, known)
            if learns and known.get(metric) == HELD_OUT_ROWS and (not removed or key in self.job.overridden):
                yield key, f"needs {HELD_OUT_ROWS}; set data.eval_fraction=0.1, or gate={{}}"
        if self.job.gate and not learns and not InputURI.parse(str(judged)).is_registered:
            yield (
                "gate",
                f"found one, but {show(judged)} is no registered version that could pass it; remove it",
            )

    def _condition_problems(self, key: str, metric: str, rule: Any, known: dict[str, str]) -> Problems:
        try:
            relative = parse_gate(rule)[1] is None
        except ValueError as error:
            yield key, str(error)
            return
        if relative and not (key.startswith("gate.") and metric.startswith("eval_")):
            yield (
                key,
                f"found {show(rule)}; only a gate on held-out rows (eval_...) has a champion; set a number",
            )
        if metric not in known and not self.of_rows(metric):
            yield key, self._unknown(metric, known)

    def _unknown(self, metric: str, known: Iterable[str]) -> str:
        near = get_close_matches(metric, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(list(known)[:40])}"
        return f"`{self.job.stage}` has no such metric ({short(metric)}); {hint}"

    def _keep_problems(self) -> Problems:
        """Yields why evaluations cannot be compared: the job makes none, or they lack the metric."""
        run = self.job.run
        stops = ("load_best_model_at_end", "early_stopping_patience", "stop_if")
        key = next((name for name in stops if getattr(run, name)), None)
        if key is None:
            return
        if self.facts.trl:
            evaluates, wanted = (
                self.job.trainer.get("eval_strategy", "no") != "no",
                "trainer.eval_strategy=epoch",
            )
        else:
            evaluates, wanted = bool(self.job.trainer.get("eval_steps")), "trainer.eval_steps=10"
        if not (evaluates and self.job.held_out):
            found = f"found {show(getattr(run, key))}, but there are no evaluations to compare"
            yield (
                f"run.{key}",
                f"{found}: set data.eval or data.eval_fraction, and {wanted}, or remove this key",
            )
        yield from self.metric_problems()
        known = self.compared
        for metric, rule in run.stop_if.items():
            key = f"run.stop_if.{short(metric)}"
            yield from self._condition_problems(key, metric, rule, known)
            if lacking := known.get(metric):
                yield key, f"{metric} needs {lacking}, and there is none"

    def metric_problems(self) -> Problems:
        """Yields why run.metric_for_best_model cannot compare the job's evaluations."""
        key, metric = "run.metric_for_best_model", self.job.run.metric_for_best_model
        known = self.compared
        if metric is None:
            return
        if metric not in known:
            yield key, self._unknown(metric, [name for name, lacking in known.items() if not lacking])
        elif known[metric]:
            yield key, f"{metric} needs {known[metric]}, and there is none"
        elif (
            self.job.run.greater_is_better is None and (one := find(metric)) and one.greater_is_better is None
        ):
            yield key, f"is a larger {metric} better? Set run.greater_is_better=true or false"
