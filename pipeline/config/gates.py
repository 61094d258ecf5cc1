"""Metrics by name: which ones a stage measures, the conditions of a gate, and run.metric_for_best_model.

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

from pipeline.config.job import Job
from pipeline.errors import short, show
from pipeline.references import Ref

Problems = Iterator[tuple[str, str]]  # (key of the job, its error)

OPERATORS: dict[str, Callable[[float, float], bool]]
OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

# What a stage measures. The names are repeated here, because gates are checked before heavy imports. Tests compare them with
# PPO (tests/config/test_job.py) and with result.json (tests/support/running.py, tests/stages/test_stages.py).
HELD_OUT_ROWS = "held-out rows (data.eval or data.eval_fraction)"
_TRL = "loss runtime samples_per_second steps_per_second num_tokens"
_TOKENS = "entropy mean_token_accuracy aux_loss"
_COMPLETIONS = "reward eos_rate length repetition unique_fraction distinct_1 distinct_2 perplexity"
TRAINED = """train_loss train_runtime train_samples_per_second train_steps_per_second train_tokens_per_second epoch
    total_flos"""
UPDATE = """objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores objective/kl_coef
    val/num_eos_tokens val/sampler_drift val/explained_variance val/ratio val/clipfrac_avg completions/mean_length
    completions/clipped_ratio rewards/reward/mean loss/policy_avg loss/value_avg policy/approxkl_avg policy/clipfrac_avg
    policy/first_ratio_error policy/entropy_avg policy/steps grad_norm/policy grad_norm/critic skipped_steps lr episode
    train_samples_per_second train_tokens_per_second time/rollout time/score time/values time/update memory/rollout memory/score memory/values
    memory/update memory/peak"""
ROLLOUT = "rollout/workers rollout/idle rollout/queue rollout/bytes rollout/lost_workers rollout/wait_seconds rollout/wait_fraction"
OFF_POLICY = "rollout/ratio_mean rollout/ratio_max rollout/is_clipped_fraction rollout/ess rollout/sampler_kl"
_BENCHMARKS = """reward_bench_2 best_of_k rm_bench rm_bench_hard rm_bench_normal rm_bench_easy rm_bench_low rm_bench_high"""
_PAIRS = """accuracy accuracy_low accuracy_high margin loss ece accuracy_chosen_shorter accuracy_chosen_longer
    accuracy_matched_length length_correlation calibration_temperature ece_calibrated ties shown_first
    order_agreement"""
HELD_OUT = {
    "sft": f"{_TRL} {_TOKENS} eos_accuracy",
    "rm": f"{_TRL} accuracy margin min_reward mean_reward max_reward",
    "dpo": f"""{_TRL} {_TOKENS} logits/chosen logits/rejected logps/chosen logps/rejected rewards/chosen rewards/rejected
        rewards/accuracies rewards/margins""",
    "kto": f"""{_TRL} entropy aux_loss kl logits/chosen logits/rejected logps/chosen logps/rejected rewards/chosen
        rewards/rejected rewards/margins""",
}
# Parts of metric names: smaller is better, larger is better, and the metric does not rate the model
SMALLER = re.compile(r"loss|perplexity|kl|repetition")
LARGER = re.compile(r"accurac|margin|judge|reward$|win_rate|chosen|agreement")
CLOCKS = re.compile(r"runtime|per_second|num_tokens")
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


def greater_is_better(metric: str, given: bool | None) -> bool:
    """Returns whether larger values are better: as `given`, or else by the metric's name."""
    return not SMALLER.search(metric) if given is None else given


class Metrics:
    """The metrics that the stage of a job can measure."""

    def __init__(self, job: Job) -> None:
        self.job, self.facts = job, job.facts

    @cached_property
    def lacks(self) -> dict[str, str]:
        """Returns {metric: what the job lacks for it, or ""} for every metric that the stage can measure."""
        facts = self.facts
        lacks: dict[str, str] = {}

        def add(names: str, lacking: str = "", prefix: str = "") -> None:
            lacks.update({f"{prefix}{name}": lacking for name in names.split()})

        rows = HELD_OUT_ROWS if facts.learns else "prompts to answer (data.eval)"
        rows = "" if self.job.held_out else rows
        if facts.trl:
            add(TRAINED)
            add(HELD_OUT[self.job.stage], rows, "eval_")
            first = "" if self.job.trainer.get("eval_on_start") else "trainer.eval_on_start=true"
            add(HELD_OUT[self.job.stage], rows or first, "initial_")
            return lacks
        if self.job.stage == "ppo":
            rollout = self.job.rollout_config
            add(UPDATE)
            add("objective/teacher_kl", "" if self.job.teacher else "a teacher")
            add(" ".join(f"rewards/reward_{index}/mean" for index in range(1, len(self.job.rewards))))
            add(ROLLOUT, "" if rollout.num_workers else "rollout workers (rollout.num_workers)")
            corrected = rollout.corrects or rollout.staleness
            add(OFF_POLICY, "" if corrected else "rollout.staleness or rollout.correction")
        reward, judge = "" if self.job.reward else "a reward", "" if self.job.judge else "a judge"
        for when in ("initial_", "eval_"):
            add(_COMPLETIONS, rows, when)
            add("reward", rows or reward, when)
            add("judge", rows or judge, when)
        add("kl", rows, "eval_")
        add("win_rate win_rate_low win_rate_high", rows or reward, "eval_")
        add("judge_win_rate judge_win_rate_low judge_win_rate_high", rows or judge, "eval_")
        if self.job.stage == "evaluate":
            pairs = "" if self.job.data.pairs else "pairs to evaluate the reward on (data.pairs)"
            add(_PAIRS, pairs, "eval_rm_")
            add("agreement judge_accuracy", pairs or judge, "eval_rm_")
            benchmarks = "" if self.job.data.benchmarks else "rows of it (data.benchmarks)"
            add(_BENCHMARKS, benchmarks, "eval_")
            probes = "" if self.job.trainer.get("probes") else "probes of the reward (trainer.probes=true)"
            add("probes_failed", pairs or probes, "eval_rm_")
            add("win_rate_lc win_rate_lc_low win_rate_lc_high", rows or reward, "eval_")
            add("judge_win_rate_lc judge_win_rate_lc_low judge_win_rate_lc_high", rows or judge, "eval_")
            search = "" if self.job.trainer.get("best_of_n") else "a search (trainer.best_of_n=16)"
            add("best_of_n", rows or reward or search, "eval_")
        return lacks

    @property
    def compared(self) -> dict[str, str]:
        """Returns `lacks` of the metrics of an evaluation that rate the model."""
        return {k: v for k, v in self.lacks.items() if k.startswith("eval_") and not CLOCKS.search(k)}

    @property
    def default(self) -> str:
        """Returns eval_loss, or for ppo the judge's score, else the reward's.

        The loss also distinguishes models that rank all pairs the same way. PPO maximizes the reward: a judge says whether what
        raises it is better.
        """
        if self.facts.trl:
            return "eval_loss"
        return "eval_judge" if self.job.judge else "eval_reward"

    def of_rows(self, metric: str) -> bool:
        """Returns True if the metric's name ends in a value of the rows or in a probe, which are not known here."""
        head, slash, _ = metric.partition("/")
        return bool(slash) and (
            (self.job.data.subset is not None and head == "eval_rm_accuracy")
            or (bool(self.job.data.benchmarks) and head.removeprefix("eval_") in _BENCHMARKS.split())
            or (bool(self.job.trainer.get("probes")) and head in ("eval_rm_probe", "eval_rm_probe_accuracy"))
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
        if self.job.gate and not learns and not Ref.parse(str(judged)).is_registered:
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
        elif self.job.run.greater_is_better is None and not (SMALLER.search(metric) or LARGER.search(metric)):
            yield key, f"is a larger {metric} better? Set run.greater_is_better=true or false"
