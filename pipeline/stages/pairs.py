"""Evaluates a reward model on preference pairs: accuracy, margin, calibration, length bias, agreement with a judge.

The token ids of a pair are the same as in training, so the accuracy equals TRL's. Every pair has the same weight, for any batch
size and any number of workers. The `judge` of the job scores the same pairs if the pairs have the columns that the judge needs.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pipeline.errors import escape_controls
from pipeline.run.parts import in_parts
from pipeline.run.worker import Worker
from pipeline.scoring.rewards import Samples, weighted_scores
from pipeline.settle.inputs import missing_parameter
from pipeline.statistics import calibration, correlation, mean, sigmoid, temperature, wilson_interval
from pipeline.writing.rows import seed_of

SIDES = ("chosen_ids", "rejected_ids")
# {NAME: f(length of the chosen completion, length of the rejected one) -> whether eval_rm_accuracy_NAME includes the pair}
BY_LENGTH: dict[str, Callable[[int, int], bool]] = {
    "matched_length": lambda chosen, rejected: max(chosen, rejected) <= 1.1 * min(chosen, rejected),
    "chosen_shorter": lambda chosen, rejected: chosen < rejected,
    "chosen_longer": lambda chosen, rejected: chosen > rejected,
}
PLACES = ("first", "last")  # position of the chosen completion, for a judge that sees both completions


def measure_pairs(
    worker: Worker, rewards: list[Any], judge: Any, rows: Any, ends: Collection[int]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores the token rows of `data.pairs` with weighted `rewards`. Returns (metrics `eval_rm_*`, tables for evaluation.json).

    docs/evaluate.md explains the metrics.

    Args:
        ends: ids of the tokens that end a completion.
    """
    if worker.rank == 0:
        print(f"scoring {len(rows)} held-out pairs", flush=True)
    column, judge_input = worker.work.data.subset, worker.work.inputs.get("judge")
    # A judge that is a Python function may need columns that the rows lack.
    function = judge_input.version if judge_input and judge_input.kind == "function" else None

    def answer(numbers: range) -> list[dict[str, Any]]:
        share = [dict(row) for row in rows.select(numbers)]
        data_rows = [json.loads(row["row"]) for row in share]
        start, tokenizer = numbers.start, worker.tokenizer
        pairs = score_both_sides(rewards, share, start, tokenizer, ends)
        missing = [
            judge and (judge.columns - set(row) or (function and missing_parameter(function, set(row))))
            for row in data_rows
        ]
        if judge is not None and not any(missing):
            for pair, (c, r) in zip(pairs, score_rows([judge], share, start, tokenizer, ends), strict=True):
                pair["judge"] = c - r
        if column:
            for pair, row in zip(pairs, data_rows, strict=True):
                pair["subset"] = escape_controls(str(row.get(column)), lines=False)[:60]
        return pairs

    return pair_metrics(in_parts(worker, "pairs-", len(rows), answer))


def score_both_sides(
    rewards: list[Any], rows: Sequence[Any], first_row: int, tokenizer: Any, ends: Collection[int]
) -> list[dict[str, Any]]:
    """Returns `scores` and `lengths` of the chosen and the rejected completion of each token row.

    If a judge sees both completions at once, `orders` has the position and score of the chosen completion in each order.
    """
    notes: dict[str, Any] = {}
    scores = score_rows(rewards, rows, first_row, tokenizer, ends, notes)
    pairs: list[dict[str, Any]] = [
        {"scores": pair_scores, "lengths": [len(row[side]) for side in SIDES]}
        for row, pair_scores in zip(rows, scores, strict=True)
    ]
    for chosen_notes in (reward_notes[::2] for reward_notes in notes.values()):
        for pair, note in zip(pairs, chosen_notes, strict=True):
            if note["orders"]:
                pair["orders"] = note["orders"]
    return pairs


def pair_metrics(pairs: Iterable[dict[str, Any]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns (metrics, tables) for pairs that have `scores`, `lengths`, and optionally `orders`, `judge` and `subset`.

    Keeps only numbers in memory, in arrays, to support millions of pairs.
    """
    chosen, rejected, judged, agreements = (array("d") for _ in range(4))
    lengths = array("l"), array("l")
    # Whether the chosen completion wins if a judge sees it first, and if a judge sees it last.
    by_place: tuple[list[bool], list[bool]] = ([], [])
    by_subset: dict[str, list[bool]] = defaultdict(list)
    for pair in pairs:
        good, bad = pair["scores"]
        chosen.append(good)
        rejected.append(bad)
        for column, length in zip(lengths, pair["lengths"], strict=True):
            column.append(length)
        if orders := pair.get("orders"):  # [position of the chosen completion, its score] for each order
            for place, score in orders:
                by_place[place > 0].append(score > 0.5)
            if len(orders) > 1:
                agreements.append(float(len({score for _, score in orders}) == 1))
        if "judge" in pair:
            judged.append(pair["judge"])
        if "subset" in pair:
            by_subset[pair["subset"]].append(good > bad)
    margins = array("d", (good - bad for good, bad in zip(chosen, rejected, strict=True)))
    right = [margin > 0 for margin in margins]
    ece, bins = calibration(margins)
    low, high = wilson_interval(right)
    metrics = {
        "eval_rm_accuracy": mean(right),
        "eval_rm_accuracy_low": low,
        "eval_rm_accuracy_high": high,
        "eval_rm_margin": mean(margins),
        "eval_rm_loss": mean([-math.log(max(sigmoid(margin), 1e-300)) for margin in margins]),
        "eval_rm_ece": ece,
        "eval_rm_ties": mean([margin == 0 for margin in margins]),
    }
    if all(by_place):  # both positions have equal weight, even with unequal numbers of answers
        metrics["eval_rm_shown_first"] = 0.5 + (mean(by_place[0]) - mean(by_place[1])) / 2
    if agreements:
        metrics["eval_rm_order_agreement"] = mean(agreements)
    if len(margins) > 1:  # fits the temperature on every second pair, and measures ECE on other pairs
        metrics["eval_rm_calibration_temperature"] = scale = temperature(margins[::2])
        metrics["eval_rm_ece_calibrated"] = calibration([margin / scale for margin in margins[1::2]])[0]
    bounds: dict[str, tuple[float, float]] = {}
    for name, belongs in BY_LENGTH.items():
        if hits := [hit for hit, c, r in zip(right, *lengths, strict=True) if belongs(c, r)]:
            metrics[f"eval_rm_accuracy_{name}"] = mean(hits)
            bounds[name] = wilson_interval(hits)
    if (bias := correlation(chosen + rejected, lengths[0] + lengths[1])) is not None:
        metrics["eval_rm_length_correlation"] = bias
    if len(judged) == len(margins):
        metrics["eval_rm_agreement"] = mean([(j > 0) == hit for j, hit in zip(judged, right, strict=True)])
        metrics["eval_rm_judge_accuracy"] = mean([j > 0 for j in judged])
    subsets: dict[str, dict[str, float]] = {}
    for name, hits in sorted(by_subset.items()):
        low, high = wilson_interval(hits)
        subsets[name] = {"pairs": len(hits), "accuracy": mean(hits), "low": low, "high": high}
        metrics[f"eval_rm_accuracy/{metric_name(name)}"] = mean(hits)
    faults = reward_faults(
        metrics,
        bounds | {name: wilson_interval(hits) for name, hits in zip(PLACES, by_place, strict=True) if hits},
    )
    return metrics, {"pairs": len(margins), "reliability": bins, "subsets": subsets, "faults": faults}


def reward_faults(metrics: dict[str, float], bounds: dict[str, tuple[float, float]]) -> list[str]:
    """Returns messages about faults of a reward that are visible in the metrics.

    Args:
        bounds: {name in BY_LENGTH or PLACES: interval of the accuracy}.
    """
    faults = []
    low, high = metrics["eval_rm_accuracy_low"], metrics["eval_rm_accuracy_high"]
    if metrics["eval_rm_ties"] > 0.5:
        faults.append(f"{metrics['eval_rm_ties']:.0%} of the pairs have equal scores")
    elif high < 0.5:
        faults.append(
            f"the reward prefers the rejected completion ({1 - metrics['eval_rm_accuracy']:.0%}); "
            "are chosen and rejected swapped?"
        )
    elif low <= 0.5:
        faults.append(f"the reward's accuracy may be chance ({low:.2f} to {high:.2f})")
    if place := _higher(bounds, *PLACES):
        share = metrics["eval_rm_shown_first"]
        faults.append(
            f"the reward prefers the completion that it sees {place} ({max(share, 1 - share):.0%}); set orders: both"
        )
    if group := _higher(bounds, "chosen_longer", "chosen_shorter"):
        faults.append(
            f"the reward prefers the {group.removeprefix('chosen_')} completion; compare eval_rm_accuracy_matched_length"
        )
    return faults


def _higher(bounds: dict[str, tuple[float, float]], first: str, second: str) -> str | None:
    """Returns which of two names has the higher interval, or None if the intervals overlap or an interval is missing."""
    if not {first, second} <= set(bounds):
        return None
    (low, high), (second_low, second_high) = bounds[first], bounds[second]
    return first if low > second_high else second if second_low > high else None


def metric_name(subset: str) -> str:
    """Returns a subset's name with the characters that MLflow allows. MLflow rejects all metrics if one name is wrong."""
    return re.sub(r"[^\w.: -]", "_", subset).strip(" .") or "_"


def score_rows(
    rewards: list[Any],
    rows: Sequence[Any],
    first_row: int,
    tokenizer: Any,
    ends: Collection[int],
    notes: dict[str, Any] | None = None,
) -> list[list[float]]:
    """Returns the weighted scores, in raw units, of the one or two completions of each token row.

    Args:
        first_row: number of the first row.
        notes: a dict to which this function adds the rewards' notes on the completions; see Samples.
    """
    entries = [
        (row["prompt_ids"], row[side], json.loads(row["row"]), seed_of(0, number), number)
        for number, row in enumerate(rows, first_row)
        for side in SIDES
        if row.get(side) is not None
    ]
    prompts, completions, data_rows, seeds, groups = zip(*entries, strict=True)
    samples = samples_of(prompts, completions, data_rows, tokenizer, ends, seeds, groups)
    scores = iter(weighted_scores(rewards, samples, normalize=False))
    if notes is not None:
        notes.update(samples.notes)
    return [[next(scores) for side in SIDES if row.get(side) is not None] for row in rows]


def score_columns(scores: list[float]) -> dict[str, float]:
    """Returns {column: score} of a completion, or of a pair with its margin. The stage `score` writes these columns."""
    if len(scores) == 1:
        return {"score": scores[0]}
    chosen, rejected = scores
    return {"score_chosen": chosen, "score_rejected": rejected, "score_margin": chosen - rejected}


def samples_of(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    rows: Sequence[Any],
    tokenizer: Any,
    ends: Collection[int],
    seeds: Sequence[int] = (),
    groups: Sequence[int] = (),
) -> Samples:
    """Returns the completions of some rows as Samples. A completion counts as truncated if it has no end token."""
    ended = [completion[-1] in ends for completion in completions]
    return Samples(list(prompts), list(completions), ended, list(rows), tokenizer, seeds, groups)
