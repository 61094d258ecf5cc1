"""Lines of Ray and of libraries: a stage's lines as they are, lines of other processes with their name, no noise.

Ray prefixes every line of a worker with `(name pid=1234)`. `attach` replaces the printer in the dispatcher of ray.init()
(ray 2.60, private; pinned in pyproject.toml). Remove it when ray.init takes a function that prints.
"""

import contextlib
import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from pipeline.system import terminal

NOISE = (
    # https://github.com/ray-project/ray/issues/53727: about restarts of an actor that Ray starts.
    "has constructor arguments in the object store and max_restarts > 0",
    # Ray Train repeats the metrics of each checkpoint, which the stage has printed.
    "Reporting training result ",
    # bitsandbytes looks for an optional package with faster CPU kernels.
    "Failed to load CPU gemm_4bit_forward from kernels-community",
    # Ray Serve ends its controller, and then reports that it has ended.
    "Task ServeController.graceful_shutdown failed",
    # Ray Serve logs this for each request that meets a replica on a lost node; another replica answers.
    "Failed to get queue length from Replica",
)

# Environment of every process, set before it imports anything heavy.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # bars of loading weights; a stage shows its own progress
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::PendingDeprecationWarning,ignore::FutureWarning",
}
# Libraries whose advice to developers is hidden. Warnings of user code are shown.
LIBRARIES = (
    "transformers", "trl", "peft", "accelerate", "datasets", "torch", "bitsandbytes", "huggingface_hub", "tqdm",
)  # fmt: skip


@contextlib.contextmanager
def waiting(what: str, seconds: float = 2.0) -> Iterator[None]:
    """Prints `what` if the block takes more than a moment."""
    timer = threading.Timer(seconds, print, [what], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def native_lines_filtered() -> Iterator[None]:
    """Keeps NOISE that C++ code of this process writes to stderr, past Python, off the terminal: Ray logs it as an error."""
    sys.stderr.flush()
    terminal = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)

    def forward() -> None:
        with open(read, "rb") as lines, open(terminal, "wb", buffering=0) as shown:
            shown.writelines(line for line in lines if not any(text.encode() in line for text in NOISE))

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)  # closes the pipe, which ends the thread
        thread.join(5.0)  # unless a child process of the block still has the pipe


def attach(own: Collection[str] = (), sink: Any = None) -> None:
    """Replaces the printer of worker logs that ray.init() installed.

    Args:
        own: names of processes whose lines are shown as they are, without a name before them.
        sink: a text file for the lines; None: stdout and stderr.
    """
    from ray._private import worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("ray_print_logs", functools.partial(show, own=own, sink=sink))
    # The dispatcher does not see errors that Ray's control store reports to the driver.
    worker.print_to_stdstream = lambda data, ignore_prefix: show(data, own, sink)


def show(data: dict[str, Any], own: Collection[str] = (), sink: Any = None) -> None:
    """Prints one batch of log lines. `data` is Ray's: lines, is_err, pid, actor_name, task_name."""
    if data.get("pid") == "autoscaler":  # all of its log arrives here; lines for users have a mark
        from ray._private.worker import filter_autoscaler_events

        data = {**data, "lines": filter_autoscaler_events(data["lines"])}
    name = data.get("actor_name") or data.get("task_name")
    prefix = "" if name in own or not name else f"({name}) "
    plain = sink or sys.stdout is not terminal.screen
    for line in data["lines"]:
        mark = line[0] if terminal.marked(line) else ""
        if any(text in line for text in NOISE) or (plain and mark == terminal.LIVE):
            continue
        line = ("" if plain else mark) + prefix + line.removeprefix(mark)
        print(line, file=sink or (sys.stderr if data["is_err"] else sys.stdout), flush=True)


def silence_libraries() -> None:
    """Silences the libraries' advice to developers. Errors and warnings of a user's code stay."""
    blamed = (*LIBRARIES, "mlflow", "ray", "pipeline")  # `pipeline` if a library names its caller
    warnings.filterwarnings("ignore", module=rf"({'|'.join(blamed)})(\.|$)")
    for name in (*LIBRARIES, "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


def for_notebook() -> None:
    """Silences progress bars and advice to developers in a notebook. Call it before heavy imports."""
    os.environ.update(QUIET)
    silence_libraries()
    logging.getLogger("ray.widgets").setLevel(logging.ERROR)  # Ray asks to install ipywidgets
