"""Runs a command of the pipeline on pretended GPUs, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from pipeline.__main__ import main
from tools.gpu import pretend


@contextmanager
def machine(gpus: int = 1) -> Iterator[None]:
    """Pretends that this process runs on a machine with GPUs. Ray finds the pretended GPUs, too."""
    found = {"get_current_node_num_accelerators": lambda: gpus}
    with (
        pretend.cuda(gpus),
        mock.patch.multiple(NvidiaGPUAcceleratorManager, **found),
        mock.patch("trl.kernels.chunked_logprob._TRITON_AVAILABLE", False),  # Triton needs a GPU
    ):
        yield


def run(arguments: list[str]) -> dict[str, Any]:
    """Runs a command. Returns the command's exit status, host reads, graph replays and peak memory."""
    status = main(arguments)
    return {
        "status": status,
        "host_reads": dict(pretend.host_reads),
        "replays": pretend.machine.replays,
        "peak": torch.cuda.max_memory_allocated(),
    }
