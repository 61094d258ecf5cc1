"""What Ray and other libraries print: lines of a stage unchanged, lines of other processes with a name, and no noise.

Ray prefixes each line of a worker with `(name pid=1234)`. `attach_ray_printer` replaces the printer that ray.init() installed,
which is private in Ray 2.60. Remove `attach_ray_printer` when ray.init takes a function that prints.
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
    # Warns about restarts of an actor that Ray itself starts: https://github.com/ray-project/ray/issues/53727
    "has constructor arguments in the object store and max_restarts > 0",
    # Ray Train prints the metrics of each checkpoint, which the stage has printed already.
    "Reporting training result ",
    # bitsandbytes does not find an optional package with faster CPU kernels.
    "Failed to load CPU gemm_4bit_forward from kernels-community",
    # Ray Serve ends its controller itself, but reports the end as a failure.
    "Task ServeController.graceful_shutdown failed",
    # Ray Serve logs a line for each request to a replica on a lost node. Another replica answers the request.
    "Failed to get queue length from Replica",
)

# Environment variables of every process, set before it imports large libraries.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # a stage shows its own progress
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::PendingDeprecationWarning,ignore::FutureWarning",
}
# Libraries whose warnings for developers are hidden. Warnings of user code are shown.
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
    """Removes NOISE that C++ code of Ray writes to stderr in the block. Lines of C++ code bypass Python's streams."""
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
        os.dup2(terminal, 2)  # closing the pipe ends the thread
        thread.join(5.0)  # a child process may keep the pipe open, so the wait is limited


def attach_ray_printer(own: Collection[str] = (), sink: Any = None) -> None:
    """Replaces the printer of worker logs that ray.init() installed.

    Args:
        own: names of processes whose lines are shown without the name.
        sink: a text file for the lines. By default, the lines go to stdout and stderr.
    """
    from ray._private import worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("ray_print_logs", functools.partial(show, own=own, sink=sink))
    # Errors that Ray's control store reports to the driver do not pass the dispatcher.
    worker.print_to_stdstream = lambda data, ignore_prefix: show(data, own, sink)


def show(data: dict[str, Any], own: Collection[str] = (), sink: Any = None) -> None:
    """Prints one batch of log lines. Ray's `data` has the keys lines, is_err, pid, actor_name and task_name."""
    if (
        data.get("pid") == "autoscaler"
    ):  # the complete log of the autoscaler, in which lines for users are marked
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
    """Silences the libraries' warnings for developers, but no errors, and no warnings of a user's code."""
    blamed = (*LIBRARIES, "mlflow", "ray", "pipeline")  # some warnings name their caller, `pipeline`
    warnings.filterwarnings("ignore", module=rf"({'|'.join(blamed)})(\.|$)")
    for name in (*LIBRARIES, "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


def for_notebook() -> None:
    """Silences progress bars and warnings for developers in a notebook. Call this function before importing large libraries."""
    os.environ.update(QUIET)
    silence_libraries()
    logging.getLogger("ray.widgets").setLevel(logging.ERROR)  # in a notebook, Ray asks to install ipywidgets
