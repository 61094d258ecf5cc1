"""The gate: conditions on the metrics of a run, read and compared with what its stage measures.

gate: {eval_accuracy: ">= 0.95"}
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pipeline.config.jobfile import Tree
from pipeline.config.stages import STAGE
from pipeline.errors import short, show
from pipeline.references import Ref

if TYPE_CHECKING:
    from pipeline.config import Job

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}

# What a stage measures, by what it takes: nothing more than training, held-out rows, a reward, a judge, pairs. The names are
# repeated here, because a gate is checked before anything heavy is imported: tests/test_upstream.py compares them with
# what TRL's trainers log, tests/config/test_gates.py with what ours logs, and tests/support/running.py every result.json.
HELD_OUT_ROWS = "held-out rows (data.eval or data.eval_fraction)"
_TRL = "loss runtime samples_per_second steps_per_second num_tokens"
_TOKENS = "entropy mean_token_accuracy aux_loss"
_COMPLETIONS = "reward eos length repetition distinct distinct_1 distinct_2 perplexity"
TRAINED = """train_loss train_runtime train_samples_per_second train_steps_per_second train_tokens_per_second epoch
    total_flos"""
UPDATE = """objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward objective/scores objective/kl_coef
    val/num_eos_tokens val/sampler_drift val/explained_variance val/ratio val/clipfrac_avg completions/mean_length
    completions/clipped_ratio rewards/reward/mean loss/policy_avg loss/value_avg policy/approxkl_avg policy/clipfrac_avg
    policy/first_ratio_rms policy/entropy_avg policy/steps grad_norm/policy grad_norm/critic skipped_steps lr episode
    train_samples_per_second train_tokens_per_second time/rollout time/score time/values time/update memory/rollout memory/score memory/values
    memory/update memory/peak"""
ROLLOUT = "rollout/workers rollout/idle rollout/queue rollout/bytes rollout/lost_workers rollout/waited rollout/waiting"
OFF_POLICY = """rollout/ratio_mean rollout/ratio_max rollout/ratio_cut rollout/effective_samples
    rollout/sampler_kl"""
_PAIRS = """accuracy accuracy_low accuracy_high margin loss ece accuracy_chosen_shorter accuracy_chosen_longer
    length_correlation"""
HELD_OUT = {
    "sft": f"{_TRL} {_TOKENS} eos_accuracy",
    "rm": f"{_TRL} accuracy margin min_reward mean_reward max_reward",
    "dpo": f"""{_TRL} {_TOKENS} logits/chosen logits/rejected logps/chosen logps/rejected rewards/chosen rewards/rejected
        rewards/accuracies rewards/margins""",
    "kto": f"""{_TRL} entropy aux_loss kl logits/chosen logits/rejected logps/chosen logps/rejected rewards/chosen
        rewards/rejected rewards/margins""",
}


def parse_gate(rule: Any) -> tuple[str, float]:
    """`">= 0.95"` -> (">=", 0.95); the operator is a key of OPERATORS. Raises ValueError."""
    match = (
        re.fullmatch(r"\s*(>=|<=|>|<)\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*", rule)
        if isinstance(rule, str)
        else None
    )
    if match is None or not math.isfinite(float(match[2])):
        raise ValueError(
            f'found {show(rule)}, expected a comparison in quotes: ">= 0.95" (operators >= <= > <)'
        )
    return match[1], float(match[2])


def metrics(job: Job) -> dict[str, str]:
    """{metric: what the job lacks for it, in words; "" if nothing} for every metric that the stage can measure."""
    held_out = bool(job.data.eval or job.data.eval_fraction)
    if STAGE[job.stage].trl:
        rows = "" if held_out else HELD_OUT_ROWS
        first = rows or ("" if job.trainer.get("eval_on_start") else "trainer.eval_on_start=true")
        names = HELD_OUT[job.stage].split()
        return {
            **dict.fromkeys(TRAINED.split(), ""),
            **{f"eval_{name}": rows for name in names},
            **{f"before_{name}": first for name in names},
        }
    lacks: dict[str, str] = {}
    if job.stage == "ppo":
        lacks = dict.fromkeys(UPDATE.split(), "")
        lacks |= {f"rewards/reward_{i}/mean": "" for i in range(1, len(job.rewards))}
        rollout = job.rollout_config
        lacks |= dict.fromkeys(
            ROLLOUT.split(), "" if rollout.workers[1] else "rollout workers (rollout.num_workers)"
        )
        lacks |= dict.fromkeys(
            OFF_POLICY.split(),
            "" if rollout.corrects or rollout.staleness else "rollout.staleness or rollout.correction",
        )
    missing = HELD_OUT_ROWS if STAGE[job.stage].learns else "prompts to answer (data.eval)"
    rows = "" if held_out else missing
    reward, judge = rows or ("" if job.reward else "a reward"), rows or ("" if job.judge else "a judge")
    lacks |= {f"{when}_{name}": rows for when in ("before", "eval") for name in _COMPLETIONS.split()}
    lacks["eval_kl"] = rows
    lacks |= dict.fromkeys(("before_reward", "eval_reward", *_interval("eval_win_rate")), reward)
    lacks |= dict.fromkeys(("before_judge", "eval_judge", *_interval("eval_judge_win_rate")), judge)
    if job.stage == "evaluate":
        pairs = "" if job.data.pairs else "pairs to evaluate the reward on (data.pairs)"
        agreed = pairs or ("" if job.judge else "a judge")
        lacks |= {f"eval_rm_{name}": pairs for name in _PAIRS.split()}
        lacks |= dict.fromkeys(("eval_rm_agreement", "eval_rm_judge_accuracy"), agreed)
    return lacks


def _interval(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def check(tree: Tree, job: Job) -> None:
    """Refuses what is no condition, and conditions on a metric that the stage never has."""
    known = metrics(job) if job.gate else {}
    for metric, rule in job.gate.items():
        try:
            parse_gate(rule)
        except ValueError as error:
            raise tree.error(f"gate.{short(metric)}", str(error)) from None
        if metric not in known and not _of_a_subset(job, metric):
            near = difflib.get_close_matches(metric, known, n=1)
            examples = ", ".join([name for name in known if name.startswith("eval_")][:6])
            hint = f"did you mean {near[0]}?" if near else f"expected one of {examples}, ..."
            raise tree.error(f"gate.{short(metric)}", f"`{job.stage}` has no such metric; {hint}")
        if STAGE[job.stage].learns and known.get(metric) == HELD_OUT_ROWS and not _taken_away(tree, metric):
            raise tree.error(
                f"gate.{short(metric)}",
                f"needs {HELD_OUT_ROWS}, which this job does not have; type data.eval_fraction=0.1, or gate={{}}",
            )
    judged = job.policy or job.reward
    if job.gate and not STAGE[job.stage].learns and not Ref.parse(str(judged)).is_registered:
        raise tree.error(
            "gate",
            f"found one, but {show(judged)} is no registered version that it could let pass; take it out",
        )


def _taken_away(tree: Tree, metric: str) -> bool:
    """Whether the command line took the held-out rows from a job file whose gate counts on them: the run only moves no alias."""
    typed = [key for key, place in tree.where.items() if place == "command line"]
    return {"data.eval", "data.eval_fraction"} & {*typed} != set() and f"gate.{metric}" not in typed


def unmeasured(job: Job) -> Iterator[str]:
    """A warning for each condition that cannot hold, because this job leaves out what its metric is measured on."""
    known = metrics(job) if job.gate else {}
    for metric in job.gate:
        if lacking := known.get(metric):
            yield (
                f"gate.{metric}: needs {lacking}, which this job does not have; the version will be kept without its alias"
            )


def _of_a_subset(job: Job, metric: str) -> bool:
    """The values of data.subset are in the rows: any may be meant."""
    return bool(job.data.subset) and metric.startswith("eval_rm_accuracy/")
