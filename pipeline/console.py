"""What reaches the terminal: the stages' own lines as they are, other processes' under their name, and tables.

Ray prefixes every line of a worker with `(name pid=1234)`, and two of its actors complain every second about things
that mean nothing here. Uses the dispatcher that ray.init() itself uses (ray 2.60, private; pinned in pyproject.toml).
"""

import re
import sys
from typing import Any

from pipeline.config import JOBS

NOISE = (
    # https://github.com/ray-project/ray/issues/53727: about restarts of an actor of Ray's own.
    "has constructor arguments in the object store and max_restarts > 0",
    # Ray Train repeats the metrics of each checkpoint, which the stage's own line has shown.
    "Reporting training result ",
    # bitsandbytes looks for an optional package of faster CPU kernels when it is imported.
    "from kernels-community: No module named 'kernels'",
)

# Of every process, set before it imports anything heavy.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # bars of loading weights; a stage shows its own progress
    "PYTHONWARNINGS": "ignore",
}
# Ray Train's cleaner asks the dashboard's state API, which an embedded Ray does not start, once a second.
SILENT = ("PlacementGroupCleaner",)
# Of files that were deleted under a run the driver speaks itself (checkpoints.lost), without Ray's own frames.
DELETED = re.compile(
    r"Error in control loop iteration: .*\nTraceback \(most recent call last\):\n(?:[ \t].*\n)*FileNotFoundError: .*\n?"
)


def attach() -> None:
    """Replaces the printer of worker logs that ray.init() installed."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("ray_print_logs", show)


def show(data: dict[str, Any]) -> None:
    """Prints one batch of log lines; `data` is Ray's: lines, is_err, pid, actor_name, task_name."""
    if data.get("pid") == "autoscaler":  # its whole log comes this way; events for people are marked in it
        from ray._private.worker import filter_autoscaler_events

        data = {**data, "lines": filter_autoscaler_events(data["lines"])}
    name = data.get("actor_name") or data.get("task_name")
    if name in SILENT:
        return
    prefix = "" if name in JOBS or not name else f"({name}) "
    sink = sys.stderr if data["is_err"] else sys.stdout
    lines, text = data["lines"], "\n".join(data["lines"])
    for line in DELETED.sub("", text).splitlines() if DELETED.search(text) else lines:
        if not any(text in line for text in NOISE):
            print(prefix + line, file=sink, flush=True)


def quiet() -> None:
    """For a notebook, before it imports anything heavy: neither progress bars nor the libraries' advice to developers."""
    import logging
    import os

    from pipeline import worker

    os.environ.update(QUIET)
    worker.hush()
    logging.getLogger("ray.widgets").setLevel(logging.ERROR)  # asks for ipywidgets


def sample_table(samples: list[dict[str, Any]], width: int = 44) -> str:
    """Prompts with the replies before and after, and their scores, as aligned text."""
    lines = []
    for sample in samples:
        lines.append(f"   {_cut(sample['prompt'], 2 * width)}")
        for key in ("before", "after"):
            side = sample[key]
            scores = "  ".join(f"{name} {side[name]:.2f}" for name in ("reward", "judge") if name in side)
            lines.append(f"     {key:<6}  {_cut(side['completion'], width):<{width}}  {scores}")
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
