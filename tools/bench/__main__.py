"""Compares speed and memory of our PPO, stages, evaluation, server and judges with other programs on this machine.

    make bench                                  everything, at both sizes
    make bench ARGS="ppo --size demo"           one part at one size
    make bench ARGS="ppo --variant bf16-head shared-long"
    make bench ARGS="sft dpo --rounds 1"

| part | what is measured | compared with |
| --- | --- | --- |
| ppo | our PPOTrainer, in the variants of sizes.py | the PPOTrainer of TRL 1.12, the last version that had one |
| sft, rm, dpo | the pipeline's command line | TRL alone |
| evaluate | a reward model on preference pairs | plain forwards |
| serve | 64 clients of two policies on one base | a plain loop over two models |
| judge | questions to an endpoint that answers after 100 ms, the same at each size | a plain asyncio loop |

Sizes: `demo` (the demo model) and `large` (a random Llama of 110M parameters).

Each measurement is a separate process. A round runs all measurements of a comparison once, one after the other. After each
round, results.json and bench.md in runs/bench have the results. Parts of the bench that were not run keep their last results.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import GIB, Runs, ratios, render
from sizes import CASES, ROOT, SIZES, TRL_PPO, VARIANTS, WORK

# part -> script, and name of the plain program to compare with
PLAIN = {
    **dict.fromkeys(("sft", "rm", "dpo"), ("stage.py", "bare TRL")),
    "evaluate": ("evaluate.py", "plain forwards"),
    "serve": ("serve.py", "plain loop"),
    "judge": ("judge.py", "plain asyncio loop"),
}
PARTS = ("ppo", *PLAIN)

Commands = dict[str, list[str]]  # name of a measurement -> its script and arguments
# Rows of the table: (our measurement, the measurement to compare it with).
Rows = list[tuple[str, str | None]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["demo", "large"])
    parser.add_argument(
        "--variant", nargs="+", choices=VARIANTS, default=["head", "adapter"], help="variants of ppo"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each program")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=WORK)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if not TRL_PPO.is_dir():
        print("note: TRL 1.12 is not installed, so only our PPO is measured; run `make bench`", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for size in options.size:
        SIZES[size].prepare()
        for part in options.parts or PARTS:
            for case, commands, rows in comparisons(part, size, options.variant):
                measure(options, {"part": part, "size": size, "case": case}, commands, rows)
    page = options.out / "bench.md"
    print(f"{page.read_text()}\nwritten: {page}, {options.out / 'results.json'}")


def comparisons(part: str, size: str, variants: list[str]) -> Iterator[tuple[str, Commands, Rows]]:
    """Yields (case, commands, rows of the table) for each group of measurements that run in the same rounds."""
    if part == "ppo":
        for case in CASES:
            commands, rows = {}, []
            for ours, theirs in map(VARIANTS.__getitem__, variants):
                programs = [one for one in (ours, theirs) if not one.trl or TRL_PPO.is_dir()]
                for one in programs:
                    script = "ppo_trl.py" if one.trl else "ppo_ours.py"
                    commands[str(one)] = [script, size, case, json.dumps(asdict(one))]
                rows.append((str(ours), str(theirs) if theirs in programs else None))
            yield case, commands, rows
        return
    script, plain = PLAIN[part]
    commands = {"ours": [script, "ours", size, part]}
    if part == "serve" and importlib.util.find_spec("vllm"):
        commands["ours, vLLM"] = [*commands["ours"], "rollout.engine=vllm"]
    yield "", commands | {plain: [script, "plain", size, part]}, [(name, plain) for name in commands]


def measure(options: argparse.Namespace, what: dict[str, str], commands: Commands, rows: Rows) -> None:
    """Runs all commands in each round. After each round, writes the results of all rounds so far."""
    runs: Runs = {name: [] for name in commands}
    load = os.getloadavg()[0]
    for round_ in range(options.rounds):
        for name, command in commands.items():
            title = "-".join([*what.values(), name, str(round_)])
            runs[name].append(run(options, title, command))
        found = [{"ours": a, "other": b, "ratios": ratios(runs, a, b)} for a, b in rows]
        here = {"cpu": processor(), "threads": options.threads, "date": time.strftime("%Y-%m-%d")}
        here["load"] = [load, os.getloadavg()[0]]
        units = SIZES[what["size"]].prompts if what["part"] == "ppo" else 1  # number of samples per update
        keep(options.out, what, {"units": units, "rows": found, "runs": runs, "machine": here})


def run(options: argparse.Namespace, title: str, command: list[str]) -> dict[str, Any]:
    """Runs a measurement in a new process and returns its result. If the process fails, prints the log of its output."""
    name = re.sub(r"[^a-z0-9.]+", "-", title.lower())
    found, log = options.out / f"{name}.json", options.out / f"{name}.log"
    print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "BENCH_OUT": str(found),
        "BENCH_BEGIN": repr(time.time()),
    }
    command = [sys.executable, str(Path(__file__).with_name(command[0])), *command[1:]]
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        said = log.read_text()[-4000:]
        sys.exit(f"{said}\nerror: {' '.join(command)} ended with {done.returncode}; see {log}")
    result = json.loads(found.read_text())
    found.unlink()
    step, first, peak = result["step"], result["first_step"], result["peak"] / GIB
    print(f"  {step:8.3f} s a step  first after {first:6.1f} s  peak {peak:.2f} GiB", flush=True)
    return result


def keep(out: Path, what: dict[str, str], result: dict[str, Any]) -> None:
    """Adds a result to the results of other parts. Replaces an earlier result of the same measurement."""
    path = out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else []
    results = [one for one in results if not what.items() <= one.items()] + [what | result]
    path.write_text(json.dumps(results, indent=1))
    (out / "bench.md").write_text(render(results))


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


if __name__ == "__main__":
    main()
