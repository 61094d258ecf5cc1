"""Writes bench.md: a row for each comparison, and the time of each phase of our PPO."""

import statistics
from collections.abc import Iterable
from typing import Any

from sizes import CASES, PHASES

GIB = 2**30
Result = dict[str, Any]
Runs = dict[str, list[Result]]  # name of a measurement -> its result in each round
LEGEND = f"""
Each row compares a program of ours with another one. Each round ran both, one after the other. Numbers are medians over the
rounds; *speedup*, *ratio* and *later* are medians of the ratios and differences in each round. Units are samples of `ppo`,
steps of `sft`, `rm` and `dpo`, pairs of `evaluate`, tokens of `serve`, and questions of `judge`. *first s* is the time from the
start of the process to the end of its first step.

`ppo` {", ".join(f"`{case}`: {about}" for case, about in CASES.items())}. Both programs use LoRA of rank 16 on all linear layers,
2 epochs of 2 minibatches, temperature 1, and equal learning rate, KL coefficient, clip ranges, gamma and lambda. Ours has one
base with adapters, Adam's epsilon at 1e-5, and clips gradients to norm 1. TRL has three models, trains all weights of the critic,
has an epsilon of 1e-8, and does not clip gradients. In bf16, our base is in bf16, and its adapters, heads and losses are in fp32.
TRL has all its models in bf16, as with `accelerate launch --mixed_precision bf16`.

`evaluate` is compared with the forward passes alone, in batches of the same number, sorted by length. `serve`: half of the clients use one policy and half another, over HTTP on the same machine. The plain loop generates with merged
models, one request after the other. The memory is that of a replica before its first request, and of the process with two models.
"""
HEAD = "part | model | ours | other | units/s | other | speedup | peak GiB | other | ratio | first s | other | later"


def render(results: list[Result]) -> str:
    """Returns the Markdown page: for each result, the machine and a table."""
    lines = ["# Bench", "", *map(machine, results), *LEGEND.split("\n")]
    lines += table(HEAD, (cells(result, row) for result in results for row in result["rows"]))
    phases = [
        [part_of(result), result["size"], name, *phase_cells(runs)]
        for result in results
        for name, runs in result["runs"].items()
        if "phases" in runs[0]
    ]
    if phases:
        lines += ["", "Seconds of an update, by phase:", ""]
        lines += table(f"part | model | measured | mean length | {' | '.join(PHASES)}", phases)
    return "\n".join(lines) + "\n"


def part_of(result: Result) -> str:
    return f"{result['part']} {result['case']}".strip()


def machine(result: Result) -> str:
    """Returns a line with a result's date and machine, and the machine's load average."""
    here, rounds = result["machine"], len(next(iter(result["runs"].values())))
    load = f"load average {min(here['load']):.1f} to {max(here['load']):.1f}"
    what = f"{part_of(result)} {result['size']}"
    return f"- {what}: {here['date']}, {here['cpu']}, {here['threads']} threads, {rounds} rounds, {load}"


def table(head: str, rows: Iterable[list[str]]) -> list[str]:
    width = head.count("|") + 1
    return [f"| {head} |", "|" + " --- |" * width, *(f"| {' | '.join(row)} |" for row in rows)]


def cells(result: Result, row: Result) -> list[str]:
    """Returns the table cells of a comparison, with dashes if the other program was not measured."""
    scales = {"step": lambda s: result["units"] / s, "peak": lambda size: size / GIB, "first_step": float}
    found = [part_of(result), result["size"], row["ours"], row["other"] or "-"]
    for (key, scale), ratio in zip(scales.items(), ("speed", "peak", "later"), strict=True):
        for side in (row["ours"], row["other"]):
            found.append(f"{scale(middle(result['runs'][side], key)):.3g}" if side else "-")
        found.append(f"{row['ratios'][ratio]:.2f}" if row["ratios"] else "-")
    return found


def phase_cells(runs: list[Result]) -> list[str]:
    """Returns the mean length of completions, and median phase times over the updates of all rounds except warmups."""
    length = statistics.mean(length for run in runs for length in run["lengths"][1:])
    updates = [update for run in runs for update in run["phases"]]
    return [f"{length:.1f}", *(f"{statistics.median(one[phase] for one in updates):.3g}" for phase in PHASES)]


def ratios(runs: Runs, ours: str, other: str | None) -> dict[str, float]:
    """Returns medians over the rounds: the ratios of speed and of peak memory, and the delay of our first step in seconds."""
    if other is None:
        return {}
    pairs = list(zip(runs[ours], runs[other], strict=True))
    return {
        "speed": statistics.median(b["step"] / a["step"] for a, b in pairs),
        "peak": statistics.median(a["peak"] / b["peak"] for a, b in pairs),
        "later": statistics.median(a["first_step"] - b["first_step"] for a, b in pairs),
    }


def middle(runs: list[Result], key: str) -> float:
    return statistics.median(run[key] for run in runs)
