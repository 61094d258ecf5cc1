"""A KV cache whose rows come and go: each row has a slot of its own, and its own length.

A row's tokens lie at the beginning of its slot, prompts padded on the right. So a row never moves when another one joins or
grows, and where it ends the last row takes its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

FIRST = 64  # positions of a slot to begin with; doubled as rows need more


class Slots(DynamicLayer):
    """One layer's keys and values, (slots, heads, positions, features), grown by doubling.

    Overrides what transformers 5.23 calls in a forward. While prompts are read (`joining`), attention sees these alone; else
    each row has one new token, and sees its own slot.
    """

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            x.new_zeros(0, x.shape[1], 0, x.shape[3]) for x in (key_states, value_states)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        self.keys, self.values = (grown(x, cache.slots, cache.positions) for x in (self.keys, self.values))
        if cache.joining is not None:
            first, width = cache.joining, key_states.shape[2]
            self.keys[first : first + len(key_states), :, :width] = key_states
            self.values[first : first + len(value_states), :, :width] = value_states
            return key_states, value_states
        rows, seen = torch.arange(len(key_states), device=key_states.device), cache.longest + 1
        self.keys[rows, :, cache.lengths] = key_states[:, :, 0]
        self.values[rows, :, cache.lengths] = value_states[:, :, 0]
        return self.keys[: len(rows), :, :seen], self.values[: len(rows), :, :seen]

    def get_seq_length(self) -> int:
        return 0 if self.cache.joining is not None else self.cache.longest

    def move(self, to: int, row: int, length: int) -> None:
        for states in (self.keys, self.values):
            states[to, :, :length] = states[row, :, :length]


class SlotCache(DynamicCache):
    """The cache of all layers. `lengths` (B,) are the tokens that each of the B rows has in its slot."""

    def __init__(self, config: object, device: torch.device) -> None:
        super().__init__(config=config)
        if any(type(layer) is not DynamicLayer for layer in self.layers):
            raise TypeError("some layers have a cache of another kind")
        self.layers: list[Any] = [Slots(self) for _ in self.layers]
        self.device = device
        self.counts: list[int] = []  # `lengths` on the host
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)
        self.slots, self.positions, self.longest = 0, 0, 0
        self.joining: int | None = None  # the first slot of the rows whose prompts are being read

    def join(self, lengths: Sequence[int]) -> None:
        """Before the forward of prompts: slots for rows of these lengths, behind those that are there."""
        self.joining = len(self.counts)
        self._set([*self.counts, *lengths])

    def joined(self) -> None:
        """After it."""
        self.joining = None

    def step(self) -> None:
        """After a forward of one token a row."""
        self._set([length + 1 for length in self.counts])

    def leave(self, rows: Sequence[int]) -> list[int]:
        """Rows end; the last rows take their slots. Returns for each slot which row it had been."""
        order = list(range(len(self.counts)))
        for row in sorted(rows, reverse=True):  # so that the last one is never one that ends later
            last = order.pop()
            if row < len(order):
                order[row] = last
        for slot, row in enumerate(order):
            if slot != row:
                for layer in self.layers:
                    layer.move(slot, row, self.counts[row])
        self._set([self.counts[row] for row in order])
        return order

    def size_with(self, rows: int, longest: int) -> int:
        """Positions over all slots, once there are so many rows of up to so many tokens."""
        return doubled(self.slots, rows, 1) * doubled(self.positions, longest, FIRST)

    def _set(self, counts: list[int]) -> None:
        """Lengths, and room for one further token of each row."""
        self.counts, self.longest = counts, max(counts, default=0)
        self.lengths = torch.tensor(counts, dtype=torch.long, device=self.device)
        self.slots = doubled(self.slots, len(counts), 1)
        self.positions = doubled(self.positions, self.longest + 1, FIRST)


def doubled(size: int, needed: int, first: int) -> int:
    """`size`, or as often the double of it as is needed."""
    size = size or first
    while size < needed:
        size *= 2
    return size


def grown(states: Tensor, slots: int, positions: int) -> Tensor:
    """The states with room for so many slots and positions; zeros, because attention multiplies what it may not see by 0."""
    if states.shape[0] >= slots and states.shape[2] >= positions:
        return states
    larger = states.new_zeros(slots, states.shape[1], positions, states.shape[3])
    larger[: states.shape[0], :, : states.shape[2]] = states
    return larger
