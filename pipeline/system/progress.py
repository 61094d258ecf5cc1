"""Progress of long work, as one line that is rewritten, or as a line every 10 s if stdout is no terminal.

report = Bar(total=batches, desc="evaluating")      # report.update() after each batch
with loading_shown():                               # shows how transformers loads the weights of a model
    model = auto.from_pretrained(name, tqdm_class=Bar)      # tqdm_class: shows downloads
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from pipeline.system import terminal

INTERVAL_S = 10.0  # time between two lines


class Bar(tqdm):  # type: ignore[type-arg]
    """Prints tqdm's progress as a line every INTERVAL_S, even if TQDM_DISABLE is set."""

    def __init__(self, *args: Any, **options: Any):
        unit = "B" if options.get("unit") == "B" else ""
        options |= {
            "mininterval": INTERVAL_S,
            "delay": INTERVAL_S,
            "leave": False,
            "bar_format": f"{{desc}}: {{n_fmt}}{unit} of {{total_fmt}}{unit}, {{remaining}} left",
            "file": open(os.devnull, "w"),  # noqa: SIM115  (receives tqdm's cursor movements)
            "disable": False,
        }
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        if msg is None:  # tqdm erases its bar with msg=""
            print(self, flush=True)
            terminal.live(str(self))


@contextlib.contextmanager
def loading_shown() -> Iterator[None]:
    """Makes transformers show the loading of weights as a Bar in the block."""
    from transformers.utils import logging

    logging.set_tqdm_hook(lambda _, args, options: Bar(*args, **options))
    try:
        yield
    finally:
        logging.set_tqdm_hook(None)
