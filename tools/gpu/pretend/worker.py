"""Makes worker processes of Ray pretend to have GPUs."""

from __future__ import annotations

from contextlib import ExitStack

from tools.gpu import pretend
from tools.gpu.pretend import branches  # noqa: F401  (before the modules of pipeline/, whose statements it records)

GPUS = 2  # number of pretended GPUs of the machine
for_good = ExitStack()


def begin() -> None:
    """Pretends to have GPUs until this process ends. Ray calls this function in each new worker process."""
    for_good.enter_context(pretend.cuda(GPUS))
