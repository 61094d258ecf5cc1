"""A pretended NCCL, in which gloo sends the numbers between processes with pretended GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tools.gpu.pretend.device import machine


class Groups:
    """Stores whether this process's default group pretends to use NCCL."""

    nccl = False


def init_process_group(plain: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement for torch's init_process_group that uses gloo in place of NCCL."""

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        Groups.nccl = backend is None or "nccl" in str(backend)
        kwargs.pop("device_id", None)
        plain("gloo" if Groups.nccl else backend, *args, **kwargs)

    return init


def get_backend(plain: Callable[..., str]) -> Callable[..., str]:
    """Returns a replacement for torch's get_backend that returns nccl for the default group."""

    def backend(group: Any = None) -> str:
        found = plain(group)
        return "nccl" if Groups.nccl and group in (None, dist.group.WORLD) else found

    return backend


def object_device(plain: Callable[..., torch.device]) -> Callable[..., torch.device]:
    """Returns a replacement for torch's choice of device for pickled objects. NCCL sends pickled objects from the current GPU."""

    def device(group: Any = None) -> torch.device:
        return machine.device() if Groups.nccl and group in (None, dist.group.WORLD) else plain(group)

    return device


def check(tensors: list[torch.Tensor]) -> None:
    """Raises NCCL's error if a collective sends a tensor of the CPU."""
    for tensor in tensors if Groups.nccl else ():
        if tensor.device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
