"""Implements a KV cache for a batch that rows join and leave. Row i of the batch uses slot i of the cache.

Prompts are padded on the right, so no token attends to the padding. When a row joins or grows, no other row moves. When rows
leave, the last rows move into the free slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class Slots(DynamicLayer):
    """The keys and values of one layer, each a preallocated tensor (slots, heads, positions, features).

    Overrides the methods that transformers 5.23 calls in a forward. Even a layer with a sliding window stores all positions. A
    mask hides the positions outside the window.
    """

    def __init__(self, cache: SlotCache, sliding: bool) -> None:
        super().__init__()
        # Uses a weak reference, because a reference cycle would keep the cache in memory until Python's next garbage collection.
        self.cache, self.is_sliding = weakref.proxy(cache), sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        slots, positions = self.cache.slots, self.cache.positions
        # Uses zeros instead of uninitialized memory, because attention multiplies masked values by 0, and 0 * NaN would be NaN.
        self.keys, self.values = (
            x.new_zeros(slots, x.shape[1], positions, x.shape[3]) for x in (key_states, value_states)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of new tokens. Returns the keys and values to which these tokens attend."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, count = self.cache, len(key_states)
        for cached, new in ((self.keys, key_states), (self.values, value_states)):
            if cache.joining is not None:
                slots, prompts = cache.joining
                cached[slots, :, : new.shape[2]] = new[prompts]
            else:
                cached[cache.order[:count], :, cache.lengths[:count]] = new[:, :, 0]
        if cache.joining is not None:  # the tokens of a prompt attend only to this prompt
            return key_states, value_states
        return self.keys[:count, :, : cache.seen], self.values[:count, :, : cache.seen]

    def get_seq_length(self) -> int:
        return 0 if self.cache.joining is not None else self.cache.seen - 1

    def resize(self) -> None:
        """Reallocates the layer's tensors for the cache's new numbers of slots and positions."""
        if not self.is_initialized:
            return
        previous = self.keys, self.values
        self.lazy_initialization(*previous)
        for cached, states in zip((self.keys, self.values), previous, strict=True):
            cached[: states.shape[0], :, : states.shape[2]] = states


class SlotCache(DynamicCache):
    """The KV cache of all layers. Also stores, for each slot, the number of its tokens and its next input token."""

    def __init__(self, config: Any, slots: int, positions: int, device: torch.device) -> None:
        super().__init__(config=config)
        slot_types = (DynamicLayer, DynamicSlidingWindowLayer)
        # Layers without keys and values for each position, such as convolutions.
        self.other_layers = [layer for layer in self.layers if type(layer) not in slot_types]
        self.layers: list[Any] = [
            Slots(self, layer.is_sliding) if type(layer) in slot_types else layer for layer in self.layers
        ]
        self.slot_layers = [layer for layer in self.layers if isinstance(layer, Slots)]
        self.slots, self.positions = slots, positions
        self.order = torch.arange(slots, device=device)
        self.columns = torch.arange(positions, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)  # number of tokens in each slot
        self.newest = torch.zeros(slots, dtype=torch.long, device=device)  # next input token of each slot
        self.seen = 0  # number of positions to which the newest tokens attend
        # While prompts are being added: (new slots, index of each slot's prompt in the forward). Otherwise None.
        self.joining: tuple[Tensor, Tensor] | None = None

    def size_with(self, slots: int, positions: int) -> tuple[int, int]:
        """Returns the cache's (slots, positions), each doubled until at least `slots` and `positions` fit."""
        return double_until(self.slots, slots), double_until(self.positions, positions)

    def reserve(self, slots: int, positions: int) -> None:
        size = self.size_with(slots, positions)
        if size == (self.slots, self.positions):
            return
        added = size[0] - self.slots
        self.slots, self.positions = size
        self.order, self.columns = (torch.arange(count, device=self.order.device) for count in size)
        self.lengths, self.newest = (pad(values, (0, added)) for values in (self.lengths, self.newest))
        for layer in self.slot_layers:
            layer.resize()

    def keep(self, order: Sequence[int], filled: int) -> None:
        """Moves row `order[i]` to slot i. Rows that stay in place are not copied.

        Args:
            filled: number of tokens in the longest row.
        """
        index = torch.tensor(order, dtype=torch.long, device=self.order.device)
        if moves := [(slot, row) for slot, row in enumerate(order) if slot != row]:
            slot, row = torch.tensor(moves, device=self.order.device).T
            for layer in self.slot_layers:
                for states in (layer.keys, layer.values):
                    states[slot, :, :filled] = states[row, :, :filled]
        for layer in self.other_layers:
            layer.reorder_cache(index)
        for values in (self.lengths, self.newest):
            values[: len(order)] = values[index]


def double_until(size: int, needed: int) -> int:
    """Returns `size`, doubled until it is at least `needed`."""
    while size < needed:
        size *= 2
    return size


def live_first(live: Sequence[bool]) -> list[int]:
    """Returns the live rows in a new order, in which the last rows replace removed rows and no other rows move."""
    count = sum(live)
    movers = [row for row in range(count, len(live)) if live[row]]
    return [row if live[row] else movers.pop() for row in range(count)]
