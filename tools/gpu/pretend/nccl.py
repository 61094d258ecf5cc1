"""NCCL between processes with pretended GPUs: gloo sends the numbers under NCCL's conditions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tools.gpu.pretend.device import machine

# dtypes that NCCL can send, which exclude int16
DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class Groups:
    """Stores whether this process's default group uses NCCL, and whether its ranks have reported their GPUs."""

    nccl = False
    checked = False


def init_process_group(plain: Callable[..., None]) -> Callable[..., None]:
    """Returns a replacement for torch's function, which uses gloo in place of NCCL."""

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        Groups.nccl = backend is None or "nccl" in str(backend)
        Groups.checked = False
        kwargs.pop("device_id", None)
        plain("gloo" if Groups.nccl else backend, *args, **kwargs)

    return init


def get_backend(plain: Callable[..., str]) -> Callable[..., str]:
    def backend(group: Any = None) -> str:
        found = plain(group)
        return "nccl" if Groups.nccl and group in (None, dist.group.WORLD) else found

    return backend


def object_device(plain: Callable[..., torch.device]) -> Callable[..., torch.device]:
    """Returns a replacement for torch's choice of device for pickled objects. NCCL sends them from the current GPU."""

    def device(group: Any = None) -> torch.device:
        return machine.device() if Groups.nccl and group in (None, dist.group.WORLD) else plain(group)

    return device


def check(tensors: list[torch.Tensor]) -> None:
    """Raises NCCL's error for a collective of these tensors, if any."""
    if not Groups.nccl:
        return
    for tensor in tensors:
        if tensor.device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if tensor.dtype not in DTYPES:
            raise RuntimeError(
                f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
            )
    if not Groups.checked and tensors:
        Groups.checked = True
        store, rank, world = distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        store.set(f"gpu of {rank}", str(tensors[0].device))
        taken = [store.get(f"gpu of {one}") for one in range(world)]
        if len({*taken}) < world:
            raise dist.DistBackendError(
                f"NCCL error: Duplicate GPU detected : rank {rank} on {tensors[0].device}"
            )
