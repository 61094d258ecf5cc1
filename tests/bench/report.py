"""bench.md: the tables of what was measured."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from score import GOALS
from sizes import SIZES
from variants import CASES, PHASES

GIB = 2**30
Runs = dict[str, list[dict[str, Any]]]  # what was measured -> a measurement of each round
ABOUT = {
    "toy": "a random Llama of two layers, which shows nothing",
    "demo": "the demo's model of 0.8 M parameters",
    "large": "a random Llama of 110 M parameters with a vocabulary of 32,000",
}
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
"TRL's settings": Adam epsilon 1e-8 where ours is 1e-5, and gradients not clipped."""


EVALUATE_LEGEND = """\
Scores of preference pairs by a random reward adapter, from token rows to metrics, beside the forwards alone through
transformers and peft: the same completions, sorted by length, in batches of the same number. Our two completions of a pair share
the forward of their prompt."""

SERVE_LEGEND = """\
64 clients over HTTP, half of them of one policy and half of another, on one base (a replica with one CPU; proxy and clients on
the same machine), beside transformers' generate on merged models, one request after the other, without HTTP. Completions of
equally many tokens on both sides, sampled at temperature 1. Memory: of the replica
before the first request, without its KV cache, and of the process with two models."""


def render(results: list[dict[str, Any]]) -> str:
    order = {
        name: i
        for i, name in enumerate(
            ["ppo", "score", "sft", "rm", "dpo", "evaluate", "serve", *SIZES, *CASES, ""]
        )
    }
    results = sorted(results, key=lambda r: (order[r["part"]], order[r["size"]], order[r["case"]]))
    ppo = [r for r in results if r["part"] == "ppo"]
    scores = [r for r in results if r["part"] == "score"]
    stages = [r for r in results if r["part"] in ("sft", "rm", "dpo")]
    evaluated = [r for r in results if r["part"] == "evaluate"]
    served = [r for r in results if r["part"] == "serve"]
    lines = ["# Measured beside TRL", "", *machines(results)]
    for size in dict.fromkeys(r["size"] for r in ppo):
        lines += ppo_section(size, [r for r in ppo if r["size"] == size])
    if scores:
        head = "model | ours | goal | updates, each seed | TRL 1.12 | samples, mean | TRL 1.12 | ratio | at KL | score | TRL 1.12"
        lines += ["", "## PPO on a Python reward", "", *SCORE_LEGEND.splitlines(), ""]
        lines += table(head, (score_row(r, row) for r in scores for row in r["rows"]))
    if stages:
        head = "stage | model | s/step | bare TRL 1.16 | ratio | peak GiB | bare | ratio | first step s | bare | later by"
        lines += ["", "## sft, rm, dpo", ""]
        lines += table(head, (stage_row(r, row) for r in stages for row in r["rows"]))
    if evaluated:
        head = "model | s/pair | plain forwards | ratio | peak GiB | plain | ratio"
        lines += ["", "## evaluate", "", *EVALUATE_LEGEND.splitlines(), ""]
        lines += table(head, (stage_row(r, row)[1:8] for r in evaluated for row in r["rows"]))
    if served:
        head = "model | measured | tokens/s | plain loop | times as fast | errors | private GiB | two models | ratio"
        lines += ["", "## serve", "", *SERVE_LEGEND.splitlines(), ""]
        lines += table(head, (serve_row(r, row) for r in served for row in r["rows"]))
    lines += against_sft(results)
    return "\n".join(lines) + "\n"


def machines(results: list[dict[str, Any]]) -> list[str]:
    """When and where it was measured, and how busy that machine was."""
    lines = []
    for result in results:
        machine = result["machine"]
        rounds = len(next(iter(result["runs"].values())))
        what = " ".join(filter(None, [result["part"], result["size"], result["case"]]))
        load = " to ".join(f"{f(machine['load']):.1f}" for f in (min, max))
        lines.append(
            f"- {what}: {machine['date']}, {machine['cpu']}, {machine['threads']} threads, {rounds} rounds, load average {load}"
        )
    return lines


# --------------------------------------------------------------------------------------------------- ppo


def ppo_section(size: str, results: list[dict[str, Any]]) -> list[str]:
    here = SIZES[size]
    about = f"{ABOUT[size]}; {here.prompts} completions an update, of at most {here.new_tokens} tokens"
    if here.prompt_tokens:
        about += f"; prompts of {here.prompt_tokens} tokens (long ones: {here.long_prompt_tokens})"
    about += f"; shared prompts have {here.generations} completions each"
    lines = ["", f"## PPO, `{size}`", "", f"{about[0].upper()}{about[1:]}.", ""]
    lines += LEGEND.format(together=here.together, minibatch=here.prompts // 2).splitlines()
    matmul = results[-1]["machine"]["matmul"]
    lines += ["", f"On this processor the pipeline computes {matmul['why']}."]
    lines += [
        "So TRL multiplies alike in all rows, and there are no `matmul` rows."
        if matmul["precision"] == "highest"
        else "TRL does so in the `matmul` rows alone."
    ]
    for result in results:
        head = "variant | ours | beside | samples/s | beside | times as fast | peak GiB | beside | ratio | first update s | beside"
        lines += ["", f"### {CASES[result['case']].capitalize()}", ""]
        lines += table(head, (ppo_row(result, row) for row in result["rows"]))
        lines += ["", "Seconds of an update, by phase:", ""]
        head = f"measured | mean length | {' | '.join(PHASES)} | all"
        lines += table(head, (phase_row(name, runs) for name, runs in result["runs"].items()))
        lines += head_by_adapter(result)
    return [*lines, "", *PHASE_LEGEND.splitlines()]


def ppo_row(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    speed = cells(result, row, "step", "speed", lambda seconds: result["samples"] / seconds)
    peak = cells(result, row, "peak", "peak", lambda size: size / GIB)
    first = cells(result, row, "first_step", "later", float)[:2]
    return [f"`{row['variant']}`", row["ours"], row["beside"] or "-", *speed, *peak, *first]


def phase_row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Medians over all updates of all rounds, the warm-ups left out."""
    length = statistics.mean(length for run in runs for length in run["lengths"][1:])
    seconds = [phase_seconds(runs, phase) for phase in PHASES]
    return [name, f"{length:.1f}", *(f"{s:.3g}" for s in seconds), f"{middle(runs, 'step'):.3g}"]


def phase_seconds(runs: list[dict[str, Any]], phase: str) -> float:
    return statistics.median(update[phase] for run in runs for update in run["phases"])


def head_by_adapter(result: dict[str, Any]) -> list[str]:
    """The phase `update` of a critic that is a head by that of one that is an adapter, in fp32: the median of the rounds."""
    runs = {row["variant"]: result["runs"][row["ours"]] for row in result["rows"]}
    if not {"head", "adapter"} <= runs.keys():
        return []
    quotients = [
        phase_seconds([head], "update") / phase_seconds([adapter], "update")
        for head, adapter in zip(runs["head"], runs["adapter"], strict=True)
    ]
    return [
        "",
        f"Phase *update* with `critic: head` by that with `critic: adapter`: {statistics.median(quotients):.2f}.",
    ]


# ------------------------------------------------------------------------------------------ the other parts


def score_row(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Updates of each seed; means over the seeds of the samples until the goal and of the score at equal KL."""
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


def stage_row(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    step = cells(result, row, "step", "step", float)
    peak = cells(result, row, "peak", "peak", lambda size: size / GIB)
    first = cells(result, row, "first_step", "later", float)
    return [result["part"], result["size"], *step, *peak, *first]


def serve_row(result: dict[str, Any], row: dict[str, Any]) -> list[str]:
    speed = cells(result, row, "step", "speed", lambda seconds: 1 / seconds)
    peak = cells(result, row, "peak", "peak", lambda size: size / GIB)
    errors = sum(run["errors"] for run in result["runs"][row["ours"]])
    return [result["size"], row["ours"], *speed, f"{errors}", *peak]


def against_sft(results: list[dict[str, Any]]) -> list[str]:
    """PPO's peak by that of sft: the same model, rows of equally many tokens."""
    found = {(r["part"], r["size"], r["case"]): r for r in results}
    ppo, sft = found.get(("ppo", "large", "full")), found.get(("sft", "large", ""))
    row = next((row for row in ppo["rows"] if row["variant"] == "head"), None) if ppo else None
    if not (ppo and sft and row):
        return []
    ratio = middle(ppo["runs"][row["ours"]], "peak") / middle(sft["runs"]["ours"], "peak")
    return [
        "",
        f"Peak memory of PPO ({SIZES['large'].together} rows of 128 tokens at a time) by that of our sft "
        f"({SIZES['large'].rows} rows), `large`: {ratio:.2f}.",
    ]


# ------------------------------------------------------------------------------------------------- helpers


def ratios(runs: Runs, ours: str, beside: str | None) -> dict[str, float]:
    """Medians over the rounds: ours by the other, and how much later our first step ends (seconds)."""
    if beside is None or "step" not in runs[ours][0]:
        return {}
    pairs = list(zip(runs[ours], runs[beside], strict=True))
    found = {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in ("step", "peak")}
    found["speed"] = statistics.median(b["step"] / a["step"] for a, b in pairs)
    found["later"] = statistics.median(a["first_step"] - b["first_step"] for a, b in pairs)
    return found


def table(head: str, rows: Iterable[list[str]]) -> list[str]:
    width = head.count("|") + 1
    return [f"| {head} |", "|" + " --- |" * width, *(f"| {' | '.join(row)} |" for row in rows)]


def cells(
    result: dict[str, Any], row: dict[str, Any], key: str, ratio: str, scale: Callable[[float], float]
) -> list[str]:
    """Ours, the other's and their ratio; dashes where the other was not measured."""
    ours = f"{scale(middle(result['runs'][row['ours']], key)):.3g}"
    if row["beside"] is None:
        return [ours, "-", "-"]
    return [ours, f"{scale(middle(result['runs'][row['beside']], key)):.3g}", f"{row['ratios'][ratio]:.2f}"]


def middle(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)
