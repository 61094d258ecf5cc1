"""Filters and formats what Ray and other libraries print. Lines of a stage are shown unchanged. Lines of other processes get the
name of the process. Lines that contain a text in NOISE are hidden.

Ray itself would prefix each line of a worker with `(name pid=1234)`. `attach_ray_printer` replaces Ray's printer with private
functions of Ray 2.60. Remove `attach_ray_printer` when ray.init accepts a print function.
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
    # A warning about actors that Ray itself starts: https://github.com/ray-project/ray/issues/53727
    "has constructor arguments in the object store and max_restarts > 0",
    # Ray Train prints metrics with each checkpoint. The stage has already printed these metrics.
    "Reporting training result ",
    # bitsandbytes warns that an optional package with faster CPU kernels is missing.
    "Failed to load CPU gemm_4bit_forward from kernels-community",
    # Ray Serve reports a failure when it shuts down its own controller.
    "Task ServeController.graceful_shutdown failed",
    # Ray Serve logs this message for each request to a replica on a lost node, although another replica answers the request.
    "Failed to get queue length from Replica",
)

# Environment variables that every process gets before it imports large libraries.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",  # a stage shows its own progress
    "PYTHONWARNINGS": "ignore::DeprecationWarning,ignore::PendingDeprecationWarning,ignore::FutureWarning",
}
# Libraries whose warnings are hidden. Warnings from user code are shown.
LIBRARIES = (
    "transformers", "trl", "peft", "accelerate", "datasets", "torch", "bitsandbytes", "huggingface_hub", "tqdm",
)  # fmt: skip


@contextlib.contextmanager
def print_if_slow(message: str) -> Iterator[None]:
    """Prints `message` if the `with` block takes longer than 2 seconds."""
    timer = threading.Timer(2.0, print, [message], {"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def native_lines_filtered() -> Iterator[None]:
    """Hides NOISE that Ray's C++ code writes to stderr during the `with` block. C++ code does not write through sys.stderr."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    os.close(write_end)

    def forward() -> None:
        with open(read_end, "rb") as lines, open(stderr_copy, "wb", buffering=0) as output:
            output.writelines(line for line in lines if not any(text.encode() in line for text in NOISE))

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr_copy, 2)  # closing the pipe ends the thread
        thread.join(5.0)  # a child process may keep the pipe open, so the wait is limited


def attach_ray_printer(names: Collection[str] = (), sink: Any = None) -> None:
    """Replaces the printer of worker logs that ray.init() installed.

    Args:
        names: names of actors or tasks whose lines are shown without the name as a prefix.
        sink: a text file that gets the lines, or None for stdout and stderr.
    """
    from ray._private import worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("ray_print_logs", functools.partial(show_ray_lines, names=names, sink=sink))
    # Ray prints errors that its control store reports without the dispatcher.
    worker.print_to_stdstream = lambda data, ignore_prefix: show_ray_lines(data, names, sink)


def show_ray_lines(data: dict[str, Any], names: Collection[str] = (), sink: Any = None) -> None:
    """Prints one batch of log lines. Ray's `data` has the keys lines, is_err, pid, actor_name and task_name."""
    # the autoscaler's complete log, from which Ray selects the lines for users
    if data.get("pid") == "autoscaler":
        from ray._private.worker import filter_autoscaler_events

        data = {**data, "lines": filter_autoscaler_events(data["lines"])}
    name = data.get("actor_name") or data.get("task_name")
    prefix = "" if name in names or not name else f"({name}) "
    plain = sink or sys.stdout is not terminal.screen
    for line in data["lines"]:
        mark = line[0] if terminal.marked(line) else ""
        if any(text in line for text in NOISE) or (plain and mark == terminal.LIVE):
            continue
        line = ("" if plain else mark) + prefix + line.removeprefix(mark)
        print(line, file=sink or (sys.stderr if data["is_err"] else sys.stdout), flush=True)


def silence_libraries() -> None:
    """Hides the warnings of LIBRARIES, MLflow, Ray and this package. Errors, and warnings from user code, are still shown."""
    # Python attributes some warnings to the caller, which is `pipeline`.
    packages = (*LIBRARIES, "mlflow", "ray", "pipeline")
    warnings.filterwarnings("ignore", module=rf"({'|'.join(packages)})(\.|$)")
    for name in (*LIBRARIES, "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)


def for_notebook() -> None:
    """Hides the libraries' progress bars and warnings in a notebook. Call this function before you import large libraries."""
    os.environ.update(QUIET)
    silence_libraries()
    logging.getLogger("ray.widgets").setLevel(logging.ERROR)  # in a notebook, Ray asks to install ipywidgets
