"""A reward model on held-out preference pairs: accuracy, margin, calibration, accuracy by subset, length bias, agreement.

It reads a pair exactly as `rm` trained on it, so that the accuracy is TRL's; every pair counts once, with any batches and
workers. The job's `judge` rates the same pairs if they have the columns that it needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.errors import visible
from pipeline.figures import calibration, correlation, mean, sigmoid, temperature, wilson
from pipeline.references import Ref
from pipeline.runtime.inputs import unfilled
from pipeline.runtime.worker import Worker

if TYPE_CHECKING:
    from pipeline.ppo.rewards import Samples

SIDES = ("chosen_ids", "rejected_ids")
MATCHED = 1.1  # lengths of a pair that differ by less than this factor count as equal


def measure(
    worker: Worker, rewards: list[Any], judge: Any, rows: Any, ends: Collection[int]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns (metrics `eval_rm_*`, tables for evaluation.json) of the weighted `rewards` on the token rows of `data.pairs`.

    eval_rm_loss: -log sigmoid(margin). eval_rm_ece: see figures.calibration. eval_rm_temperature: see figures.temperature,
    fitted on every second pair; eval_rm_ece_calibrated: the error of margin / temperature on the others.
    eval_rm_accuracy_matched_length: on pairs whose lengths differ by at most 10 %. eval_rm_length_correlation: of the score with
    the length of the completion in tokens. eval_rm_agreement: share of the pairs on which reward and judge prefer the same
    side.

    Args:
        ends: ids that end a completion.
    """
    if worker.rank == 0:
        print(f"scoring {len(rows)} held-out pairs", flush=True)
    mine = [dict(row) for row in rows.select(range(worker.rank, len(rows), worker.world))]
    given = [json.loads(row["row"]) for row in mine]
    pairs: list[dict[str, Any]] = [
        {"margin": c - r, "scores": (c, r), "lengths": tuple(len(row[side]) for side in SIDES)}
        for row, (c, r) in zip(mine, _scores(worker, rewards, mine, given, ends), strict=True)
    ]
    if judge is not None and _has_columns(worker, given):
        for pair, (c, r) in zip(pairs, _scores(worker, [judge], mine, given, ends), strict=True):
            pair["judge"] = c - r
    if column := worker.job.data.subset:
        for pair, row in zip(pairs, given, strict=True):
            pair["subset"] = visible(str(row.get(column)), lines=False)[:60]
    parts = worker.gather(pairs)
    # Puts the results in the order of the rows, for any number of workers
    return figures([parts[i % worker.world][i // worker.world] for i in range(len(rows))])


def figures(pairs: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and tables of pairs that each have `margin`, `scores`, `lengths`, and perhaps `judge` and `subset`."""
    margins = [pair["margin"] for pair in pairs]
    right = [float(margin > 0) for margin in margins]
    ece, bins = calibration(margins)
    low, high = wilson(right)
    metrics = {
        "eval_rm_accuracy": mean(right),
        "eval_rm_accuracy_low": low,
        "eval_rm_accuracy_high": high,
        "eval_rm_margin": mean(margins),
        "eval_rm_loss": mean([-math.log(max(sigmoid(margin), 1e-300)) for margin in margins]),
        "eval_rm_ece": ece,
    }
    if len(margins) > 1:  # fitted on every second pair, measured on the others
        metrics["eval_rm_temperature"] = scale = temperature(margins[::2])
        metrics["eval_rm_ece_calibrated"] = calibration([margin / scale for margin in margins[1::2]])[0]
    by_length = {
        "matched_length": [
            m > 0
            for m, p in zip(margins, pairs, strict=True)
            if max(p["lengths"]) <= MATCHED * min(p["lengths"])
        ],
        "chosen_shorter": [
            m > 0 for m, p in zip(margins, pairs, strict=True) if p["lengths"][0] < p["lengths"][1]
        ],
        "chosen_longer": [
            m > 0 for m, p in zip(margins, pairs, strict=True) if p["lengths"][0] > p["lengths"][1]
        ],
    }
    metrics |= {f"eval_rm_accuracy_{name}": mean(hits) for name, hits in by_length.items() if hits}
    scores, lengths = ([value for pair in pairs for value in pair[key]] for key in ("scores", "lengths"))
    if (bias := correlation(scores, lengths)) is not None:
        metrics["eval_rm_length_correlation"] = bias
    judged = [pair for pair in pairs if "judge" in pair]
    if judged:
        metrics["eval_rm_agreement"] = mean([(p["judge"] > 0) == (p["margin"] > 0) for p in judged])
        metrics["eval_rm_judge_accuracy"] = mean([p["judge"] > 0 for p in judged])
    subsets: dict[str, dict[str, float]] = {}
    for name in sorted({pair["subset"] for pair in pairs if "subset" in pair}):
        mine = [float(pair["margin"] > 0) for pair in pairs if pair["subset"] == name]
        low, high = wilson(mine)
        subsets[name] = {"pairs": len(mine), "accuracy": mean(mine), "low": low, "high": high}
        metrics[f"eval_rm_accuracy/{metric_name(name)}"] = mean(mine)
    return metrics, {"pairs": len(pairs), "reliability": bins, "subsets": subsets}


def metric_name(subset: str) -> str:
    """Returns a column's value as part of a metric's name. MLflow rejects all metrics if one name is wrong."""
    return re.sub(r"[^\w.: -]", "_", subset).strip(" .") or "_"


def _scores(
    worker: Worker, rewards: list[Any], rows: list[Any], given: list[Any], ends: Collection[int]
) -> list[tuple[float, float]]:
    """Returns the weighted, raw scores of both completions, for each of this rank's rows."""
    from pipeline.inference.rows import seed_of
    from pipeline.ppo.rewards import weighted

    if not rows:
        return []
    prompts = [row["prompt_ids"] for row in rows]
    seeds = [seed_of(0, worker.rank + i * worker.world) for i in range(len(rows))]
    sides = (
        samples_of(prompts, [row[side] for row in rows], given, worker.tokenizer, ends, seeds)
        for side in SIDES
    )
    chosen, rejected = (weighted(rewards, samples, normalize=False)[0] for samples in sides)
    return list(zip(chosen, rejected, strict=True))


def samples_of(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    rows: Sequence[Any],
    tokenizer: Any,
    ends: Collection[int],
    seeds: Sequence[int] = (),
) -> Samples:
    """Returns the completions of some rows as samples. A truncated one has no end token and has not ended."""
    from pipeline.ppo.rewards import Samples

    ended = [completion[-1] in ends for completion in completions]
    return Samples(list(prompts), list(completions), ended, list(rows), tokenizer, seeds)


def _has_columns(worker: Worker, given: list[dict[str, Any]]) -> bool:
    """Returns whether the rows have the columns that the judge needs, if it is a Python function."""
    judge = str(worker.job.judge)
    if not Ref.parse(judge).is_function:
        return True
    return all(unfilled(judge, set(row)) is None for row in given)
