"""Runs the command line with a pause after each step, so that faults have time to happen: python slowly.py STAGE JOB.yaml [...]

The pause happens when every rank asks for notices of preemption. The pause changes no result, and each step prints its line. If
CHAOS_ROWS names a folder, the workers of TRL's stages write the rows of each step there.
"""

import importlib
import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

from pipeline.__main__ import main


def slow(stage: str, seconds: float, folder: str | None) -> Any:
    def slowly(worker: Any) -> Any:
        importlib.import_module("pipeline.run.worker").PRINT_INTERVAL_S = 0.0  # prints a line for each step
        train = importlib.import_module(f"pipeline.stages.{stage}").train
        if folder:
            record_rows(worker, folder)
        poll = worker.notice.poll

        def pause(step: int) -> bool:
            time.sleep(seconds)
            return poll(step)

        worker.notice.poll = pause
        return train(worker)

    return slowly


def record_rows(worker: Any, folder: str) -> None:
    """Makes each worker append {attempt, step, world, rows} to its file at each step."""
    import ray.train.collective

    from pipeline.stages.exact_batches import ExactBatches

    training_step = ExactBatches.training_step
    attempt = ray.train.collective.broadcast_from_rank_zero(time.time())
    path = os.path.join(folder, f"{attempt:.3f}-{worker.rank}.jsonl")

    def noted(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        count = self._shares[0][1] if self.args.world_size > 1 else len(inputs["input_ids"])
        tokens = zip(inputs["input_ids"][:count], inputs["attention_mask"][:count], strict=True)
        line = {"attempt": attempt, "step": self.state.global_step + 1, "world": worker.world}
        line["rows"] = [ids[mask.bool()].tolist() for ids, mask in tokens]
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return training_step(self, model, inputs, num_items_in_batch)

    ExactBatches.training_step = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    stage = importlib.import_module(f"pipeline.stages.{sys.argv[1]}")
    train = slow(sys.argv[1], float(os.environ["CHAOS_STEP_S"]), os.environ.get("CHAOS_ROWS"))
    stage.RECIPE = replace(stage.RECIPE, train=train)
    sys.exit(main(sys.argv[1:]))
