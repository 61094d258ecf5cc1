"""Replays decoding steps as CUDA graphs.

In a decoding step, Python and CUDA take about 1 ms to launch the kernels of one layer. The GPU runs these kernels in less time. A
CUDA graph launches all kernels of a step at once, but always on the same tensors. The numbers of rows and positions must
therefore not change. The first step of each shape runs kernel by kernel, the second is recorded, and later steps replay the
recorded step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import in_brief

FEWEST_REPLAYS = 4  # minimum number of replays that repay the time for recording
TOLERANCE = 1e-2  # maximum relative difference between a step and its first replay


class Steps:
    """Runs decoding steps. While the shape stays the same, replays a CUDA graph. After a failure, no step is replayed.

    Args:
        step: returns (B, H) hidden states for (rows, positions). Each call must read and write the same tensors.
        take_back: undoes a step's changes to the state, so that the same step can run again.
    """

    def __init__(self, step: Callable[[int, int], Tensor], take_back: Callable[[int], None]) -> None:
        self.step, self.take_back = step, take_back
        self.works = True
        self.proved = False  # whether a replay has been compared with a step that ran kernel by kernel
        self.key: Hashable = None
        self.replay: Callable[[], None] | None = None
        self.output: Tensor = torch.empty(0)  # the hidden states that each replay overwrites
        self.pool: Any = None  # memory pool of all graphs
        self.stream: Any = None  # one stream for all graphs, because cuBLAS allocates a workspace per stream
        self.graph: Any = None  # the newest graph, which owns the memory of its output

    def forget(self) -> None:
        """Stops replaying the current graph, because the tensors that it reads no longer exist."""
        # `graph` is not deleted, because torch cannot record into a memory pool that has no graph left.
        self.key = self.replay = None

    def __call__(self, key: Hashable, rows: int, seen: int, ahead: int) -> Tensor:
        """Runs a step. Returns the step's hidden states (B, H), which the next call may overwrite.

        Args:
            key: identifies the shape of the step.
            ahead: number of following steps that will have the same shape.
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
                self._fail("a replayed step returns other hidden states")
                self.take_back(rows)
                hidden = self.step(rows, seen)
        return hidden

    def _fail(self, reason: str) -> None:
        self.works = False
        self.forget()
        print(f"note: decoding without CUDA graphs: {reason}", flush=True)

    def _capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Records a step. Returns a function that replays the step, and the tensor to which each replay writes."""
        # Avoids `with torch.cuda.graph`, because it collects garbage and empties torch's memory cache, which takes a second.
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        self.stream = stream = self.stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # With "thread_local", other threads, such as Ray's, may use CUDA during the recording.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # hides the error of capture_end, which helps less
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        return graph.replay, output
