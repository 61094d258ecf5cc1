"""Processes of Ray's workers that pretend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

# isort: off
from tests.gpu.pretend import branches  # noqa: F401  (before the modules of pipeline/, whose statements it notes)
# isort: on

from pipeline.rollout.worker import RolloutWorker
from tests.gpu import pretend
from tests.gpu.pretend.tensors import Mode

GPUS = 2  # of the machine
for_good = ExitStack()


def begin() -> None:
    """Pretends until this process ends. Ray calls it in each new process of a worker."""
    for_good.enter_context(pretend.cuda(GPUS))
    for name in ("load", "apply_settings", "sample"):  # in threads of Ray, which Python has not started
        setattr(RolloutWorker, name, _in_mode(getattr(RolloutWorker, name)))


def _in_mode(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any) -> Any:
        with Mode():
            return method(*args)

    return called
