"""Decoding steps that a GPU can replay as a CUDA graph.

Python and CUDA take about 1 ms to launch the kernels of a decoder layer's step, longer than a GPU computes on them. A graph
launches all kernels of a step at once, but always with the same tensors, and so with the same rows and positions. The first
step of each shape runs kernel by kernel. The next one is recorded, and later ones are replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import in_brief

FEWEST_REPLAYS = 4  # with fewer steps left, recording takes longer than it saves
TOLERANCE = 1e-2  # maximum relative difference between the first replay and the step that it repeats


class Steps:
    """Runs steps, and replays them while their shape stays the same. After a failure it replays none.

    Args:
        step: returns (B, H) hidden states for (rows, positions). It reads and writes the same tensors each time.
        take_back: undoes the change of state of a step, so that the step can run again.
    """

    def __init__(self, step: Callable[[int, int], Tensor], take_back: Callable[[int], None]) -> None:
        self.step, self.take_back = step, take_back
        self.works = True
        self.proved = False  # whether a replay was compared with the step that it repeats
        self.key: Hashable = None
        self.replay: Callable[[], None] | None = None
        self.output: Tensor = torch.empty(0)  # the tensor that a replay writes
        self.pool: Any = None  # memory pool of all graphs
        self.stream: Any = None  # one stream for all graphs, because cuBLAS keeps a workspace for each
        self.graph: Any = None  # the newest graph, kept because it owns the memory, and keeps the pool in use

    def forget(self) -> None:
        """Replays the graph no more: the tensors that it uses no longer exist."""
        # `graph` stays, because torch records nothing more into a pool that no graph uses.
        self.key = self.replay = None

    def __call__(self, key: Hashable, rows: int, seen: int, ahead: int) -> Tensor:
        """Returns the (B, H) hidden states of a step. The next call overwrites them.

        Args:
            key: steps with the same key have the same shape.
            ahead: steps that are known to follow with this shape.
        """
        if key == self.key and self.replay:
            self.replay()
            return self.output
        if key != self.key:
            self.key, self.replay = key, None
        hidden = self.step(rows, seen)
        if ahead < FEWEST_REPLAYS or not self.works:
            return hidden
        try:
            self.replay, self.output = self._capture(lambda: self.step(rows, seen))
        except (RuntimeError, ValueError) as error:
            self._fail(f"a step cannot be recorded ({in_brief(error, 200)})")
            return hidden
        if not self.proved:
            self.take_back(rows)
            self.replay()
            self.proved = True
            if not (self.output - hidden).norm() <= TOLERANCE * hidden.norm():
                self._fail("a replayed step gives other hidden states")
                self.take_back(rows)
                hidden = self.step(rows, seen)
        return hidden

    def _fail(self, why: str) -> None:
        self.works = False
        self.forget()
        print(f"note: decoding without CUDA graphs: {why}", flush=True)

    def _capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Records a step. Returns (replay, the tensor that a replay writes)."""
        # Not `with torch.cuda.graph`, which takes a second each time to collect garbage and return free memory to the device.
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        self.stream = stream = self.stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads, such as Ray's, may continue to use CUDA.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # ending the capture may fail too, less clearly
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        return graph.replay, output
