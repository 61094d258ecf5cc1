"""bench.md: the tables of what was measured."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from sizes import SIZES
from variants import CASES, GOALS, PHASES

GIB = 2**30
Result = dict[str, Any]
Runs = dict[str, list[Result]]  # what was measured -> a measurement of each round
LEGEND = """\
One row is a setting of our PPO and what it was measured beside, in each round one after the other; *times as fast* is the
median over the rounds of the quotient of both times. Settings are the same on both sides: LoRA of rank 16 on all linear
layers, 2 epochs of 2 minibatches, no gradient checkpointing, temperature 1, learning rate, KL price, clip ranges, gamma and
lambda. What differs:

| setting | ours | ours in `like-trl` | TRL 1.12 |
| --- | --- | --- | --- |
| rows of one forward and backward | {together}; {minibatch} in `shared` rows, on both sides | {minibatch}, the minibatch | {minibatch}, the minibatch |
| Adam epsilon | 1e-5 | 1e-8 | 1e-8 |
| gradients clipped to norm | 1, policy and critic apart | not clipped | not clipped |
| models in memory | one base with adapters | one base with adapters | policy, reward and value model |
| critic | head or adapter | adapter | all weights of a model |

In bf16 our base is in bf16, adapters, heads and losses are in fp32. TRL has all its models in bf16, the value model that
it trains included, and runs as under `accelerate launch --mixed_precision bf16`, which is faster than with weights in fp32."""
PHASE_LEGEND = """\
*rollout* samples the completions; *score* is the reward model's pass; *values* are the passes for the log-probs of policy
(TRL takes those of sampling) and reference and for the values; *update* is forward and backward of all epochs, and of TRL all
that is left."""

SCORE_LEGEND = """\
The reward counts kind words; a run ends after the same number of updates on both sides. *updates* and *samples* until the
mean score of an update reaches the goal, and the score where the KL to the reference reaches a given number of nats.
"TRL's settings": Adam epsilon 1e-8 where ours is 1e-5, and gradients not clipped.
"""
EVALUATE_LEGEND = """\
Scores of preference pairs by a random reward adapter, from token rows to metrics, beside the forwards alone through
transformers and peft: the same completions, sorted by length, in batches of the same number. Our two completions of a pair share
the forward of their prompt.
"""
SERVE_LEGEND = """\
64 clients over HTTP, half of them of one policy and half of another, on one base (a replica with one CPU; proxy and clients on
the same machine), beside transformers' generate on merged models, one request after the other, without HTTP. Completions of
equally many tokens on both sides, sampled at temperature 1. Memory: of the replica
before the first request, without its KV cache, and of the process with two models.
"""


def render(results: list[Result]) -> str:
    """Returns the page: the machine of each result, the sections of PPO, one table for each of TABLES."""
    parts = ["ppo", *(part for _, those, *_ in TABLES for part in those)]
    order = {name: i for i, name in enumerate([*parts, *SIZES, *CASES, ""])}
    results = sorted(results, key=lambda r: (order[r["part"]], order[r["size"]], order[r["case"]]))
    lines = ["# Measured beside TRL", "", *map(machine, results)]
    ppo = [r for r in results if r["part"] == "ppo"]
    for size in dict.fromkeys(r["size"] for r in ppo):
        lines += ppo_section(size, [r for r in ppo if r["size"] == size])
    for title, those, legend, head, cells_of in TABLES:
        rows = [
            cells_of(result, row) for result in results if result["part"] in those for row in result["rows"]
        ]
        if rows:
            lines += ["", f"## {title}", "", *legend.split("\n"), *table(head, rows)]
    return "\n".join(lines) + "\n"


def machine(result: Result) -> str:
    """Says when and where a result was measured, and how busy that machine was."""
    here, rounds = result["machine"], len(next(iter(result["runs"].values())))
    what = " ".join(filter(None, [result["part"], result["size"], result["case"]]))
    load = f"load average {min(here['load']):.1f} to {max(here['load']):.1f}"
    return f"- {what}: {here['date']}, {here['cpu']}, {here['threads']} threads, {rounds} rounds, {load}"


def table(head: str, rows: Iterable[list[str]]) -> list[str]:
    width = head.count("|") + 1
    return [f"| {head} |", "|" + " --- |" * width, *(f"| {' | '.join(row)} |" for row in rows)]


# --------------------------------------------------------------------------------------------------- ppo


def ppo_section(size: str, results: list[Result]) -> list[str]:
    here = SIZES[size]
    about = f"{here.about}; {here.prompts} completions an update, of at most {here.new_tokens} tokens"
    if here.prompt_tokens:
        about += f"; prompts of {here.prompt_tokens} tokens (long ones: {here.long_prompt_tokens})"
    about += f"; shared prompts have {here.generations} completions each"
    lines = ["", f"## PPO, `{size}`", "", f"{about[0].upper()}{about[1:]}.", ""]
    lines += LEGEND.format(together=here.together, minibatch=here.prompts // 2).splitlines()
    matmul = results[-1]["machine"]["matmul"]
    lines += ["", f"On this processor the pipeline computes {matmul['why']}."]
    if matmul["precision"] != "highest":
        lines.append("TRL does so in the `matmul` rows alone.")
    for result in results:
        head = "variant | ours | beside | samples/s | beside | times as fast | peak GiB | beside | ratio | first update s | beside"
        lines += ["", f"### {CASES[result['case']].capitalize()}", ""]
        lines += table(head, (ppo_row(result, row) for row in result["rows"]))
        lines += ["", "Seconds of an update, by phase:", ""]
        head = f"measured | mean length | {' | '.join(PHASES)} | all"
        lines += table(head, (phase_row(name, runs) for name, runs in result["runs"].items()))
    return [*lines, "", *PHASE_LEGEND.splitlines()]


def ppo_row(result: Result, row: Result) -> list[str]:
    speed = cells(result, row, "step", "speed", lambda seconds: result["samples"] / seconds)
    first = cells(result, row, "first_step", "later")[:2]
    return [f"`{row['variant']}`", row["ours"], row["beside"] or "-", *speed, *peak(result, row), *first]


def phase_row(name: str, runs: list[Result]) -> list[str]:
    """Returns medians over all updates of all rounds, the warm-ups left out."""
    length = statistics.mean(length for run in runs for length in run["lengths"][1:])
    updates = [update for run in runs for update in run["phases"]]
    seconds = [statistics.median(update[phase] for update in updates) for phase in PHASES]
    return [name, f"{length:.1f}", *(f"{s:.3g}" for s in seconds), f"{middle(runs, 'step'):.3g}"]


# ------------------------------------------------------------------------------------------ the other parts


def score_row(result: Result, row: Result) -> list[str]:
    """Returns the updates of each seed, and means over the seeds of the samples until the goal and the score at equal KL."""
    goal = GOALS[result["size"]]
    updates, samples, scores = [], [], []
    for side in (row["ours"], row["beside"]):
        runs = result["runs"].get(side, [])
        found, at = [run["updates"] for run in runs], [run["score"] for run in runs]
        updates.append(", ".join("never" if n is None else f"{n:.0f}" for n in found) or "-")
        samples.append(result["samples"] * statistics.mean(found) if found and None not in found else None)
        scores.append(f"{statistics.mean(at):.2f}" if at and None not in at else "-")
    ours, theirs = samples
    ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
    counts = ["-" if n is None else f"{n:.0f}" for n in samples]
    return [result["size"], row["ours"], f"{goal.score:g}", *updates, *counts, ratio, f"{goal.kl:g}", *scores]


def stage_row(result: Result, row: Result) -> list[str]:
    step, first = cells(result, row, "step", "step"), cells(result, row, "first_step", "later")
    return [result["part"], result["size"], *step, *peak(result, row), *first]


def serve_row(result: Result, row: Result) -> list[str]:
    speed = cells(result, row, "step", "speed", lambda seconds: 1 / seconds)
    errors = sum(run["errors"] for run in result["runs"][row["ours"]])
    return [result["size"], row["ours"], *speed, f"{errors}", *peak(result, row)]


# Title, parts, legend, head of the table, and what makes the cells of a row
TABLES: list[tuple[str, list[str], str, str, Callable[[Result, Result], list[str]]]] = [
    (
        "PPO on a Python reward",
        ["score"],
        SCORE_LEGEND,
        "model | ours | goal | updates, each seed | TRL 1.12 | samples, mean | TRL 1.12 | ratio | at KL | score | TRL 1.12",
        score_row,
    ),
    (
        "sft, rm, dpo",
        ["sft", "rm", "dpo"],
        "",
        "stage | model | s/step | bare TRL 1.16 | ratio | peak GiB | bare | ratio | first step s | bare | later by",
        stage_row,
    ),
    (
        "evaluate",
        ["evaluate"],
        EVALUATE_LEGEND,
        "model | s/pair | plain forwards | ratio | peak GiB | plain | ratio",
        lambda result, row: stage_row(result, row)[1:8],
    ),
    (
        "serve",
        ["serve"],
        SERVE_LEGEND,
        "model | measured | tokens/s | plain loop | times as fast | errors | private GiB | two models | ratio",
        serve_row,
    ),
]


# ------------------------------------------------------------------------------------------------- figures


def ratios(runs: Runs, ours: str, beside: str | None) -> dict[str, float]:
    """Returns medians over the rounds: ours by the other, and how much later our first step ends (seconds)."""
    if beside is None or "step" not in runs[ours][0]:
        return {}
    pairs = list(zip(runs[ours], runs[beside], strict=True))
    found = {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in ("step", "peak")}
    found["speed"] = statistics.median(b["step"] / a["step"] for a, b in pairs)
    found["later"] = statistics.median(a["first_step"] - b["first_step"] for a, b in pairs)
    return found


def cells(
    result: Result, row: Result, key: str, ratio: str, scale: Callable[[float], float] = float
) -> list[str]:
    """Returns ours, the other's and their ratio; dashes where the other was not measured."""
    ours = f"{scale(middle(result['runs'][row['ours']], key)):.3g}"
    if row["beside"] is None:
        return [ours, "-", "-"]
    return [ours, f"{scale(middle(result['runs'][row['beside']], key)):.3g}", f"{row['ratios'][ratio]:.2f}"]


def peak(result: Result, row: Result) -> list[str]:
    return cells(result, row, "peak", "peak", lambda size: size / GIB)


def middle(runs: list[Result], key: str) -> float:
    return statistics.median(run[key] for run in runs)
