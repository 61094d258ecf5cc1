"""Shows the progress of a long operation in one line, updated in place. If stdout is not a terminal, prints new lines instead.

report = Bar(total=batches, desc="evaluating")      # report.update() after each batch
with loading_shown():                               # shows the progress while transformers loads weights
    model = auto.from_pretrained(name, tqdm_class=Bar)      # tqdm_class: shows downloads
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from pipeline.system import terminal

INTERVAL_S = 10.0  # time between two updates


class Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar that prints its progress as a line every INTERVAL_S, even if TQDM_DISABLE is set."""

    def __init__(self, *args: Any, **options: Any):
        unit = "B" if options.get("unit") == "B" else ""
        options |= {
            "mininterval": INTERVAL_S,
            "delay": INTERVAL_S,
            "leave": False,
            "bar_format": f"{{desc}}: {{n_fmt}}{unit} of {{total_fmt}}{unit}, {{remaining}} left",
            "file": open(os.devnull, "w"),  # noqa: SIM115  (tqdm writes cursor movements to it)
            "disable": False,
        }
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        if msg is None:  # tqdm erases its bar with msg=""
            print(self, flush=True)
            terminal.show_progress(str(self))


@contextlib.contextmanager
def loading_shown() -> Iterator[None]:
    """Makes transformers show its progress with a Bar when it loads weights during the `with` block."""
    from transformers.utils import logging

    logging.set_tqdm_hook(lambda _, args, options: Bar(*args, **options))
    try:
        yield
    finally:
        logging.set_tqdm_hook(None)
