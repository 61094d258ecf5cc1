"""The state of a pretended GPU: memory in use, random numbers, counts of host reads, streams and graphs."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

GIB = 2**30
BLOCK = 512  # torch's allocator rounds the bytes of each tensor up to a multiple of BLOCK
CONTEXT = GIB // 2  # bytes of GPU memory for CUDA's context
PHILOX_STEP = 4  # added to a generator's offset by each random kernel of torch

# counts of operations that made the host wait for a GPU, by name: item, tolist, copy to the host, ...
host_reads: Counter[str] = Counter()


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `change` to each leaf of lists, tuples and dicts. torch's own tree_map takes five times as long."""
    if tree.__class__ in (list, tuple):
        return tree.__class__([tree_map(change, x) for x in tree])
    if tree.__class__ is dict:
        return {key: tree_map(change, x) for key, x in tree.items()}
    return change(tree)


def tree_leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, tree)
    return found


class Memory:
    """Counts the bytes of a GPU's live tensors. Tensors that share a storage are counted once.

    Unlike torch's allocator, this counter ignores fragmentation: `reserved` is the maximum in use since `empty_cache`.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.owners: Counter[int] = Counter()  # address of a storage -> number of tensors that use it
        self.bytes_of: dict[int, int] = {}
        self.references: dict[int, weakref.ref[torch.Tensor]] = {}
        self.allocated = self.reserved = 0
        self.peak = self.reserved_peak = 0

    def require(self, size: int) -> None:
        """Raises torch's error if `size` bytes do not fit."""
        if CONTEXT + self.allocated + size > self.total:
            free = max(self.total - CONTEXT - self.allocated, 0) / GIB
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB. GPU 0 has a total capacity of "
                f"{self.total / GIB:.2f} GiB of which {free:.2f} GiB is free."
            )

    def keep(self, tensor: torch.Tensor) -> None:
        """Counts a tensor's storage until all tensors that share it are deleted."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or id(tensor) in self.references:
            return
        if address not in self.bytes_of:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self.require(size)
            self.bytes_of[address] = size
            self.allocated += size
            self.reserved = max(self.reserved, self.allocated)
            self.peak = max(self.peak, self.allocated)
            self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.owners[address] += 1
        key = id(tensor)

        def drop(_: Any) -> None:
            del self.references[key]
            self.owners[address] -= 1
            if not self.owners[address]:
                del self.owners[address]
                self.allocated -= self.bytes_of.pop(address)

        self.references[key] = weakref.ref(tensor, drop)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether the program still has a tensor with this storage."""
        return tensor.untyped_storage().data_ptr() in self.bytes_of or not tensor.numel()

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset_peak(self) -> None:
        self.peak, self.reserved_peak = self.allocated, self.reserved


class Random:
    """A GPU's random generator, with a seed and an offset like CUDA's Philox generator. The random numbers differ from CUDA's."""

    def __init__(self) -> None:
        self.seed, self.offset = 0, 0
        self.generator = torch.Generator()

    def next(self) -> torch.Generator:
        """Returns a CPU generator whose numbers depend only on seed and offset."""
        self.generator.manual_seed(hash((self.seed, self.offset)) & (2**63 - 1))
        self.offset += PHILOX_STEP
        return self.generator

    def state(self) -> torch.Tensor:
        return torch.tensor([self.seed, self.offset]).view(torch.uint8).clone()

    def set_state(self, state: torch.Tensor) -> None:
        if state.device.type != "cpu" or state.dtype != torch.uint8:
            raise TypeError("RNG state must be a torch.ByteTensor")
        if state.numel() != 16:
            raise RuntimeError("RNG state is wrong size")
        self.seed, self.offset = state.clone().view(torch.int64).tolist()


class Gpu:
    """One pretended GPU."""

    def __init__(self, index: int, total: int) -> None:
        self.device = torch.device("cuda", index)
        self.memory, self.random = Memory(total), Random()


class Machine:
    """The pretended GPUs of this process, and the state of each thread."""

    def __init__(self) -> None:
        self.gpus: list[Gpu] = []
        self.thread = threading.local()
        self.replays = 0  # number of graph replays
        self.pools: Counter[Any] = Counter()  # pool -> number of graphs that use it
        self.generators: dict[int, torch.device] = {}  # address of a torch.Generator -> its GPU

    @property
    def current(self) -> int:
        return getattr(self.thread, "index", 0)

    @property
    def graph(self) -> Graph | None:
        """Returns the graph that this thread records, or None."""
        return getattr(self.thread, "graph", None)

    def device(self, of: Any = None) -> torch.device:
        """Returns a device with its index, which is by default the index of the current GPU."""
        device = torch.device("cuda", of) if isinstance(of, int) else torch.device(of or "cuda")
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if not 0 <= index < len(self.gpus):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def gpu(self, of: Any = None) -> Gpu:
        device = self.device(of)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return self.gpus[device.index]


machine = Machine()


def waits(what: str) -> None:
    """Records that the host waits for a GPU. Raises CUDA's error during the capture of a graph."""
    if machine.graph:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    host_reads[what] += 1


class Stream:
    """A pretended CUDA stream. All operations run immediately, so no method has to wait."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = machine.device(device)

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None:
        waits("synchronize")


DEFAULT_STREAM = Stream.__new__(Stream)


def current_stream(device: Any = None) -> Stream:
    return getattr(machine.thread, "stream", DEFAULT_STREAM)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    machine.thread.stream = stream or before
    try:
        yield
    finally:
        machine.thread.stream = before


class Slot:
    """Refers to a tensor that a recorded operation creates."""

    def __init__(self, number: int) -> None:
        self.number = number


class Fixed:
    """Refers to a tensor that existed before the capture.

    A replay uses this tensor's memory, even if another tensor has reused it.
    """

    def __init__(self, tensor: torch.Tensor, memory: Memory) -> None:
        # a second tensor on the same memory, so that the graph does not keep the first tensor alive
        self.tensor, self.memory = tensor.detach(), memory

    def read(self) -> torch.Tensor:
        if not self.memory.holds(self.tensor):
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered (a replay's tensor is gone)"
            )
        return self.tensor


class Graph:
    """Replaces torch.cuda.CUDAGraph: captures operations, and replays them on the same tensors."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[int]]] = []
        self.results: dict[int, weakref.ref[torch.Tensor]] = {}
        # during the capture: id of a tensor -> slot, tensor
        self.made: dict[int, tuple[int, torch.Tensor]] = {}
        self.storages: set[int] = set()
        self.pool_id: Any = None
        self.ready = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if current_stream() is DEFAULT_STREAM:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        pool = pool or graph_pool_handle()
        if pool in machine.pools and machine.pools[pool] <= 0:
            # torch frees a memory pool together with the pool's last graph, and then rejects the pool's handle.
            raise RuntimeError(
                "it->second->use_count > 0 INTERNAL ASSERT FAILED at c10/cuda/CUDACachingAllocator.cpp"
            )
        machine.pools[pool] += 1
        self.pool_id = pool
        machine.thread.graph = self

    def capture_end(self) -> None:
        machine.thread.graph = None
        self.ready = True
        # On a real GPU, a capture computes nothing, so the memory is undefined until a replay.
        for number, tensor in self.made.values():
            self.results[number] = weakref.ref(tensor)
            if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() in self.storages:
                tensor.fill_(float("nan"))
        self.made = {}

    def place(self, tensor: torch.Tensor, memory: Memory) -> Slot | Fixed:
        """Returns a reference with which a replay finds a plain tensor."""
        if id(tensor) in self.made:
            return Slot(self.made[id(tensor)][0])
        return Fixed(tensor, memory)

    def record(self, func: Any, args: Any, kwargs: Any, spec: Any, run: Callable[[], Any]) -> Any:
        """Captures an operation on plain tensors. Returns tensors of the right shape with undefined values.

        Args:
            spec: (args, kwargs) with the `place` of each GPU tensor.
            run: computes the operation.
        """
        written = _written(func, args, kwargs)
        if written and any(x.untyped_storage().data_ptr() not in self.storages for x in written):
            out: Any = written[0] if len(written) == 1 else tuple(written)
        else:
            out = run()
        given = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        numbers = []
        for tensor in tree_leaves(out):
            number = -1
            if isinstance(tensor, torch.Tensor) and id(tensor) in self.made:
                number = self.made[id(tensor)][0]
            elif isinstance(tensor, torch.Tensor) and not any(tensor is x for x in written):
                address = tensor.untyped_storage().data_ptr()
                if address not in given:
                    self.storages.add(address)
                number = len(self.made)
                self.made[id(tensor)] = number, tensor
            numbers.append(number)
        self.operations.append((func, *spec, numbers))
        return out

    def replay(self) -> None:
        if not self.ready:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        machine.replays += 1
        values: dict[int, torch.Tensor] = {}

        def value(x: Any) -> Any:
            if isinstance(x, Slot):
                return values[x.number]
            return x.read() if isinstance(x, Fixed) else x

        with torch.no_grad():
            for func, args, kwargs, numbers in self.operations:
                out = func(*tree_map(value, args), **tree_map(value, kwargs))
                for number, tensor in zip(numbers, tree_leaves(out), strict=False):
                    if number >= 0:
                        values[number] = tensor
            for number, reference in self.results.items():
                result = reference()
                if result is not None and result.data_ptr() != values[number].data_ptr():
                    result.copy_(values[number])

    def pool(self) -> Any:
        return self.pool_id

    def reset(self) -> None:
        if self.pool_id is not None and self.ready:
            machine.pools[self.pool_id] -= 1
        self.operations, self.results, self.ready = [], {}, False

    def __del__(self) -> None:
        self.reset()


_pool_numbers = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pool_numbers)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors that an operation modifies."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    return found
