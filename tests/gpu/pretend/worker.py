"""Processes of Ray's workers that pretend."""

from __future__ import annotations

from contextlib import ExitStack

from tests.gpu import pretend
from tests.gpu.pretend import branches  # noqa: F401  (before the modules of pipeline/, whose statements it notes)

GPUS = 2  # of the machine
for_good = ExitStack()


def begin() -> None:
    """Pretends until this process ends. Ray calls it in each new process of a worker."""
    for_good.enter_context(pretend.cuda(GPUS))
