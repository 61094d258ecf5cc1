"""Pretends to have CUDA: tensors report the device `cuda:0`, compute on the CPU, and raise CUDA's errors.

    with pretend.cuda():
        model.to("cuda")

In the block torch finds GPUs, so code takes its branches for CUDA, and autocast and autograd use CUDA's dispatch keys. Wrong
code gets CUDA's errors: two devices in one operation, `numpy()` of a GPU tensor, a host read during the capture of a graph, a
graph in a freed memory pool. `host_reads` counts operations that make the host wait.

Results are computed by the CPU's kernels. CUDA's kernels, speed and memory fragments are not simulated.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.serialization import _package_registry, register_package
from torch.utils._pytree import tree_map

from tools.gpu.pretend import autocast, nccl, tensors
from tools.gpu.pretend.device import (
    CONTEXT,
    GIB,
    Gpu,
    Graph,
    Stream,
    current_stream,
    graph_pool_handle,
    host_reads,
    machine,
    on_stream,
    waits,
)
from tools.gpu.pretend.tensors import GpuTensor, Mode, unwrap, wrap

__all__ = ["GpuTensor", "cuda", "host_reads", "machine", "unwrap"]

_safe_open = safetensors.safe_open
NAME = "NVIDIA H100 80GB HBM3"


@contextmanager
def cuda(gpus: int = 2, gib: float = 80) -> Iterator[None]:
    """Pretends that this process has `gpus` GPUs with `gib` GiB each. Threads started in the `with` block have the same GPUs."""
    with suppress(ImportError):
        import bitsandbytes  # bitsandbytes searches for CUDA's libraries only at its import
    # torch caches its list of tensor constructors, and must do so before torch.tensor is replaced.
    torch.utils._device._device_constructors()
    machine.gpus = [Gpu(index, int(gib * GIB)) for index in range(gpus)]
    machine.thread = threading.local()
    machine.replays = 0
    host_reads.clear()
    with ExitStack() as stack:
        for owner, names in _replaced():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        kinds = torch.utils._foreach_utils._foreach_supported_types
        kinds.append(GpuTensor)
        stack.callback(kinds.remove, GpuTensor)
        # a smaller number than torch's own entry for the CPU has, so that this entry is tried first
        register_package(5, _location, _restored)
        stack.callback(lambda: _package_registry.remove((5, _location, _restored)))
        stack.enter_context(autocast.kernels())
        stack.enter_context(Mode())
        yield


def _replaced() -> list[tuple[Any, dict[str, Any]]]:
    """Returns (module or class, {name: replacement}) for torch."""
    names = _cuda_names()
    parts = (torch.cuda.random, torch.cuda.memory, torch.cuda.graphs, torch.cuda.streams)
    return [
        (torch.cuda, names),
        *((part, {name: value for name, value in names.items() if hasattr(part, name)}) for part in parts),
        (torch.cuda.amp.common, {"amp_definitely_not_available": lambda: False}),
        (torch.accelerator, _accelerator_names()),
        (torch.optim.Optimizer, {"_accelerator_graph_capture_health_check": lambda self: None}),
        (
            torch.Tensor,
            {
                "to": tensors.to,
                "cuda": tensors.cuda,
                "data": property(tensors.get_data, tensors.set_data),
                "pin_memory": tensors.pin_memory,
                "is_pinned": tensors.is_pinned,
                "_make_subclass": staticmethod(tensors.make_subclass),
            },
        ),
        (GpuTensor, {"to": tensors.to, "data": property(tensors.get_data, tensors.set_data)}),
        (
            torch,
            {
                "tensor": _maker(torch.tensor, copies=True),
                "as_tensor": _maker(torch.as_tensor, copies=False),
                "load": _loader(torch.load),
                "Generator": _Generator,
            },
        ),
        (dist, {"init_process_group": nccl.init_process_group(dist.init_process_group)}),
        (torch.cuda.nccl, {"version": lambda: (2, 27, 5)}),
        (dist, {"get_backend": nccl.get_backend(dist.get_backend)}),
        (
            distributed_c10d,
            {"_get_object_coll_device": nccl.object_device(distributed_c10d._get_object_coll_device)},
        ),
        (safetensors.torch, {"safe_open": _Opened}),
        (threading.Thread, {"run": _with_mode(threading.Thread.run)}),
    ]


def _with_mode(run: Callable[..., None]) -> Callable[..., None]:
    """Enters the dispatch mode in each new thread, because a mode applies to one thread."""

    def started(self: threading.Thread) -> None:
        with Mode():
            run(self)

    return started


# ------------------------------------------------------------------------------------------ torch.cuda


def _cuda_names() -> dict[str, Any]:
    def memory(of: Any = None) -> Any:
        return machine.gpu(of).memory

    def set_device(of: Any) -> None:
        machine.thread.index = machine.gpu(of).device.index

    def exchange_device(index: int) -> int:
        before = machine.current
        if index >= 0:
            set_device(index)
        return before

    def synchronize(of: Any = None) -> None:
        machine.gpu(of)
        waits("synchronize")

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        machine.gpu(device).random.set_state(state)

    def manual_seed(seed: int, gpus: Any = None) -> None:
        for gpu in gpus or [machine.gpu()]:
            gpu.random.seed, gpu.random.offset = int(seed), 0

    def properties(of: Any = None) -> Any:
        gpu = machine.gpu(of)
        return types.SimpleNamespace(
            name=NAME,
            total_memory=gpu.memory.total,
            major=9,
            minor=0,
            multi_processor_count=132,
            warp_size=32,
        )

    def free(of: Any = None) -> tuple[int, int]:
        used = memory(of)
        return used.total - CONTEXT - used.reserved, used.total

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: machine.graph is not None,
        "device_count": lambda: len(machine.gpus),
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "synchronize": synchronize,
        "empty_cache": lambda: [gpu.memory.empty_cache() for gpu in machine.gpus] and None,
        "memory_allocated": lambda of=None: memory(of).allocated,
        "memory_reserved": lambda of=None: memory(of).reserved,
        "max_memory_allocated": lambda of=None: memory(of).peak,
        "max_memory_reserved": lambda of=None: memory(of).reserved_peak,
        "reset_peak_memory_stats": lambda of=None: memory(of).reset_peak(),
        "mem_get_info": free,
        "get_device_name": lambda of=None: properties(of).name,
        "get_device_capability": lambda of=None: (9, 0),
        "get_device_properties": properties,
        "get_rng_state": lambda device="cuda": machine.gpu(device).random.state(),
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [gpu.random.state() for gpu in machine.gpus],
        "set_rng_state_all": lambda states: [
            gpu.random.set_state(state) for gpu, state in zip(machine.gpus, states, strict=False)
        ],
        "manual_seed": manual_seed,
        "manual_seed_all": lambda seed: manual_seed(seed, machine.gpus),
        "initial_seed": lambda: machine.gpu().random.seed,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "graph_pool_handle": graph_pool_handle,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "stream": on_stream,
    }


def _accelerator_names() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: len(machine.gpus),
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: machine.current,
        "synchronize": lambda of=None: torch.cuda.synchronize(of),
    }


# ------------------------------------------------------------------------------------------ new tensors


def _maker(plain: Callable[..., Any], copies: bool) -> Callable[..., Any]:
    """Returns a replacement for torch.tensor or torch.as_tensor, which makes the tensor on the CPU and copies it.

    Args:
        copies: whether to copy a tensor that already has the right device and dtype.
    """

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, torch.Tensor):
            source = data.detach() if copies else data
            made = tensors.to(source, device=device, dtype=kwargs.get("dtype"))
            return made.clone() if copies and made.data_ptr() == data.data_ptr() else made
        if isinstance(data, list | tuple) and any(isinstance(x, GpuTensor) for x in data):
            data = [x.item() if isinstance(x, torch.Tensor) else x for x in data]
        where = machine.device(torch.empty(0).device if device is None else device)
        if where.type != "cuda":
            return plain(data, *args, device=where, **kwargs)
        made = plain(data, *args, device="cpu", **kwargs)
        return tensors.to(made.detach(), where).requires_grad_(made.requires_grad)

    return make


class _IsGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_IsGenerator):  # type: ignore[misc]
    """Replaces torch.Generator. `device` may name a GPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        if torch.device(device).type == "cuda":
            machine.generators[made._cdata] = machine.device(device)
        return made

    def __init__(self, device: Any = "cpu") -> None: ...

    @property
    def device(self) -> torch.device:
        return machine.generators.get(self._cdata, torch.device("cpu"))

    def __del__(self) -> None:
        machine.generators.pop(self._cdata, None)


# ------------------------------------------------------------------------------------------ files


def _location(storage: Any) -> str | None:
    """Returns the GPU of a stored tensor, for torch.save."""
    address = storage.data_ptr()
    return next((str(gpu.device) for gpu in machine.gpus if address and address in gpu.memory.bytes_of), None)


class _Opened:
    """Replaces safetensors' reader, which would call CUDA to copy tensors to a GPU."""

    def __init__(self, *args: Any, device: Any = "cpu", **kwargs: Any) -> None:
        self.file, self.device = _safe_open(*args, **kwargs), machine.device(device)

    def __enter__(self) -> _Opened:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.device) for name, tensor in self.file.get_tensors().items()}

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.file.get_tensor(name).to(self.device)


# address of a storage -> storage, GPU; filled while torch.load runs
_loaded: dict[int, tuple[Any, torch.device]] = {}


def _restored(storage: Any, location: str) -> Any:
    """Records the GPU of a storage that torch.load reads."""
    if not location.startswith("cuda"):
        return None
    _loaded[storage.data_ptr()] = storage, machine.device(location)
    return storage


def _loader(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement for torch.load. Tensors go to the device of `map_location`, or to the device in the file."""

    def load(*args: Any, **kwargs: Any) -> Any:
        _loaded.clear()
        found = plain(*args, **kwargs)

        def moved(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or (address := x.untyped_storage().data_ptr()) not in _loaded:
                return x
            kind = torch.nn.Parameter if isinstance(x, torch.nn.Parameter) else torch.Tensor
            return wrap(x.detach(), _loaded[address][1], kind, x.requires_grad)

        return tree_map(moved, found)

    return load
