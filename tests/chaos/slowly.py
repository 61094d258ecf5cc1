"""The command line with a pause after every step, so that there is time to kill something: python slowly.py STAGE JOB.yaml [...]

The pause is taken where every rank asks after every step whether a node is about to leave. It changes no number.
"""

import importlib
import os
import sys
import time
from typing import Any

from pipeline.__main__ import main


def slow(train: Any, seconds: float) -> Any:
    def slowly(worker: Any) -> Any:
        leaving = worker.leaving

        def pause(step: int) -> bool:
            time.sleep(seconds)
            return leaving(step)

        worker.leaving = pause
        return train(worker)

    return slowly


if __name__ == "__main__":
    stage = importlib.import_module(f"pipeline.stages.{sys.argv[1]}")
    stage.train = slow(stage.train, float(os.environ["CHAOS_STEP_S"]))
    sys.exit(main(sys.argv[1:]))
