"""Plants each fault of known_faults.py, one after the other, and prints whether the self-checks name it.

    make faults
    make faults ARGS="--run dpo --say"

The exit status is 1 if the self-checks name fewer than 95% of the faults, or if a self-check fails in a sound run.
"""

import argparse
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests/support")]

import torch  # noqa: E402
from faulty_runs import RUNS, messages  # noqa: E402
from known_faults import FAULTS  # noqa: E402

GOAL = 0.95  # fraction of faults that the self-checks must name


def main() -> int:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=RUNS, help="only faults of this kind of run")
    parser.add_argument("--say", action="store_true", help="print the messages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [options.run] if options.run else RUNS
    chosen = [fault for fault in FAULTS if fault.run in runs]
    started, named, alarms = time.monotonic(), 0, 0
    for run in runs:
        said = messages(run)
        alarms += bool(said)
        print(f"{run:<5} {'FALSE ALARM' if said else 'quiet':<12} no fault", *said, flush=True)
    for fault in chosen:
        said = messages(fault.run, *fault.settings.split(), fault=fault)
        named += fault.is_named(said)
        word = "named" if fault.is_named(said) else "seen" if said else "not seen"
        print(f"{fault.run:<5} {word:<12} {fault.name}", flush=True)
        if options.say or word != "named":
            print(*(f"        {line[:600]}" for line in said or [fault.unnamed]), sep="\n", flush=True)
    share, seconds = named / len(chosen), time.monotonic() - started
    print(f"{named} of {len(chosen)} named ({share:.0%}), {alarms} false alarms; {seconds:.0f} s")
    return int(share < GOAL or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
