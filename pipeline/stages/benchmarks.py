"""Benchmarks of reward models from files: RewardBench 2, RM-Bench, and your own best-of-k rows.

A row of data.benchmarks has one prompt and several completions, with the correct completions first (formats.parse_benchmark).
The reward model scores each completion alone. The benchmark's rule then compares the scores of a row.
"""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.formats import STYLED
from pipeline.run.parts import in_parts
from pipeline.run.worker import Worker
from pipeline.stages.pairs import metric_name, score_rows
from pipeline.statistics import mean, wilson_interval

# Columns that the benchmarks' rules read
FACTS = ("benchmark", "subset", "id", "pair", "correct", "completions")

Scores = dict[str, dict[str, float]]  # {level or subset: number of rows, score, ends of the 95 % interval}


@dataclass(frozen=True)
class Scored:
    """A row of a benchmark, with the scores of its completions. The first `correct` completions are correct."""

    row: dict[str, Any]
    scores: list[float]

    @property
    def good(self) -> list[float]:
        return self.scores[: self.row["correct"]]

    @property
    def bad(self) -> list[float]:
        return self.scores[self.row["correct"] :]


def measure_benchmarks(
    worker: Worker, rewards: list[Any], rows: Any, ends: Collection[int]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Scores the token rows of data.benchmarks with the weighted `rewards`. Returns (metrics, tables for evaluation.json).

    Leaves out a row of a benchmark if one of its completions was dropped.
    """
    if worker.rank == 0:
        print(f"scoring {len(rows)} completions of benchmarks", flush=True)

    def answer(numbers: range) -> Iterator[tuple[dict[str, Any], float]]:
        share = [dict(row) for row in rows.select(numbers)]
        scored = score_rows(rewards, share, numbers.start, worker.tokenizer, ends)
        for row, [score] in zip(share, scored, strict=True):
            data_row = json.loads(row["row"])
            yield {key: data_row[key] for key in FACTS if key in data_row}, score

    return benchmark_metrics(_grouped(in_parts(worker, "benchmarks-", len(rows), answer)))


def _grouped(scored: Iterable[tuple[dict[str, Any], float]]) -> list[Scored]:
    """Groups scored completions into the rows of a benchmark. Returns the rows that have scores for all their completions.

    Args:
        scored: (completion, its score), in order. A completion's `pair` is the completion's position in its row.
    """
    groups: list[Scored] = []
    for row, score in scored:
        if row["pair"] == 0:
            groups.append(Scored(row, []))
        if groups and row["pair"] == len(groups[-1].scores):
            groups[-1].scores.append(score)
    return [group for group in groups if len(group.scores) == group.row["completions"]]


def benchmark_metrics(rows: Sequence[Scored]) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns (metrics `eval_BENCHMARK` and `eval_BENCHMARK/SUBSET`, {benchmark: table})."""
    metrics: dict[str, float] = {}
    tables: dict[str, Any] = {}
    by_name: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        by_name[row.row["benchmark"]].append(row)
    for name, group in by_name.items():
        levels, subsets = BENCHMARKS[name](group)
        overall = levels["all"]
        metrics[f"eval_{name}"] = overall["score"]
        metrics |= {f"eval_{name}_{end}": overall[end] for end in ("low", "high") if end in overall}
        metrics |= {f"eval_{name}_{key}": entry["score"] for key, entry in levels.items() if key != "all"}
        metrics |= {f"eval_{name}/{metric_name(key)}": entry["score"] for key, entry in subsets.items()}
        tables[name] = {"rows": len(group), "score": overall["score"], "levels": levels, "subsets": subsets}
    return metrics, tables


# ------------------------------------------------------------------------------------------------ rules


def best_of(row: Scored) -> float:
    """Returns the share of correct completions among the completions with the highest score. Without ties, this is 0 or 1.

    RewardBench 2 uses this rule if only one completion is correct (https://arxiv.org/abs/2506.01937).
    """
    largest = max(row.scores)
    return row.good.count(largest) / row.scores.count(largest)


def ties_score(rows: Sequence[Scored]) -> float:
    """Returns RewardBench 2's score on its subset Ties. Any correct completion may win, and correct scores should be close.

    D is the range of the correct scores, and G the gap between the lowest correct and the highest wrong score. The result is
    0.30 accuracy with several correct answers + 0.30 accuracy of their reference rows + 0.20 share of G > D + 0.20 share of
    min(G, G of the reference) > D + 0.01 mean tanh(min(G, G of the reference) / D - 1).
    """
    by_kind: dict[str, dict[str, Scored]] = {"ref": {}, "tied": {}}
    for row in rows:
        kind, _, number = str(row.row["id"]).partition(":")
        by_kind.setdefault(kind, {})[number] = row
    ref, tied = by_kind["ref"], by_kind["tied"]
    if unpaired := sorted(ref.keys() ^ tied.keys()):
        print(
            f"warning: Ties: {len(unpaired)} rows have no partner (a `ref:` row needs a `tied:` row, and the reverse); the first is {unpaired[0]}",
            flush=True,
        )
    correct = {kind: [_gap(row) > 0 for row in group.values()] for kind, group in by_kind.items()}
    keys = sorted(ref.keys() & tied.keys())
    spread = [max(tied[key].good) - min(tied[key].good) for key in keys]
    gap = [_gap(tied[key]) for key in keys]
    least = [min(_gap(ref[key]), _gap(tied[key])) for key in keys]
    # If D is 0, the quotient is infinite with the sign of `low`. As in RewardBench 2, 0 / 0 is 0.
    margins = [
        math.tanh(low / d - 1) if d else (low > 0) - (low < 0) for low, d in zip(least, spread, strict=True)
    ]
    return (
        0.30 * _mean(correct["tied"])
        + 0.30 * _mean(correct["ref"])
        + 0.20 * _mean([g > d for g, d in zip(gap, spread, strict=True)])
        + 0.20 * _mean([low > d for low, d in zip(least, spread, strict=True)])
        + 0.01 * _mean(margins)
    )


def _gap(row: Scored) -> float:
    return min(row.good) - max(row.bad)


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else 0.0


def _best_of_k(rows: list[Scored]) -> tuple[Scores, Scores]:
    """Scores RewardBench 2 and your own best-of-k rows. The score is the mean over the subsets."""
    subsets = _by_subset(rows, [best_of(row) for row in rows])
    # RewardBench 2's subset with several correct completions is called `Ties` or `ties` in its files.
    for name in [name for name in subsets if name.lower() == "ties"]:
        ties = [row for row in rows if str(row.row["subset"]) == name]
        subsets[name] = {"rows": len(ties), "score": ties_score(ties)}
    score = mean([entry["score"] for entry in subsets.values()])
    return {"all": {"rows": len(rows), "score": score}}, subsets


def _rm_bench(rows: list[Scored]) -> tuple[Scores, Scores]:
    """Scores RM-Bench (https://arxiv.org/abs/2410.16184).

    Entry (i, j) compares the correct completion in style i with the wrong completion in style j. `hard` is the upper triangle,
    where wrong completions are longer and have more markdown. `normal` is the diagonal.
    """
    wins = [[[float(good > bad) for bad in row.bad] for good in row.good] for row in rows]
    means = [mean([mean(line) for line in matrix]) for matrix in wins]
    levels = {"all": _share(means)}
    cells = [(i, j) for i in range(STYLED) for j in range(STYLED)]
    for level, belongs in {"hard": operator.lt, "normal": operator.eq, "easy": operator.gt}.items():
        score = mean([matrix[i][j] for matrix in wins for i, j in cells if belongs(i, j)])
        levels[level] = {"rows": len(rows), "score": score}
    return levels, _by_subset(rows, means)


def _by_subset(rows: Sequence[Scored], values: Sequence[float]) -> Scores:
    groups: dict[str, list[float]] = defaultdict(list)
    for row, value in zip(rows, values, strict=True):
        groups[str(row.row["subset"])].append(value)
    return {name: _share(groups[name]) for name in sorted(groups)}


def _share(values: Sequence[float]) -> dict[str, float]:
    low, high = wilson_interval(values)
    return {"rows": len(values), "score": mean(values), "low": low, "high": high}


# {name: f(rows) -> (scores of `all` and of other levels, scores of the subsets)}
BENCHMARKS: dict[str, Callable[[list[Scored]], tuple[Scores, Scores]]] = {
    "reward_bench_2": _best_of_k,
    "best_of_k": _best_of_k,
    "rm_bench": _rm_bench,
}
