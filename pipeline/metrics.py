"""Defines the table of metrics: stages, label, unit, whether a larger value is better, and what a job needs to measure them.

Gates, terminal lines, reports and the choice of the best checkpoint use this table. A metric on held-out rows has the prefix
`eval_`, or `initial_` if it was measured before training.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

TRL, WRITERS = "sft rm dpo kto", "ppo evaluate"
HELD_OUT = ("initial", "eval")
ALL, BOTH = "curve initial eval", "initial eval"
NATS, IMPLICIT = "nats per completion", "β × log-ratio"  # implicit rewards
PAIRS, PROMPTS = "share of pairs", "share of prompts"
BY_REWARD, BY_JUDGE = (PROMPTS, True, "rows reward"), (PROMPTS, True, "rows judge")
ON_PAIRS = (PAIRS, True, "pairs")
COMPLETIONS, TOKENS = "share of completions", "share of tokens"
# Metrics of speed and size. These metrics do not measure the model's quality.
SPEED = re.compile(r"runtime|per_second|num_tokens|_time$")


@dataclass(frozen=True)
class Metric:
    """A metric. A row of the table may stand for several metrics that differ only in name, stage or prefix."""

    name: str  # name with its prefix; * stands for a reward, a judge or a value of the rows
    stages: str
    at: str  # curve: logged at steps. result: also in result.json. initial, eval: on held-out rows, also in both.
    label: str = ""  # label in summaries and reports
    line: str = ""  # short label in progress lines; a metric without `line` is not printed there
    unit: str = ""
    greater_is_better: bool | None = None  # None: unknown
    needs: str = "rows"  # what a job needs to measure it; see Job.metrics
    compared: bool = True  # whether a summary also shows its value before training

    @property
    def before(self) -> str:
        """Returns the name of this metric before training, or "" if a summary does not compare the two values."""
        return self.name.replace("eval_", "initial_") if self.compared and self.at == "eval" else ""

    @property
    def is_share(self) -> bool:
        return self.unit.startswith("share")

    @property
    def unit_shown(self) -> str:
        """Returns the unit that is printed after a value, or "" for shares, losses and scores."""
        return self.unit if self.unit.startswith(("nats", "tokens")) else ""


# Sorted by importance, the most important metric first. Progress lines print metrics in this order.
TABLE = (
    # Metrics of the stages that TRL trains
    Metric("loss", TRL, "curve", "", "loss", "loss"),
    Metric("loss", TRL, BOTH, "held-out loss", "held-out loss", "loss", False),
    Metric("accuracy", "rm", ALL, "held-out accuracy", "accuracy", PAIRS, True),
    Metric("rewards/accuracies", "dpo", ALL, "held-out accuracy", "accuracy", PAIRS, True, compared=False),
    Metric("mean_token_accuracy", "sft dpo", ALL, "token accuracy", "token accuracy", TOKENS, True),
    Metric("eos_accuracy", "sft", ALL, "end token accuracy", "end accuracy", COMPLETIONS, True),
    Metric("margin", "rm", ALL, "margin", "margin", "score", True),
    Metric("rewards/margins", "dpo", ALL, "margin", "margin", IMPLICIT, True, compared=False),
    Metric("rewards/margins", "kto", ALL, "margin", "margin", IMPLICIT, True),
    Metric("rewards/chosen", "dpo kto", ALL, unit=IMPLICIT, greater_is_better=True),
    Metric("rewards/rejected", "dpo kto", ALL, unit=IMPLICIT),
    Metric("logps/chosen", "dpo kto", ALL, unit=NATS, greater_is_better=True),
    Metric("logps/rejected", "dpo kto", ALL, unit=NATS),
    Metric("logits/chosen", "dpo kto", ALL, greater_is_better=True),
    Metric("logits/rejected", "dpo kto", ALL),
    Metric("min_reward mean_reward max_reward", "rm", ALL, unit="score", greater_is_better=True),
    Metric("kl", "kto", "curve", unit=NATS),
    Metric("kl", "kto", BOTH, "KL estimate", "held-out kl", NATS, False, compared=False),
    Metric("entropy", "sft dpo kto", ALL, unit="nats per token"),
    Metric("aux_loss", "sft dpo kto", ALL, unit="loss", greater_is_better=False),
    Metric("num_tokens", TRL, ALL, unit="tokens"),
    # Metrics of a ppo update
    Metric("objective/scores", "ppo", "result", line="score", unit="score"),
    Metric("objective/kl", "ppo", "result", line="kl", unit=NATS),
    Metric("objective/teacher_kl", "ppo", "result", line="kl to teacher", unit=NATS, needs="teacher"),
    Metric("objective/entropy", "ppo", "result", line="entropy/completion", unit="nats"),
    Metric("objective/non_score_reward objective/rlhf_reward rewards/*/mean", "ppo", "result", unit="score"),
    Metric("objective/kl_coef", "ppo", "result", unit="score per nat"),
    Metric("completions/mean_length", "ppo", "result", line="length", unit="tokens"),
    Metric("completions/clipped_ratio", "ppo", "result", line="truncated", unit=COMPLETIONS),
    Metric("val/num_eos_tokens episode policy/steps skipped_steps", "ppo", "result", unit="count"),
    Metric("val/explained_variance", "ppo", "result", line="explained var", unit="share"),
    Metric("policy/clipfrac_avg", "ppo", "result", line="clip frac", unit=TOKENS),
    Metric("val/clipfrac_avg", "ppo", "result", unit=TOKENS),
    Metric("val/ratio", "ppo", "result", unit="ratio"),
    Metric("val/sampler_drift policy/first_ratio_error", "ppo", "result", unit="nats per token"),
    Metric("policy/approxkl_avg policy/entropy_avg", "ppo", "result", unit="nats per token"),
    Metric("loss/policy_avg loss/value_avg", "ppo", "result", unit="loss"),
    # The optimizer, speed and memory
    Metric("grad_norm", TRL, "curve", line="grad norm", unit="norm"),
    Metric("grad_norm/policy grad_norm/critic", "ppo", "result", unit="norm"),
    Metric("learning_rate", TRL, "curve", unit="rate"),
    Metric("lr", "ppo", "result", unit="rate"),
    Metric("epoch train_loss train_runtime train_steps_per_second total_flos", TRL, "result"),
    Metric("train_samples_per_second", f"{TRL} ppo", "result"),
    Metric("train_tokens_per_second", f"{TRL} ppo", "result", unit="tokens per second"),
    Metric("runtime samples_per_second steps_per_second", TRL, BOTH),
    Metric("mfu", f"{TRL} ppo", "curve", unit="share"),
    Metric("time/rollout time/score time/values time/update", "ppo", "result", unit="seconds"),
    Metric("memory/rollout memory/score memory/values memory/update", "ppo", "result", unit="GiB"),
    Metric("memory/peak", "ppo", "result", unit="GiB"),
    Metric("memory/peak", TRL, "curve", unit="GiB"),
    Metric("time/evaluate memory/evaluate judges/*", "ppo", "curve"),
    # Completions to held-out prompts
    Metric("win_rate", "ppo", "eval", "win rate against before", "held-out win rate", *BY_REWARD),
    Metric("win_rate", "evaluate", "eval", "reward win rate", "", *BY_REWARD),
    Metric("judge_win_rate", WRITERS, "eval", "judge win rate", "judge win rate", *BY_JUDGE),
    Metric("win_rate_low win_rate_high", WRITERS, "eval", "", "", *BY_REWARD),
    Metric("judge_win_rate_low judge_win_rate_high", WRITERS, "eval", "", "", *BY_JUDGE),
    Metric("win_rate_lc win_rate_lc_low win_rate_lc_high", "evaluate", "eval", "", "", *BY_REWARD),
    Metric("judge_win_rate_lc", "evaluate", "eval", "", "", *BY_JUDGE),
    Metric("judge_win_rate_lc_low judge_win_rate_lc_high", "evaluate", "eval", "", "", *BY_JUDGE),
    Metric("kl", WRITERS, "eval", "KL", "held-out kl", NATS, False),
    Metric("reward", WRITERS, BOTH, "reward", "", "score", True, "rows reward"),
    Metric("judge", WRITERS, BOTH, "judge", "", "score", True, "rows judge"),
    Metric("length", WRITERS, BOTH, "length", "", "tokens"),
    Metric("eos_rate", WRITERS, BOTH, "completions that end", "", COMPLETIONS, compared=False),
    Metric("repetition", WRITERS, BOTH, unit="share of 4-grams", greater_is_better=False),
    Metric("unique_fraction distinct_1 distinct_2", WRITERS, BOTH, unit="share"),
    Metric("perplexity", WRITERS, BOTH, greater_is_better=False),
    Metric("best_of_n", "evaluate", "eval", "", "", "score", True, "rows reward best_of_n"),
    # Rollout workers, and completions of an older policy
    Metric("rollout/wait_seconds", "ppo", "result", line="waited s", unit="seconds", needs="workers"),
    Metric("rollout/idle", "ppo", "result", line="workers idle", unit="share", needs="workers"),
    Metric("rollout/wait_fraction", "ppo", "result", unit="share of an update", needs="workers"),
    Metric("rollout/workers rollout/lost_workers", "ppo", "result", unit="count", needs="workers"),
    Metric("rollout/queue", "ppo", "result", needs="workers"),
    Metric("rollout/ess rollout/is_clipped_fraction", "ppo", "result", unit="share", needs="off_policy"),
    Metric("rollout/ratio_mean rollout/ratio_max", "ppo", "result", unit="ratio", needs="off_policy"),
    Metric("rollout/sampler_kl", "ppo", "result", unit="nats per token", needs="off_policy"),
    # A reward on data.pairs and data.benchmarks
    Metric("rm_accuracy", "evaluate", "eval", "reward model's accuracy", "", *ON_PAIRS),
    Metric("rm_accuracy_low rm_accuracy_high", "evaluate", "eval", "", "", *ON_PAIRS),
    Metric("rm_accuracy_chosen_shorter rm_accuracy_chosen_longer", "evaluate", "eval", "", "", *ON_PAIRS),
    Metric("rm_accuracy_matched_length rm_order_agreement", "evaluate", "eval", "", "", *ON_PAIRS),
    Metric("rm_accuracy/*", "evaluate", "eval", "", "", PAIRS, True, "subset"),
    Metric("rm_agreement rm_judge_accuracy", "evaluate", "eval", "", "", PAIRS, True, "pairs judge"),
    Metric("rm_margin", "evaluate", "eval", "", "", "score", True, "pairs"),
    Metric("rm_loss rm_ece rm_ece_calibrated rm_ties", "evaluate", "eval", "", "", "", False, "pairs"),
    Metric("rm_calibration_temperature rm_length_correlation", "evaluate", "eval", needs="pairs"),
    Metric("rm_shown_first", "evaluate", "eval", unit="share of questions", needs="pairs"),
    Metric("rm_probes_failed", "evaluate", "eval", "", "", "count", False, "pairs probes"),
    Metric("rm_probe/* rm_probe_accuracy/*", "evaluate", "eval", needs="probes"),
    Metric("reward_bench_2 reward_bench_2/* best_of_k best_of_k/*", "evaluate", "eval", needs="benchmarks"),
    Metric("rm_bench rm_bench/* rm_bench_low rm_bench_high", "evaluate", "eval", needs="benchmarks"),
    Metric("rm_bench_hard rm_bench_normal rm_bench_easy", "evaluate", "eval", needs="benchmarks"),
)  # fmt: skip
METRICS = [
    replace(row, name=f"{phase}_{name}" if phase in HELD_OUT else name, at=phase)
    for row in TABLE
    for name in row.name.split()
    for phase in row.at.split()
]


def find_metric(name: str, stage: str | None = None) -> Metric | None:
    """Returns the metric with this name, or None. If `stage` is None, the metric may belong to any stage."""
    candidates = (metric for metric in METRICS if stage is None or stage in metric.stages.split())
    return next((metric for metric in candidates if fnmatchcase(name, metric.name)), None)


def line_of(stage: str, values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns (label, value) of each metric in a progress line, the most important metric first."""
    metrics = [metric for metric in METRICS if stage in metric.stages.split()]
    return [(metric.line, values[metric.name]) for metric in metrics if metric.line and metric.name in values]


def greater_is_better(name: str, setting: bool | None) -> bool:
    """Returns `setting` unless it is None. Otherwise, returns the table's entry, or True if the table has no entry."""
    metric = find_metric(name)
    return setting if setting is not None else not metric or metric.greater_is_better is not False
