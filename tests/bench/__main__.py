"""What our PPO and our stages cost beside TRL's, measured on this machine, side by side, as ratios.

    make bench                                  everything, at both sizes
    make bench ARGS="ppo --size demo"           one part at one size
    make bench ARGS="ppo --variant head bf16-head --length own"
    make bench ARGS="score --rounds 3"          does it learn as fast, in samples
    make bench ARGS="sft dpo --rounds 1"

Parts: `ppo` (our PPOTrainer against the one of TRL 1.12, the last that had one), `score` (both on a Python reward: samples
until a score is reached, and the score at equal KL; a round is a seed), `sft`, `rm`, `dpo` (the pipeline's command line
against bare TRL), `evaluate` (a reward model on pairs against plain forwards), `serve` (64 clients of two policies on one base
against a plain loop over two models). Sizes: `demo` (the demo model) and `large` (a random Llama of 110 M parameters with a
vocabulary of 32,000). Variants of `ppo`: variants.py.
Each measurement is a process of its own. A round measures everything that is compared once, one after the other; a ratio is
the median of the rounds' ratios. Writes bench.json and bench.md into runs/bench after each round; parts that were not run
keep their last figures.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import GIB, Runs, ratios, render
from sizes import ROOT, SIZES, TRL_PPO, WORK
from variants import CASES, GOALS, LEARNERS, VARIANTS, Ours, chosen

PARTS = ("ppo", "score", "sft", "rm", "dpo", "evaluate", "serve")
# script of a part that is compared with a plain program, and the name of that program
PLAIN = {
    **dict.fromkeys(("sft", "rm", "dpo"), ("stage.py", "bare TRL")),
    "evaluate": ("evaluate.py", "plain forwards"),
    "serve": ("serve.py", "plain loop"),
}

Commands = dict[str, list[str]]  # what is measured -> script and arguments
Rows = list[tuple[str, str, str | None]]  # of the table: variant, ours, and what it was measured beside


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="default: all")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["demo", "large"])
    parser.add_argument(
        "--variant", nargs="+", choices=VARIANTS, help="rows of ppo; default: see variants.py"
    )
    parser.add_argument(
        "--length", nargs="+", choices=CASES, default=list(CASES), help="of ppo's completions"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=WORK)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if not TRL_PPO.is_dir():
        print("TRL 1.12 is not installed; `make bench` installs it: ours alone is measured", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    for size in options.size:
        SIZES[size].prepare()
        for part in options.parts or PARTS:
            if part == "ppo":
                bench.ppo(size)
            elif part != "score" or size in GOALS:
                bench.compare(part, size, *compared(part, size))
    page = options.out / "bench.md"
    if not page.exists():
        parser.error("nothing of this is measured at this size")
    print(f"{page.read_text()}\nwritten: {page}, {options.out / 'bench.json'}")


def compared(part: str, size: str) -> tuple[Commands, Rows]:
    """Returns what a part compares other than `ppo`: the commands, and the rows of its table."""
    if part == "score":
        commands = {str(ours): ["ppo_ours.py", "score", size, json.dumps(asdict(ours))] for ours in LEARNERS}
        theirs = {"TRL 1.12": ["ppo_trl.py", "score", size]} if TRL_PPO.is_dir() else {}
        return commands | theirs, [("", name, next(iter(theirs), None)) for name in commands]
    script, plain = PLAIN[part]
    commands = {"ours": [script, "ours", size, part]}
    if part == "serve" and importlib.util.find_spec("vllm"):
        commands["ours, vLLM"] = [*commands["ours"], "rollout.engine=vllm"]
    rows = [("", name, plain) for name in commands]
    return commands | {plain: [script, "plain", size, part]}, rows


# ----------------------------------------------------------------------------------------------------- measuring


class Bench:
    """Measures what is compared, and writes the results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out

    def ppo(self, size: str) -> None:
        """At each length all its variants. What several of them have in common is measured once a round."""
        matmul = fp32_products(size)
        os.environ["BENCH_MATMUL"] = matmul["precision"]
        for case in self.options.length:
            commands: Commands = {}
            rows: Rows = []
            for name, (ours, beside, _) in chosen(self.options.variant, size, case, matmul).items():
                sides = [side for side in (ours, beside) if isinstance(side, Ours) or TRL_PPO.is_dir()]
                for side in sides:
                    commands[str(side)] = [side.script, "ppo", size, case, json.dumps(asdict(side))]
                rows.append((name, str(ours), str(beside) if beside in sides else None))
            if rows:
                self.compare("ppo", size, commands, rows, case, matmul=matmul)

    def compare(
        self, part: str, size: str, commands: Commands, rows: Rows, case: str = "", **machine: Any
    ) -> None:
        """Runs all commands in each round, and writes the figures of the rounds so far."""
        runs: Runs = {name: [] for name in commands}
        load = os.getloadavg()[0]
        for round_ in range(self.options.rounds):
            for name, command in commands.items():
                runs[name].append(self.run(f"{part}-{size}-{case}-{name}-{round_}", command, seed=round_ + 1))
            found = [
                {"variant": variant, "ours": ours, "beside": beside, "ratios": ratios(runs, ours, beside)}
                for variant, ours, beside in rows
            ]
            here = {"cpu": processor(), "threads": self.options.threads, "date": time.strftime("%Y-%m-%d")}
            here |= {"load": [load, os.getloadavg()[0]], **machine}
            samples = SIZES[size].prompts  # completions of an update
            self.keep(
                {"part": part, "size": size, "case": case, "samples": samples, "rows": found}
                | {"runs": runs, "machine": here}
            )

    def run(self, title: str, command: list[str], seed: int) -> dict[str, Any]:
        """Runs a fresh process, and returns what it wrote. Its output goes to a log, which is shown if it fails."""
        name = re.sub(r"[^a-z0-9.]+", "-", title.lower())
        found, log = self.out / f"{name}.json", self.out / f"{name}.log"
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(self.options.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "BENCH_OUT": str(found),
            "BENCH_SEED": str(seed),
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
        if "curve" in result:
            said = f"goal after {result['updates']} updates  score at equal KL {result['score']}"
        else:
            said = f"{result['step']:8.3f} s a step  first after {result['first_step']:6.1f} s"
            said += f"  peak {result['peak'] / GIB:.2f} GiB"
        print(f"  {said}", flush=True)
        return result

    def keep(self, result: dict[str, Any]) -> None:
        """Writes a result beside those of earlier parts. It replaces an earlier one of the same thing, so that all figures
        of a table are of one run."""
        path = self.out / "bench.json"
        results = json.loads(path.read_text()) if path.exists() else []
        identity = ("part", "size", "case")
        results = [r for r in results if any(r[key] != result[key] for key in identity)] + [result]
        path.write_text(json.dumps(results, indent=1))
        (self.out / "bench.md").write_text(render(results))


def fp32_products(size: str) -> dict[str, Any]:
    """Returns how the pipeline multiplies fp32 matrices at this size, and whether this processor has bf16."""
    import torch

    from pipeline.models.matmul import choose

    config = json.loads((SIZES[size].model / "config.json").read_text())
    precision, why = choose(config["hidden_size"])
    return {"precision": precision, "why": why, "bf16": torch.cpu._is_avx512_bf16_supported()}


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


if __name__ == "__main__":
    main()
