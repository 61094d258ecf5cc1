"""Forward passes of episodes: grouping of rows, and hidden states.

Rows of similar length share a micro-batch, and completions to one prompt share a row (models/packing.py). Both change results
only by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeline.models.adapters import SharedBase
from pipeline.models.packing import alone, micro_batches, packed, packs_that_pay
from pipeline.ppo.episodes import Episodes

# Maximum tokens of a forward pass without gradients. It holds one layer's activations, about 100 KB per token at 8B.
FORWARD_TOKENS = {"cpu": 4096, "cuda": 16384}
# Maximum tokens of a row with several completions. The size of its attention mask is the square of this number.
PACK_TOKENS = 4096


def states(shared: SharedBase, role: str | None, part: Episodes, last: bool = False) -> Tensor:
    """Returns the hidden states (B, R + 1, H) of a role before each action, and after the last.

    Args:
        role: None means the bare base.
        last: only the states (B, 1, H) after the last action.
    """
    rows = (part.input_ids, part.starts, part.counts, part.mask.shape[1])
    packs = in_packs(shared, part, range(len(part)))
    batch = packed(*rows, packs) if len(packs) < len(part) else alone(*rows)
    return shared.states(role, batch.ends() if last else batch)


def in_packs(
    shared: SharedBase,
    episodes: Episodes,
    rows: Sequence[int],
    completions: int | None = None,
    tokens: int | None = None,
) -> list[list[int]]:
    """Groups `rows` of the episodes into packs of completions to one prompt, if this saves time and the base supports it.

    Args:
        completions, tokens: limits of a pack with several completions.
    """
    index = torch.as_tensor(rows, dtype=torch.long, device=episodes.prompts.device)
    prompts = episodes.prompts[index].tolist()
    if len(set(prompts)) == len(prompts) or not shared.can_pack:
        return [[row] for row in rows]
    starts, counts = episodes.starts[index].tolist(), episodes.counts[index].tolist()
    tokens = min(tokens or PACK_TOKENS, PACK_TOKENS)
    packs = packs_that_pay(prompts, starts, counts, shared.hidden_size, completions, tokens)
    return [[rows[i] for i in pack] for pack in packs]


def parts_of(
    shared: SharedBase, episodes: Episodes, completions: int | None = None, tokens: int | None = None
) -> Iterator[tuple[list[int], Episodes]]:
    """Yields (rows, their episodes) of each micro-batch of a pass without gradients. By default, it has FORWARD_TOKENS."""
    tokens = tokens or FORWARD_TOKENS[shared.device.type]
    for rows in micro_batches_of(shared, episodes, range(len(episodes)), completions, tokens):
        yield rows, episodes.take(rows)


def micro_batches_of(
    shared: SharedBase,
    episodes: Episodes,
    rows: Sequence[int],
    completions: int | None = None,
    tokens: int | None = None,
) -> list[list[int]]:
    """Splits `rows` of the episodes into micro-batches, which do not split packs.

    Args:
        completions, tokens: limits of a micro-batch; padding counts as tokens.
    """
    packs = in_packs(shared, episodes, rows, completions, tokens)
    held = [len(pack) for pack in packs]
    batches = micro_batches(episodes.lengths(packs), completions, tokens, shared.device.type, held)
    return [[row for i in batch for row in packs[i]] for batch in batches]
