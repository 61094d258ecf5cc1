"""What our PPO and our stages cost beside TRL's, measured on this machine, side by side, as ratios.

    make bench                                  everything, at both sizes
    make bench ARGS="ppo --size demo"           one part at one size
    make bench ARGS="score --rounds 3"          does it learn as fast, in samples
    make bench ARGS="sft dpo --rounds 1"

Parts: `ppo` (our PPOTrainer against the one of TRL 1.12, the last that had one), `score` (both on a Python reward: samples
until a score is reached, and the score at equal KL; a round is a seed), `sft`, `rm`, `dpo` (the pipeline's command line
against bare TRL). Sizes: `demo` (the demo model) and `large` (a random Llama of 110 M parameters with a
vocabulary of 32,000). Each measurement is a process of its own; ours and theirs take turns, and the ratio is the median
of the rounds' ratios. Writes bench.json and bench.md into runs/bench; parts that were not run keep their last figures.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from score import GOALS, reached, score_at
from sizes import ROOT, SIZES, TRL_PPO, WORK, prepare

PARTS = ("ppo", "score", "sft", "rm", "dpo")
CASES = {"full": "full length", "own": "own length"}  # of PPO's completions
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["demo", "large"])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=WORK)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for size in options.size:
        prepare(size)
        for part in options.parts or PARTS:
            for case in CASES if part == "ppo" else [""]:
                if part == "score" and size not in GOALS:
                    continue
                measured = learn if part == "score" else compare
                result = measured(part, size, case, options.rounds, options.threads, options.out)
                keep(options.out / "bench.json", result)
    results = json.loads((options.out / "bench.json").read_text())
    report = render(results)
    (options.out / "bench.md").write_text(report)
    print(report)
    print(f"written: {options.out / 'bench.md'}, {options.out / 'bench.json'}")


# ----------------------------------------------------------------------------------------------- measuring


def compare(part: str, size: str, case: str, rounds: int, threads: int, out: Path) -> dict[str, Any]:
    """Ours and theirs, in turns."""
    if part == "ppo":
        commands = {"ours": ["ppo_ours.py", size, case], "theirs": ["ppo_trl.py", size, case]}
    else:
        commands = {"ours": ["stage_ours.py", part, size], "theirs": ["stage_bare.py", part, size]}
    if part == "ppo" and not TRL_PPO.is_dir():
        print("TRL 1.12 is not installed; `make bench` installs it: ours alone is measured", flush=True)
        del commands["theirs"]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in commands}
    load = [os.getloadavg()[0]]
    for round_ in range(rounds):
        for side, command in commands.items():
            name = "-".join(filter(None, [part, size, case, side, str(round_)]))
            found = measure(command, threads, out, name)
            runs[side].append(found)
            print(
                f"{name:<28} {found['step']:8.3f} s a step  first after {found['first_step']:6.1f} s  "
                f"peak {found['peak'] / GIB:.2f} GiB",
                flush=True,
            )
    load.append(os.getloadavg()[0])
    return {
        "part": part,
        "size": size,
        "case": case,
        "samples": samples_of(part, size),
        **{
            side: {key: middle(found, key) for key in ("step", "first_step", "peak")}
            for side, found in runs.items()
        },
        "ratios": ratios(runs),
        "runs": runs,
        "machine": {"cpu": processor(), "threads": threads, "load": load, "date": time.strftime("%Y-%m-%d")},
    }


def learn(part: str, size: str, case: str, rounds: int, threads: int, out: Path) -> dict[str, Any]:
    """The curves of score and KL, ours and theirs, of one seed a round."""
    commands = {"ours": "score_ours.py", "theirs": "score_trl.py"}
    if not TRL_PPO.is_dir():
        print("TRL 1.12 is not installed; `make bench` installs it: ours alone is measured", flush=True)
        del commands["theirs"]
    goal, load = GOALS[size], [os.getloadavg()[0]]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in commands}
    for seed in range(1, rounds + 1):
        for side, script in commands.items():
            name = "-".join([part, size, side, str(seed)])
            run = measure([script, size, str(seed)], threads, out, name)
            run |= {"updates": reached(run["curve"], goal.score), "score": score_at(run["curve"], goal.kl)}
            runs[side].append(run)
            print(
                f"{name:<28} score {goal.score} after {run['updates']} updates  at {goal.kl} nats {run['score']}",
                flush=True,
            )
    load.append(os.getloadavg()[0])
    machine = {"cpu": processor(), "threads": threads, "load": load, "date": time.strftime("%Y-%m-%d")}
    samples = samples_of("ppo", size)
    return {"part": part, "size": size, "case": case, "samples": samples, "runs": runs, "machine": machine}


def measure(command: list[str], threads: int, out: Path, name: str) -> dict[str, Any]:
    """One fresh process; what it wrote. Its output goes to a log, which is shown if it fails."""
    found, log = out / f"{name}.json", out / f"{name}.log"
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "BENCH_OUT": str(found),
        "BENCH_BEGIN": repr(time.time()),
    }
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(command[0])), *command[1:]],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(
            f"{log.read_text()[-4000:]}\nerror: {' '.join(command)} ended with {done.returncode}; see {log}"
        )
    result = json.loads(found.read_text())
    found.unlink()
    return result


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Medians over the rounds: ours by theirs, and how much later our first step ends (seconds)."""
    pairs = list(zip(runs["ours"], runs.get("theirs", []), strict=False))
    if not pairs:
        return {}
    found = {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in ("step", "peak")}
    found["speed"] = statistics.median(b["step"] / a["step"] for a, b in pairs)
    found["later"] = statistics.median(a["first_step"] - b["first_step"] for a, b in pairs)
    return found


def middle(found: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in found)


def samples_of(part: str, size: str) -> int:
    """Completions of a PPO update; rows of a step of sft, pairs of rm and dpo."""
    here = SIZES[size]
    return {"ppo": here.prompts, "sft": here.rows}.get(part, here.rows // 2)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


def keep(path: Path, result: dict[str, Any]) -> None:
    """Adds a result to those of earlier runs; a newer one of the same thing takes its place."""
    results = json.loads(path.read_text()) if path.exists() else []
    identity = ("part", "size", "case")
    results = [r for r in results if any(r[key] != result[key] for key in identity)] + [result]
    path.write_text(json.dumps(results, indent=1))


# ----------------------------------------------------------------------------------------------- the report


def render(results: list[dict[str, Any]]) -> str:
    order = {name: i for i, name in enumerate([*PARTS, *SIZES, *CASES, ""])}
    results = sorted(results, key=lambda r: (order[r["part"]], order[r["size"]], order[r["case"]]))
    ppo = [r for r in results if r["part"] == "ppo"]
    scores = [r for r in results if r["part"] == "score"]
    stages = [r for r in results if r["part"] not in ("ppo", "score")]
    lines = ["# Measured beside TRL", "", *machines(results)]
    if ppo:
        head = "model | completions | samples/s | TRL 1.12 | ratio | peak GiB | TRL 1.12 | ratio | first update s | TRL 1.12"
        lines += ["", "## PPO", "", *table(head, map(ppo_row, ppo))]
        lines += ["", "Seconds of each phase of our update:", ""]
        lines += table(
            "model | completions | mean length | rollout | score | values | update", map(phase_row, ppo)
        )
    if scores:
        head = "model | goal | updates, each seed | TRL 1.12 | samples, mean | TRL 1.12 | ratio | at KL | score | TRL 1.12"
        lines += ["", "## PPO on a Python reward", "", *table(head, map(score_row, scores))]
    if stages:
        head = "stage | model | s/step | bare TRL 1.16 | ratio | peak GiB | bare | ratio | first step s | bare | later by"
        lines += ["", "## sft, rm, dpo", "", *table(head, map(stage_row, stages))]
    lines += against_sft(results)
    return "\n".join(lines) + "\n"


def machines(results: list[dict[str, Any]]) -> list[str]:
    seen = []
    for result in results:
        machine = result["machine"]
        line = f"{machine['cpu']}, {machine['threads']} threads, {machine['date']}"
        if line not in seen:
            seen.append(line)
    loads = [load for result in results for load in result["machine"]["load"]]
    rounds = min(len(result["runs"]["ours"]) for result in results)
    return [f"{'; '.join(seen)}; load average {min(loads):.1f} to {max(loads):.1f}; {rounds} rounds or more."]


def table(head: str, rows: Any) -> list[str]:
    width = head.count("|") + 1
    return [f"| {head} |", "|" + " --- |" * width, *(f"| {' | '.join(row)} |" for row in rows)]


def cells(result: dict[str, Any], key: str, ratio: str, scale: Any) -> list[str]:
    """Ours, theirs and their ratio; dashes where TRL was not measured."""
    theirs = f"{scale(result['theirs'][key]):.3g}" if "theirs" in result else "-"
    value = f"{result['ratios'][ratio]:.2f}" if result["ratios"] else "-"
    return [f"{scale(result['ours'][key]):.3g}", theirs, value]


def ppo_row(result: dict[str, Any]) -> list[str]:
    speed = cells(result, "step", "speed", lambda seconds: result["samples"] / seconds)
    peak = cells(result, "peak", "peak", lambda size: size / GIB)
    first = cells(result, "first_step", "later", float)[:2]
    return [result["size"], CASES[result["case"]], *speed, *peak, *first]


def score_row(result: dict[str, Any]) -> list[str]:
    """Updates of each seed; means over the seeds of the samples until the goal and of the score at equal KL."""
    goal = GOALS[result["size"]]
    updates, samples, scores = [], [], []
    for side in ("ours", "theirs"):
        runs = result["runs"].get(side, [])
        found, at = [run["updates"] for run in runs], [run["score"] for run in runs]
        updates.append(", ".join("never" if n is None else f"{n:.0f}" for n in found) or "-")
        samples.append(result["samples"] * statistics.mean(found) if found and None not in found else None)
        scores.append(f"{statistics.mean(at):.2f}" if at and None not in at else "-")
    ours, theirs = samples
    ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
    counts = ["-" if n is None else f"{n:.0f}" for n in samples]
    return [result["size"], f"{goal.score:g}", *updates, *counts, ratio, f"{goal.kl:g}", *scores]


def phase_row(result: dict[str, Any]) -> list[str]:
    """Medians over all updates of all rounds, the warm-ups left out."""
    runs = result["runs"]["ours"]
    updates = [update for run in runs for update in run["phases"]]
    seconds = [
        statistics.median(u[f"time/{phase}"] for u in updates)
        for phase in ("rollout", "score", "values", "update")
    ]
    length = statistics.mean(length for run in runs for length in run["lengths"][1:])
    limit = SIZES[result["size"]].new_tokens
    return [result["size"], CASES[result["case"]], f"{length:.1f} of {limit}", *(f"{s:.3g}" for s in seconds)]


def stage_row(result: dict[str, Any]) -> list[str]:
    step = cells(result, "step", "step", float)
    peak = cells(result, "peak", "peak", lambda size: size / GIB)
    first = cells(result, "first_step", "later", float)
    return [result["part"], result["size"], *step, *peak, *first]


def against_sft(results: list[dict[str, Any]]) -> list[str]:
    """PPO's peak by that of sft: the same model, rows of equally many tokens."""
    peaks = {(r["part"], r["size"], r["case"]): r["ours"]["peak"] for r in results if "ours" in r}
    if not all(key in peaks for key in (("ppo", "large", "full"), ("sft", "large", ""))):
        return []
    ratio = peaks["ppo", "large", "full"] / peaks["sft", "large", ""]
    return [
        "",
        f"Peak memory of PPO ({SIZES['large'].together} rows of 128 tokens at a time) by that of our sft "
        f"({SIZES['large'].rows} rows), `large`: {ratio:.2f}.",
    ]


if __name__ == "__main__":
    main()
