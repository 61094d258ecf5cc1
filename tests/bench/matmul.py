"""How the pipeline multiplies matrices on this machine, by its own measurement: `python tests/bench/matmul.py`."""

import json
import os
from pathlib import Path

from pipeline.models.matmul import bf16_speedup, decide, medium_error


def main() -> None:
    precision, why = decide([medium_error()])
    found = {"precision": precision, "why": why, "bf16_speedup": bf16_speedup()}
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
