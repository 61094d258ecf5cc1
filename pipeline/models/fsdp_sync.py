"""Makes all ranks that share one sharded base (models/shards.py) run the same number of forwards.

Each forward and each backward of a sharded base gathers every layer from all ranks. If one rank ran fewer forwards, the
other ranks would wait forever. A rank runs fewer forwards if its completions end earlier, if it has fewer micro-batches, or when
rank 0 alone checks the saved adapter. Therefore, before each forward, the ranks all-reduce (MAX) a code of their next
step: nothing, a forward with gradients (and its role), or a forward without gradients. A rank with a smaller code joins with
forwards of one token until all codes are equal. Each rank calls `catch_up` before any other collective, as `all_reduce` and
`gather` do. `catch_up` returns when no rank has a forward left to run.

A rank that joins a forward with gradients runs the matching backward immediately. Therefore a rank with more work, as in ppo,
must run the backward of a forward before its next forward. In TRL's stages, all ranks have the same number of batches.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Codes of a rank's next step. A forward with gradients has the code 1 + the index of its role.
NOTHING, WITHOUT_GRADIENTS = 0, 1 << 20


class Lockstep:
    """Makes all ranks run the same forwards of `body`.

    Args:
        body: the sharded part of the base, called with `input_ids` (B, T).
    """

    def __init__(self, body: nn.Module) -> None:
        self.body = body
        # A SharedBase with the same roles on all ranks, or None if the same adapter is always active.
        self.shared: Any = None
        # The group communicates between CPUs, so that no rank waits for a GPU. The timeout is long, because a rank may have to
        # wait for rollout workers. The process that started the ranks detects the death of a rank.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self.joining = False
        body.register_forward_pre_hook(self._before, prepend=True)  # called before FSDP gathers a layer

    def _before(self, body: nn.Module, args: Any) -> None:
        if self.joining:
            return
        own_code = WITHOUT_GRADIENTS
        if torch.is_grad_enabled():
            own_code = 1 + (self._roles.index(self.shared.role) if self.shared else 0)
        while (code := self._agree(own_code)) != own_code:
            self._join(code)

    @property
    def _roles(self) -> list[str | None]:
        return [None, *(self.shared.roles if self.shared else ())]

    def _agree(self, own_code: int) -> int:
        """Returns the largest code over all ranks. Forwards without gradients have the largest code, so they run first."""
        code = torch.tensor(own_code)
        dist.all_reduce(code, op=dist.ReduceOp.MAX, group=self.group)
        return int(code)

    def catch_up(self) -> None:
        """Joins the other ranks' forwards until no rank has a forward left to run. Every rank must call this method."""
        while code := self._agree(NOTHING):
            self._join(code)

    def _join(self, code: int) -> None:
        """Runs a forward of one token. If the forward needs gradients, also runs its backward, which adds 0 to the gradients."""
        learns = code != WITHOUT_GRADIENTS
        role = self.shared.use(self._roles[code - 1]) if self.shared and learns else nullcontext()
        ids = torch.zeros(1, 1, dtype=torch.long, device=next(self.body.parameters()).device)
        self.joining = True
        try:
            with torch.set_grad_enabled(learns), role:
                hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
            if hidden.requires_grad:
                hidden.backward(torch.zeros_like(hidden))
        finally:
            self.joining = False


# The Lockstep of this process's base, or None if the base is not sharded. shards.py sets this variable.
current: Lockstep | None = None


def catch_up() -> None:
    """Runs the forwards of a sharded base for which other ranks wait. Every rank must call this function before a collective."""
    if current is not None:
        current.catch_up()


def world() -> tuple[int, int]:
    """Returns (rank, number of workers), or (0, 1) if torch.distributed is not in use."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_reduce(x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Sums `x` over the workers, or reduces it by `op`. Works in place, and returns `x`."""
    if world()[1] > 1:
        catch_up()
        dist.all_reduce(x, op=op)
    return x


def gather(value: Any) -> list[Any]:
    """Returns the list of all workers' values, on every worker. Values must be small Python objects."""
    values = [value] * world()[1]
    if len(values) > 1:
        catch_up()
        dist.all_gather_object(values, value)
    return values
