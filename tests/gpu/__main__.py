"""What a machine with one GPU shows of this pipeline, in 25 minutes: is it right, how fast is it, what does it hold?

    make gpu                                all experiments, with make's own environment or PYTHON=...
    make gpu ARGS="doctor-nf4 decode-bf16"  some of them
    SMALL=1 make gpu                        all of them with tiny models on the CPU, in a minute: a rehearsal
    python -m tests.gpu [NAME ...] [--out FOLDER]      from the root of the repository

torch, transformers and peft suffice; bitsandbytes, Ray with TRL and MLflow, and vLLM are used where they are installed.
Weights are random and nothing is downloaded. Each experiment is a process of its own and ends with checks that hold or do
not; one that fails does not stop the others. Writes gpu.md and gpu.json into FOLDER (runs/gpu) after each experiment. Exit
status 1 if one has failed, 2 for an unknown name. docs/gpu.md says what each experiment shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

if os.environ.get("SMALL"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.gpu import models
from tests.gpu.experiments import about, experiments, isolated, run
from tests.gpu.record import Record, markdown

MINUTES = 25
LIMIT = 480  # seconds of one experiment


def main() -> int:
    every = experiments()
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(every)}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.md and gpu.json")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(every)}")
    if not models.CUDA and not models.SMALL:
        parser.error("there is no GPU that torch can use; SMALL=1 rehearses everything on the CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    machine, records = isolated(LIMIT, about), list[Record]()
    method = "fork" if models.SMALL else "spawn"
    end = time.monotonic() + 60 * MINUTES
    for name in options.names or every:
        left = end - time.monotonic()
        try:
            record = Record(name, skipped=f"{MINUTES} minutes were over")
            if left >= 30:
                record = isolated(min(left, LIMIT), run, name, method=method)
        except RuntimeError as error:
            record = Record(name, error=str(error))
        records.append(record)
        print(f"{record.outcome:<8} {name:<16} {record.seconds:6.1f} s  {record.reason}", flush=True)
        (options.out / "gpu.md").write_text(markdown(machine, records), encoding="utf-8")
        results = {"machine": machine, "experiments": [one.to_dict() for one in records]}
        (options.out / "gpu.json").write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    counts = Counter(record.outcome for record in records)
    numbers = f"{counts['passed']} passed, {counts['skipped']} skipped, {counts['FAILED']} failed"
    print(f"\n{numbers}; {options.out}/gpu.md", flush=True)
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
