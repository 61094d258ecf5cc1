"""Decoding steps of one shape, which a GPU can replay as a CUDA graph.

Python and CUDA take about 1 ms to launch the kernels of a decoder layer's step, longer than a GPU computes on them. A graph
launches all kernels of a step at once, but always with the same tensors, and so with the same number of rows and tokens. A
`Window` is a few steps of one such shape: K and V are written to a place that is itself a tensor, and attention looks at all
of the window's tokens through a mask, which opens one column a step. Its first step runs kernel by kernel, and then one is
recorded, which takes no longer than to launch it; the others are replayed. Between windows rows that have ended leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

# With fewer steps ahead, recording one takes longer than it saves.
FEWEST_REPLAYS = 4

Forward = Callable[
    [Tensor, Tensor, Tensor, DynamicCache], Tensor
]  # ids (B, 1), mask, positions, cache -> (B, H)


class Window:
    """The next steps of a batch whose rows stay together.

    Args:
        forward: (B, H) hidden states of one more token (B, 1) each, at positions (B, 1), with an additive mask.
        cache: of layers that `Room` allocates; it holds `first` tokens of each row.
        mask: (B, 1, 1, T), 0 on tokens and -inf on padding; T is at least `first + count`.
        positions: (B, 1) of the next tokens.
        count: the number of steps.
        record: makes graphs. None: every step runs kernel by kernel.
    """

    def __init__(
        self,
        forward: Forward,
        cache: DynamicCache,
        mask: Tensor,
        positions: Tensor,
        first: int,
        count: int,
        record: Recorder | None = None,
    ) -> None:
        self.forward, self.cache, self.first, self.left = forward, cache, first, count
        self.record = record
        self.replay: Callable[[], None] | None = None
        self.done = 0
        self.mask = mask[..., : first + count].clone()
        self.mask[..., first:] = float("-inf")
        self.token, self.positions = torch.zeros_like(positions), positions.clone()
        self.place = torch.full((1,), first, device=positions.device)
        for layer in cache.layers:
            layer.fix(self.place, first + count)

    def __call__(self, token: Tensor) -> Tensor:
        """(B, H) hidden states of the next tokens (B,). They are overwritten by the next call."""
        self.token.copy_(token.unsqueeze(-1))
        self.left, self.done = self.left - 1, self.done + 1
        if self.replay is not None:
            self.replay()
        else:
            self.hidden = self._step()
            if self.record is not None and self.left >= FEWEST_REPLAYS:
                self._try_to_record()
        return self.hidden

    def _step(self) -> Tensor:
        """One step, of operations on the device alone."""
        self.mask.index_fill_(-1, self.place, 0.0)
        hidden = self.forward(self.token, self.mask, self.positions, self.cache)
        self.place += 1
        self.positions += 1
        return hidden

    def _try_to_record(self) -> None:
        """Records a step, which does not run it; where that fails, all steps run kernel by kernel."""
        assert self.record is not None
        hidden = self.hidden
        recorded = self.record(self._step)
        self.record = None
        if recorded is not None:
            self.replay, output = recorded
            output.copy_(hidden)
            self.hidden = output

    def close(self) -> None:
        """Gives the cache back with the tokens that it holds now. To be called after the last step."""
        for layer in self.cache.layers:
            layer.fix(None, self.first + self.done)


class Recorder:
    """Records steps as CUDA graphs on a device, in one pool of memory; after a failure, none any more."""

    def __init__(self) -> None:
        self.works = True
        self.pool: Any = None
        self.stream: Any = (
            None  # one for all graphs: cuBLAS keeps a workspace for each stream that it has seen
        )
        self.graph: Any = None  # the newest; it keeps its memory alive

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor] | None:
        """(replay, the tensor that a replay writes); None if the step cannot be recorded, which is said once."""
        if not self.works:
            return None
        try:
            return self._capture(step)
        except (RuntimeError, ValueError) as error:
            self.works, self.graph = False, None
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            print(f"decoding without CUDA graphs: a step cannot be recorded ({why})", flush=True)
            return None

    def _capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        # Not `with torch.cuda.graph`, which collects garbage and returns free memory to the device: each time a second.
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        self.stream = stream = self.stream or torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads, Ray's for one, may go on using CUDA.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                output = step()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it fails, too, and says less than the step
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        return graph.replay, output
