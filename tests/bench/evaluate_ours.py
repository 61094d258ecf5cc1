"""One measurement of `evaluate`: `python tests/bench/evaluate_ours.py SIZE`, started by `make bench`.

The command line as a user types it, in this process: a random reward adapter on preference pairs. A step is a pair; only the
scoring counts, from token rows to metrics, without the start.
"""

import sys
import time

from evaluate_plain import PAIRS, ROWS, reward
from sizes import ROOT, WORK, Clock, high_water, model_folder, raw_rows, write_lines


def main(name: str) -> None:
    from pipeline.__main__ import main as command
    from pipeline.evaluation import pairs

    clock, measure, folder = Clock(), pairs.measure, WORK / name / "evaluate"
    folder.mkdir(exist_ok=True)
    write_lines(folder / "pairs.jsonl", list(raw_rows("rm", name))[: PAIRS[name]])

    def measured(*given: object) -> object:
        clock.step(0)
        found = measure(*given)
        clock.step(PAIRS[name])
        return found

    pairs.measure = measured
    settings = [
        f"model.name_or_path={model_folder(name)}", f"reward={reward(name)}", f"data.pairs={folder}/pairs.jsonl",
        "policy=null", "baseline=null", "judge=null", "data.eval=null", "gate={}",
        f"trainer.local_rollout_forward_batch_size={ROWS}", f"run.storage_path={folder}/runs", f"run.name=bench-{time.time_ns()}",
    ]  # fmt: skip
    if status := command(["evaluate", str(ROOT / "jobs/demo/evaluate.yaml"), *settings]):
        sys.exit(status)
    clock.write(high_water(), warmup=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
