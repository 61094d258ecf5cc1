"""Progress of long work: a line that is rewritten if stdout is a terminal, else a line every 10 s.

report = Bar(total=batches, desc="evaluating")      # report.update() after each batch
with loading_shown():                               # of transformers' loop over a model's weights
    model = auto.from_pretrained(name, tqdm_class=Bar)      # and of the downloads
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm

from pipeline.system import terminal

INTERVAL_S = 10.0  # time between two lines


class Bar(tqdm):  # type: ignore[type-arg]
    """Prints tqdm's bar as a line every INTERVAL_S, even with TQDM_DISABLE."""

    def __init__(self, *args: Any, **options: Any):
        unit = "B" if options.get("unit") == "B" else ""
        options |= {
            "mininterval": INTERVAL_S,
            "delay": INTERVAL_S,
            "leave": False,
            "bar_format": f"{{desc}}: {{n_fmt}}{unit} of {{total_fmt}}{unit}, {{remaining}} left",
            "file": open(os.devnull, "w"),  # noqa: SIM115  (for tqdm's cursor movements)
            "disable": False,
        }
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        if msg is None:  # so that the line stays
            print(self, flush=True)
            terminal.live(str(self))


@contextlib.contextmanager
def loading_shown() -> Iterator[None]:
    """Makes transformers show its loops over weights as a Bar in the block."""
    from transformers.utils import logging

    logging.set_tqdm_hook(lambda _, args, options: Bar(*args, **options))
    try:
        yield
    finally:
        logging.set_tqdm_hook(None)
