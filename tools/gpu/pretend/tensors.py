"""Tensors that report a GPU as their device and compute real numbers on the CPU.

A `GpuTensor` has CUDA's dispatch keys, so that autocast and autograd treat it like a tensor on a GPU. Each operation goes to
`run`, which makes CUDA's checks, computes on the plain tensors inside, and wraps the results.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.gpu.pretend import nccl
from tools.gpu.pretend.device import machine, tree_leaves, tree_map, waits

aten = torch.ops.aten
CPU = torch.device("cpu")
_make_subclass = torch.Tensor._make_subclass
_plain_to = torch.Tensor.to
_plain_data = torch.Tensor.data

COPIES = {aten._to_copy.default, aten.copy_.default}  # operations that accept tensors on several devices
READS = {  # operations whose result the host must know: a number, or the size of a tensor
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.equal.default: "equal",
    aten.masked_select.default: "masked_select",
    aten.bincount.default: "bincount",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
}
INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor}
# matrix products of half precision with an fp32 result
PRODUCTS = {aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out}
PUT = {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class GpuTensor(torch.Tensor):
    """A CPU tensor that reports a GPU as its device. `_t` is the plain tensor with its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _t: torch.Tensor
    _device: torch.device

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return self._device.index

    def data_ptr(self) -> int:
        return self._t.data_ptr()

    def tolist(self) -> Any:
        waits("tolist")
        return self.detach()._t.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self._device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )

    __array__ = numpy

    def pin_memory(self, *_: Any) -> Any:
        raise RuntimeError(f"cannot pin 'torch.cuda.{self.dtype}' only dense CPU tensors can be pinned")

    def cpu(self, **_: Any) -> Any:
        return self.to(CPU)

    def new_tensor(
        self, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Any:
        made = torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)
        return made.requires_grad_(requires_grad)

    def __repr__(self, **_: Any) -> str:
        return f"{self._t!r} on {self._device}"

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            copy = wrap(self._t.detach().clone(), self._device, _class_of(self), self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._t.detach()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)


@cache
def _gpu_class(kind: type) -> type:
    """Returns a class of pretended GPU tensors that inherits from a subclass of Tensor, such as bitsandbytes' Params4bit."""
    if issubclass(kind, GpuTensor) or kind in (torch.Tensor, torch.nn.Parameter):
        return kind if issubclass(kind, GpuTensor) else GpuTensor
    return type(kind.__name__, (kind, GpuTensor), {"__module__": kind.__module__})


def _class_of(tensor: torch.Tensor) -> type:
    """Returns the class that a tensor has on the CPU."""
    kind = type(tensor)
    if kind is GpuTensor:
        return torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    return kind.__bases__[0] if isinstance(tensor, GpuTensor) else kind


def wrap(
    plain: torch.Tensor, device: torch.device, kind: type = torch.Tensor, requires_grad: bool = False
) -> GpuTensor:
    """Returns a GPU tensor that shares the memory of a plain tensor.

    Args:
        kind: class of the plain tensor.
    """
    made: Any = _make_subclass(_gpu_class(kind), plain, requires_grad, device_for_backend_keys=device)
    made._t, made._device = plain, device
    if kind is torch.nn.Parameter:
        made._is_param = True
    machine.gpu(device).memory.keep(plain)
    return made


def unwrap(x: Any) -> Any:
    return x._t if isinstance(x, GpuTensor) else x


def make_subclass(cls: type, data: torch.Tensor, require_grad: bool = False, **more: Any) -> torch.Tensor:
    """Replaces Tensor._make_subclass, which bitsandbytes and Parameter use."""
    if isinstance(data, GpuTensor):
        return wrap(data._t, data.device, cls, require_grad)
    return _make_subclass(cls, data, require_grad, **more)


def get_data(self: torch.Tensor) -> Any:
    return _plain_data.__get__(self)


def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """Sets Tensor.data, also from a tensor on another device. The tensor stays the same object, as `Module.to` requires."""
    if isinstance(self, GpuTensor) and isinstance(value, GpuTensor):
        _plain_data.__set__(self, value)
        self._t, self._device = value._t, value._device
    elif isinstance(self, GpuTensor) or isinstance(value, GpuTensor):
        kind = _class_of(self)
        if isinstance(value, GpuTensor):
            new: Any = wrap(value._t, value.device, kind, self.requires_grad)
        else:
            new = _make_subclass(kind, value, self.requires_grad)
        grad, ours = self.grad, ("_t", "_device", "_is_param")
        vars(new).update({key: one for key, one in vars(self).items() if key not in ours})
        torch.utils.swap_tensors(self, new)
        if grad is not None:  # moves the gradient, which would otherwise stay on its old device
            self.grad = grad.to(value.device)
    else:
        _plain_data.__set__(self, value)


# ------------------------------------------------------------------------------------------ moves


def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces Tensor.to."""
    device = dtype = None
    flags = [x for x in args if isinstance(x, bool)]
    for x in (*args, kwargs.get("other"), kwargs.get("device"), kwargs.get("dtype")):
        if isinstance(x, torch.Tensor):
            device, dtype = x.device, x.dtype
        elif isinstance(x, torch.dtype):
            dtype = x
        elif isinstance(x, str | torch.device | int) and not isinstance(x, bool):
            device = machine.device(x)
    non_blocking = bool(kwargs.get("non_blocking")) or flags[:1] == [True]
    copy = bool(kwargs.get("copy")) or flags[1:2] == [True]
    if device is None or device == self.device:
        if dtype is None or dtype == self.dtype:
            return self.clone() if copy else self
        return _plain_to(self, dtype)
    if "cuda" not in (device.type, self.device.type):
        return _plain_to(self, *args, **kwargs)
    if not (torch.is_grad_enabled() and self.requires_grad):
        return _moved(self, device, dtype, non_blocking)
    return _Move.apply(self, device, dtype, non_blocking)


def _moved(
    x: torch.Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
) -> torch.Tensor:
    if device.type != "cuda":
        waits("copy to the host")
    elif not isinstance(x, GpuTensor) and not (non_blocking and is_pinned(x)):
        waits("copy from the host")
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        plain = unwrap(x).detach().to(dtype=dtype or x.dtype, copy=True)
    return wrap(plain, device) if device.type == "cuda" else plain


def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    """Replaces Tensor.cuda."""
    return to(self, machine.device(device), non_blocking=non_blocking)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool
    ) -> torch.Tensor:
        ctx.back = x.device, x.dtype
        return _moved(x, device, dtype, non_blocking)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        device, dtype = ctx.back
        return grads[0].to(device).to(dtype), None, None, None


def pin_memory(self: torch.Tensor, *_: Any) -> torch.Tensor:
    """Replaces Tensor.pin_memory with a copy that is marked as pinned."""
    pinned: Any = self.clone()
    pinned._pinned = True
    return pinned


def is_pinned(self: torch.Tensor, *_: Any) -> bool:
    return getattr(self, "_pinned", False)


# ------------------------------------------------------------------------------------------ operations


class Mode(TorchDispatchMode):
    """Sends operations without a GPU tensor to `run`, because some operations create one (torch.zeros(3, device="cuda"))."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Makes CUDA's checks of an operation, and computes it on the plain tensors."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    given = kwargs.get("device")
    if given is not None and torch.device(given).type != "cuda":
        given = None  # autograd passes the device that C++ knows, which is the CPU
    device = given and machine.device(given)
    # `barrier` itself creates a CPU tensor
    if func.namespace == "c10d" and func._schema.name != "c10d::barrier":
        nccl.check(tensors)
    if ours := [x for x in tensors if isinstance(x, GpuTensor)]:
        device = device or ours[0].device
        _check(func, args, kwargs, tensors, ours)
    elif device is None:
        made = func(*args, **kwargs)
        if not tensors and isinstance(made, torch.Tensor) and torch._C._current_graph_task_id() != -1:
            # For an output without a gradient, autograd makes zeros, which CUDA would create on the output's GPU.
            made._of_any_device = True
        return made
    assert device is not None
    random = _draws(func)
    if given is not None:
        kwargs = {**kwargs, "device": CPU}
    plain_args, plain_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    if not tensors:
        _require(func, plain_args, plain_kwargs, device)
    if random:
        plain_kwargs = _with_generator(func, plain_args, plain_kwargs, device)

    def compute() -> Any:
        if func in PRODUCTS:
            return _product(*plain_args, **plain_kwargs)
        if random == "default":
            return _with_default_generator(func, plain_args, plain_kwargs, device)
        return func(*plain_args, **plain_kwargs)

    if graph := machine.graph:
        memory = machine.gpu(device).memory

        def place(x: Any) -> Any:
            return graph.place(x._t, memory) if isinstance(x, GpuTensor) else x

        out = graph.record(func, plain_args, plain_kwargs, tree_map(place, (args, kwargs)), compute)
    else:
        out = compute()
    same = {id(x._t): x for x in ours}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, GpuTensor):
            return x
        return same[id(x)] if id(x) in same else wrap(x, device)

    return tree_map(wrapped, out)


def _check(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], ours: list[GpuTensor]) -> None:
    """Raises the error that CUDA would raise for an operation, if any. Counts the operations that make the host wait."""
    if func in COPIES:
        if func is aten.copy_.default:
            into, source = args[:2]
            if isinstance(source, GpuTensor) and not isinstance(into, GpuTensor):
                waits("copy to the host")
            elif not isinstance(source, GpuTensor) and source.dim() and not is_pinned(source):
                waits("copy from the host")
        return
    if func in INDEXED or func in PUT:
        _check_index(func, args)
        return
    if func.namespace == "c10d":  # nccl.check has checked the tensors of collectives
        return
    # CUDA accepts CPU tensors with zero dimensions
    of_cpu = [x for x in tensors if not isinstance(x, GpuTensor) and x.dim()]
    devices = dict.fromkeys(x.device for x in ours)
    devices |= dict.fromkeys(x.device for x in of_cpu if not hasattr(x, "_of_any_device"))
    if len(devices) > 1:
        first, second, *_ = devices
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! ({func})"
        )
    if func in READS and not (
        func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
    ):
        waits(READS[func])


def _check_index(func: Any, args: Any) -> None:
    self, indices = args[0], [x for x in args[1] if x is not None]
    if any(x.device not in (CPU, self.device) for x in indices):
        raise RuntimeError(
            f"indices should be either on cpu or on the same device as the indexed tensor ({self.device})"
        )
    values = args[2] if func in PUT else None
    if values is not None and values.dim() and values.device != self.device:
        raise RuntimeError(f"expected values on {self.device}, found {values.device}")
    if self.device.type != "cuda":
        return
    if any(x.device.type == "cpu" for x in indices):
        waits("index from the host")
    is_fill = values is not None and values.numel() == 1 and not isinstance(values, GpuTensor)
    if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not is_fill:
        waits("index by a mask")


def _require(func: Any, args: Any, kwargs: Any, device: torch.device) -> None:
    """Raises torch's error if a new tensor does not fit on the GPU, before the CPU allocates its memory."""
    numel = math.prod(args[0]) if args and isinstance(args[0], list | tuple | torch.Size) else 1
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    machine.gpu(device).memory.require(numel * dtype.itemsize)


@cache
def _draws(func: Any) -> str:
    """Returns the source of an operation's random numbers:

    its `generator`, torch's default, or "" if the operation is not random.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return ""
    return "generator" if any(x.name == "generator" for x in func._schema.arguments) else "default"


def _with_generator(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Returns the operation's arguments with a generator of the device. Raises torch's error for another device's generator."""
    places = [place for place, x in enumerate(func._schema.arguments) if x.name == "generator"]
    given = kwargs.get("generator")
    if places and places[0] < len(args):
        given = args[places[0]]
    if given is None:
        return {**kwargs, "generator": machine.gpu(device).random.next()} if places else kwargs
    of = machine.generators.get(given._cdata, CPU)
    if of != device:
        raise RuntimeError(f"Expected a '{device}' device type for generator but found '{of}'")
    return kwargs


def _with_default_generator(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Computes an operation that takes no generator, with random numbers of the device's generator."""
    default = torch.default_generator
    state = default.get_state()
    default.set_state(machine.gpu(device).random.next().get_state())
    try:
        return func(*args, **kwargs)
    finally:
        default.set_state(state)


def _product(*args: Any, beta: float = 1, alpha: float = 1, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a matrix product in `out_dtype`, and adds a matrix if one is given. torch has this operation only on CUDA."""
    *added, a, b, dtype = args
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {a.dtype} != {b.dtype}")
    if dtype != a.dtype and not (dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16)):
        raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    made = alpha * (a.to(dtype) @ b.to(dtype))
    if added:
        made += beta * added[0]
    return made if out is None else out.copy_(made)
