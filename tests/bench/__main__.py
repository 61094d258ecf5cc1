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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import GIB, Runs, ratios, render
from score import GOALS, reached, score_at
from sizes import ROOT, SIZES, TRL_PPO, WORK, prepare
from variants import CASES, LEARNERS, VARIANTS, Ours, Theirs, chosen

PARTS = ("ppo", "score", "sft", "rm", "dpo", "evaluate", "serve")

Result = dict[str, Any]


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
    earlier = options.out / "bench.json"
    if earlier.exists() and any("rows" not in result for result in json.loads(earlier.read_text())):
        parser.error(f"{earlier} was written by another version of this bench; remove it")
    bench = Bench(options.rounds, options.threads, options.out)
    for size in options.size:
        prepare(size)
        for part in options.parts or PARTS:
            if part == "ppo":
                bench.ppo(size, options.variant, options.length)
            elif part == "score":
                if size in GOALS:
                    bench.score(size)
            elif part in ("serve", "evaluate"):
                getattr(bench, part)(size)
            else:
                bench.stage(part, size)
    if not (options.out / "bench.md").exists():
        parser.error("nothing of this is measured at this size")
    print((options.out / "bench.md").read_text())
    print(f"written: {options.out / 'bench.md'}, {options.out / 'bench.json'}")


@dataclass
class Bench:
    """Measures one part at one size, and writes its results."""

    rounds: int
    threads: int
    out: Path

    # ------------------------------------------------------------------------------------------- the parts

    def ppo(self, size: str, names: list[str] | None, cases: list[str]) -> None:
        """All variants in each round, at each length. What several of them have in common is measured once a round."""
        matmul = self.run("matmul", ["matmul.py", size], {})
        variants = {case: chosen(names, size, case, matmul) for case in cases}
        runs: dict[str, Runs] = {case: {} for case in cases if variants[case]}
        load = [os.getloadavg()[0]]
        for round_ in range(self.rounds):
            for case in runs:
                sides = [
                    side for variant in variants[case].values() for side in (variant.ours, variant.beside)
                ]
                for side in filter(installed, dict.fromkeys(sides)):
                    command = [side.script, size, case, json.dumps(asdict(side))]
                    name = f"ppo-{size}-{case}-{side}-{round_}"
                    found = self.run(name, command, {"BENCH_MATMUL": matmul["precision"]})
                    tell(found)
                    runs[case].setdefault(str(side), []).append(found)
                rows = [
                    {
                        "variant": name,
                        "ours": str(variant.ours),
                        "beside": str(variant.beside) if installed(variant.beside) else None,
                    }
                    for name, variant in variants[case].items()
                ]
                machine = self.machine([*load, os.getloadavg()[0]]) | {"matmul": matmul}
                self.keep("ppo", size, case, rows, runs[case], machine)

    def score(self, size: str) -> None:
        """The curves of score and KL; a round is a seed."""
        goal, theirs = GOALS[size], "TRL 1.12" if TRL_PPO.is_dir() else None
        commands = {str(ours): ["score_ours.py", size, json.dumps(asdict(ours))] for ours in LEARNERS}
        rows = [{"variant": "", "ours": name, "beside": theirs} for name in commands]
        if theirs:
            commands[theirs] = ["score_trl.py", size]

        def read(run: Result) -> None:
            updates, score = reached(run["curve"], goal.score), score_at(run["curve"], goal.kl)
            print(f"  score {goal.score} after {updates} updates  at {goal.kl} nats {score}", flush=True)
            run |= {"updates": updates, "score": score}

        seeds = [[str(seed)] for seed in range(1, self.rounds + 1)]
        self.compare("score", size, commands, rows, read, seeds)

    def stage(self, part: str, size: str) -> None:
        """The pipeline's command line, and a script that calls TRL's trainer."""
        commands = {"ours": ["stage_ours.py", part, size], "bare TRL": ["stage_bare.py", part, size]}
        self.compare(part, size, commands, [{"variant": "", "ours": "ours", "beside": "bare TRL"}])

    def evaluate(self, size: str) -> None:
        """A reward model's scores of pairs, and the forward passes alone."""
        commands = {"ours": ["evaluate_ours.py", size], "plain forwards": ["evaluate_plain.py", size]}
        rows = [{"variant": "", "ours": "ours", "beside": "plain forwards"}]
        self.compare("evaluate", size, commands, rows)

    def serve(self, size: str) -> None:
        """Tokens of 64 clients at once, and of one request after the other.

        The replica of an embedded Ray has one thread, as a worker on one CPU has.
        """
        seconds = "3" if size == "toy" else "30"
        commands = {
            "ours": ["serve_ours.py", size, seconds, "64"],
            "plain loop": ["serve_plain.py", size, seconds],
        }
        if importlib.util.find_spec("vllm"):
            commands["ours, vLLM"] = [*commands["ours"], "rollout.engine=vllm"]
        rows = [{"variant": "", "ours": name, "beside": "plain loop"} for name in commands if "ours" in name]
        self.compare("serve", size, commands, rows)

    def compare(
        self,
        part: str,
        size: str,
        commands: dict[str, list[str]],
        rows: list[Result],
        read: Callable[[Result], None] | None = None,
        more: list[list[str]] | None = None,
    ) -> None:
        """Runs all commands in each round; `more` has further arguments of each round, `read` looks at what a run wrote."""
        runs: Runs = {name: [] for name in commands}
        load = [os.getloadavg()[0]]
        for round_ in range(self.rounds):
            for name, command in commands.items():
                arguments = [*command, *(more[round_] if more else [])]
                found = self.run(f"{part}-{size}-{name}-{round_}", arguments, {})
                (read or tell)(found)
                runs[name].append(found)
            self.keep(part, size, "", rows, runs, self.machine([*load, os.getloadavg()[0]]))

    # ------------------------------------------------------------------------------------------- measuring

    def run(self, title: str, command: list[str], environment: dict[str, str]) -> dict[str, Any]:
        """One fresh process; what it wrote. Its output goes to a log, which is shown if it fails."""
        name = re.sub(r"[^a-z0-9.]+", "-", title.lower())
        found, log = self.out / f"{name}.json", self.out / f"{name}.log"
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}",
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "BENCH_OUT": str(found),
            "BENCH_BEGIN": repr(time.time()),
            **environment,
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

    def machine(self, load: list[float]) -> dict[str, Any]:
        return {
            "cpu": processor(),
            "threads": self.threads,
            "load": load,
            "date": time.strftime("%Y-%m-%d"),
        }

    def keep(
        self, part: str, size: str, case: str, rows: list[Result], runs: Runs, machine: dict[str, Any]
    ) -> None:
        """Writes a result beside those of earlier parts; an earlier one of the same thing gives way, so that all figures of
        a table are of one run."""
        result = {
            "part": part,
            "size": size,
            "case": case,
            "samples": samples_of(part, size),
            "rows": [row | {"ratios": ratios(runs, row["ours"], row["beside"])} for row in rows],
            "runs": runs,
            "machine": machine,
        }
        path = self.out / "bench.json"
        results = json.loads(path.read_text()) if path.exists() else []
        identity = ("part", "size", "case")
        results = [r for r in results if any(r[key] != result[key] for key in identity)] + [result]
        path.write_text(json.dumps(results, indent=1))
        (self.out / "bench.md").write_text(render(results))


def installed(setting: Ours | Theirs) -> bool:
    return isinstance(setting, Ours) or TRL_PPO.is_dir()


def tell(found: dict[str, Any]) -> None:
    step, first, peak = found["step"], found["first_step"], found["peak"] / GIB
    print(f"  {step:8.3f} s a step  first after {first:6.1f} s  peak {peak:.2f} GiB", flush=True)


def samples_of(part: str, size: str) -> int:
    """Completions of a PPO update; rows of a step of sft, pairs of rm and dpo."""
    here = SIZES[size]
    return {"ppo": here.prompts, "score": here.prompts, "sft": here.rows}.get(part, here.rows // 2)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())


if __name__ == "__main__":
    main()
