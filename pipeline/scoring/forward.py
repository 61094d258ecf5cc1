"""Runs forward passes of prompts with completions: groups rows, and returns hidden states.

Rows of similar length share a micro-batch, and completions to one prompt share a row (models/packing.py). Micro-batches and
shared rows change results only by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar

import torch
from torch import Tensor

from pipeline.models.adapters import SharedBase
from pipeline.models.packing import micro_batches, pack_alone, pack_together, packs_that_pay

# Maximum tokens of a forward pass without gradients. Such a pass needs memory for one layer's activations, about 100 KB per token
# for a base of 8B parameters.
FORWARD_TOKENS = {"cpu": 4096, "cuda": 16384}
# Maximum tokens of a row with several completions. The attention mask of such a row has up to PACK_TOKENS squared entries.
PACK_TOKENS = 4096


@dataclass
class Sequences:
    """Prompts with completions, padded on the right: B rows with T tokens."""

    indices: Tensor  # (B,) indices of the rows in the global batch
    prompts: Tensor  # (B,) number of the row's prompt: the smallest index among all rows with this prompt
    input_ids: Tensor  # (B, T) prompt and completion
    starts: Tensor  # (B,) length of the prompt, which is the position of the first action
    counts: Tensor  # (B,) length of the completion, including its end-of-sequence token
    mask: Tensor  # (B, R) bool, True at actions; made from lengths, as completions may contain the pad id

    def __len__(self) -> int:
        return len(self.indices)

    def lengths(self, packs: Sequence[Sequence[int]] | None = None) -> list[int]:
        """Returns the number of tokens of each row, or of each pack of rows with one shared prompt."""
        starts, counts = self.starts.tolist(), self.counts.tolist()
        if packs is None:
            packs = [[row] for row in range(len(self))]
        return [starts[pack[0]] + sum(counts[row] for row in pack) for pack in packs]

    def take(self, rows: Sequence[int]) -> Self:
        """Returns some of the rows, trimmed to the longest of them."""
        index = torch.as_tensor(rows, device=self.indices.device)
        width = int((self.starts + self.counts)[index].max())
        actions = int(self.counts[index].max())
        tensors = {}
        for field in fields(self):
            tensor = getattr(self, field.name)[index]
            if tensor.dim() == 2:
                tensor = tensor[:, : width if field.name == "input_ids" else actions]
            tensors[field.name] = tensor
        return type(self)(**tensors)


def collate_ids(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    device: torch.device,
    indices: Sequence[int] | None = None,
    pad: int = 0,
) -> Sequences:
    """Returns the Sequences of prompts with completions. Both arguments are lists of token ids.

    Args:
        indices: each row's index in the global batch of an update. By default, the indices are 0, 1, 2, ...
        pad: id of the padding token.
    """
    token_ids = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    width, actions = max(map(len, token_ids)), max(map(len, completions))
    counts = torch.tensor([len(c) for c in completions], device=device)
    indices = range(len(token_ids)) if indices is None else indices
    numbers: dict[tuple[int, ...], int] = {}
    prompt_numbers = [numbers.setdefault(tuple(p), index) for p, index in zip(prompts, indices, strict=True)]
    return Sequences(
        indices=torch.tensor(indices, device=device),
        prompts=torch.tensor(prompt_numbers, device=device),
        input_ids=torch.tensor([ids + [pad] * (width - len(ids)) for ids in token_ids], device=device),
        starts=torch.tensor([len(p) for p in prompts], device=device),
        counts=counts,
        mask=torch.arange(actions, device=device) < counts.unsqueeze(-1),
    )


AnySequences = TypeVar("AnySequences", bound=Sequences)


def action_states(shared: SharedBase, role: str | None, sequences: Sequences, last: bool = False) -> Tensor:
    """Returns the hidden states (B, R + 1, H) of a role before each action, and after the last action.

    Args:
        role: a role, or None for the bare base.
        last: whether to return only the states (B, 1, H) after the last action.
    """
    rows = (sequences.input_ids, sequences.starts, sequences.counts, sequences.mask.shape[1])
    packs = in_packs(shared, sequences, range(len(sequences)))
    batch = pack_together(*rows, packs) if len(packs) < len(sequences) else pack_alone(*rows)
    return shared.states(role, batch.ends() if last else batch)


def in_packs(
    shared: SharedBase,
    sequences: Sequences,
    rows: Sequence[int],
    completions: int | None = None,
    tokens: int | None = None,
) -> list[list[int]]:
    """Groups rows of the sequences into packs of completions to one prompt, if packs save time and the base supports them.

    Args:
        completions, tokens: maximum numbers of completions and of tokens in a pack.
    """
    index = torch.as_tensor(rows, dtype=torch.long, device=sequences.prompts.device)
    prompts = sequences.prompts[index].tolist()
    if len(set(prompts)) == len(prompts) or not shared.can_pack:
        return [[row] for row in rows]
    starts, counts = sequences.starts[index].tolist(), sequences.counts[index].tolist()
    tokens = min(tokens or PACK_TOKENS, PACK_TOKENS)
    packs = packs_that_pay(prompts, starts, counts, shared.hidden_size, completions, tokens)
    return [[rows[i] for i in pack] for pack in packs]


def parts_of(
    shared: SharedBase, sequences: AnySequences, completions: int | None = None, tokens: int | None = None
) -> Iterator[tuple[list[int], AnySequences]]:
    """Yields (row indices, sequences) of each micro-batch of a forward pass without gradients.

    Args:
        completions, tokens: maximum numbers of completions and of tokens in a micro-batch. `tokens` is FORWARD_TOKENS by default.
    """
    tokens = tokens or FORWARD_TOKENS[shared.device.type]
    for rows in micro_batches_of(shared, sequences, range(len(sequences)), completions, tokens):
        yield rows, sequences.take(rows)


def micro_batches_of(
    shared: SharedBase,
    sequences: Sequences,
    rows: Sequence[int],
    completions: int | None = None,
    tokens: int | None = None,
) -> list[list[int]]:
    """Splits rows of the sequences into micro-batches, without splitting packs.

    Args:
        completions, tokens: maximum numbers of completions and of tokens in a micro-batch. Padding tokens count.
    """
    packs = in_packs(shared, sequences, rows, completions, tokens)
    sizes = [len(pack) for pack in packs]
    batches = micro_batches(sequences.lengths(packs), completions, tokens, shared.device.type, sizes)
    return [[row for i in batch for row in packs[i]] for batch in batches]
