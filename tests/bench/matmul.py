"""How the pipeline multiplies matrices on this machine: `python tests/bench/matmul.py SIZE`."""

import json
import os
import sys
from pathlib import Path

import torch
from sizes import model_folder

from pipeline.models.matmul import choose


def main(size: str) -> None:
    config = json.loads((model_folder(size) / "config.json").read_text())
    precision, why = choose(config["hidden_size"])
    found = {"precision": precision, "why": why, "bf16": torch.cpu._is_avx512_bf16_supported()}
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
