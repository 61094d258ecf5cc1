"""`run.keep: best` and `run.early_stopping_patience`: the held-out figure that evaluations are compared by."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from pipeline.config import gates
from pipeline.config.jobfile import Tree
from pipeline.config.stages import STAGE
from pipeline.errors import show

if TYPE_CHECKING:
    from pipeline.config import Job

# Figures of which a smaller one is better, those of which a larger one is, and those that say nothing about the model.
SMALLER = re.compile(r"loss|perplexity|kl|repetition")
LARGER = re.compile(r"accurac|margin|judge|reward$|win_rate|chosen|agreement")
CLOCKS = re.compile(r"runtime|per_second|num_tokens")


def default_metric(job: Job) -> str:
    """The loss, which also tells models apart that rank all pairs alike; of ppo the judge's score, else the reward's.

    The policy is trained to raise the reward: a judge says whether what raises it is worth anything.
    """
    if STAGE[job.stage].trl:
        return "eval_loss"
    return "eval_judge" if job.judge else "eval_reward"


def greater_is_better(metric: str, given: bool | None) -> bool:
    """Whether a larger figure is better: as `given`, else as its name says."""
    return not SMALLER.search(metric) if given is None else given


def check(tree: Tree, job: Job) -> None:
    """Refuses to compare evaluations that this job does not make, or by a figure that they do not have."""
    run, trainer = job.run, job.trainer
    if run.keep == "last" and run.early_stopping_patience is None:
        return
    key, off = ("run.keep", "last") if run.keep == "best" else ("run.early_stopping_patience", "null")
    asked = f"found {show(getattr(run, key.removeprefix('run.')))}"
    if not job.data.eval and not job.data.eval_fraction:
        raise tree.error(
            key,
            f"{asked}, and there are no held-out rows to compare steps by: give data.eval or data.eval_fraction, or type "
            f"{key}={off}",
        )
    if STAGE[job.stage].trl:
        evaluates, wanted = trainer.get("eval_strategy", "no") != "no", "trainer.eval_strategy=epoch"
    else:
        evaluates, wanted = bool(trainer.get("eval_steps")), "trainer.eval_steps=10"
    if not evaluates:
        raise tree.error(
            key, f"{asked}, but the job evaluates only when training has ended: type {wanted}, or {key}={off}"
        )
    check_metric(tree, job)


def check_metric(tree: Tree, job: Job) -> None:
    """Refuses a metric_for_best_model that no evaluation of the job has."""
    measured = {
        name: lacking
        for name, lacking in gates.metrics(job).items()
        if name.startswith("eval_") and not CLOCKS.search(name)
    }
    known = [name for name, lacking in measured.items() if not lacking]
    metric = job.run.metric_for_best_model
    if metric is None:
        return
    if metric in known:
        if job.run.greater_is_better is None and not (SMALLER.search(metric) or LARGER.search(metric)):
            raise tree.error(
                "run.metric_for_best_model",
                f"is a larger {metric} better? Type run.greater_is_better=true or false",
            )
        return
    if measured.get(metric):
        raise tree.error("run.metric_for_best_model", f"{metric} needs {measured[metric]}, and there is none")
    near = difflib.get_close_matches(metric, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise tree.error(
        "run.metric_for_best_model",
        f"found {show(metric)}, which no evaluation of `{job.stage}` has; expected one of {', '.join(known)}{hint}",
    )
