"""Kills processes while a stage runs, and checks that the run ends as if undisturbed.

    make chaos                                      each stage with each fault, at moments from a printed seed
    make chaos ARGS="--seed 7 --stages sft ppo --faults worker node"

After a killed driver, the same command runs again. Compared with an undisturbed run, a run must have a bit-identical adapter,
the same final metrics, and the same curves in MLflow, with each step once. A run must have one FINISHED MLflow run and one
registered version. The exit status is 1 if a run differs or fails.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from faults import FAULTS, ROLLOUT, TWO_WORKERS
from runs import Baselines, Server, differences

# `ahead` is ppo with a rollout worker that samples one update ahead of the trainer
STAGES = ("sft", "rm", "dpo", "kto", "ppo", "ahead")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seed", type=int, help="decides moments and victims; default: a random seed")
    for option, choices in (("--stages", STAGES), ("--faults", tuple(FAULTS))):
        parser.add_argument(option, nargs="+", choices=choices, default=list(choices), metavar="NAME")
    parser.add_argument("--keep", action="store_true", help="keep the runs and their logs")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}    runs and logs: {folder}", flush=True)
    with Server(folder) as server:
        baselines = Baselines(folder, server)
        equal = {
            (stage, fault): cell(stage, fault, seed, baselines)
            for stage in options.stages
            for fault in options.faults
            if stage == "ahead" or fault not in ROLLOUT
        }
    failed = [f"{stage} x {fault}" for (stage, fault), well in equal.items() if not well]
    if failed:
        print(f"\n{len(failed)} of {len(equal)} disturbed runs are not equal: {', '.join(failed)}.")
        print(f"Logs are in {folder}; to repeat this, use --seed {seed}")
        return 1
    print(f"\nall {len(equal)} disturbed runs equal the undisturbed ones (seed {seed})")
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def cell(stage: str, fault: str, seed: int, baselines: Baselines) -> bool:
    """Runs one stage with one fault. Prints the differences from an undisturbed run. Returns True if there are no differences."""
    from mlflow import MlflowClient

    workers = 2 if fault in TWO_WORKERS else 1
    expected = baselines.of(stage, workers)
    rng = random.Random(f"{seed}-{stage}-{fault}")
    run = baselines.start(stage, f"{stage}-{fault}", workers)
    started = time.monotonic()
    try:
        done = FAULTS[fault](run, rng)
        uri = baselines.server.uri
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        problems = differences(client, expected.result(), run.result())
        versions = client.search_model_versions(f"name = '{run.name}'")
        problems += [f"{len(versions)} registered versions, expected 1"] if len(versions) != 1 else []
    except Exception as error:  # the command continues with the next run
        traceback.print_exc()
        done, problems = "", [f"{type(error).__name__}: {error}"]
    finally:
        run.stop()
    word, seconds = "NOT EQUAL" if problems else "equal", time.monotonic() - started
    print(f"{stage:<4} x {fault:<10}  {word}  {seconds:4.0f} s  {done}", flush=True)
    for problem in problems:
        print(f"     {problem}", flush=True)
    return not problems


if __name__ == "__main__":
    sys.exit(main())
