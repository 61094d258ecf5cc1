"""Log-probs and entropies of actions from hidden states, through the lm head in chunks: (B, T, V) never exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from pipeline.models.adapters import SharedBase

LOGIT_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits computed at a time: 16 and 256 MiB of fp32


def per_action(
    shared: SharedBase,
    hidden: Tensor,
    targets: Tensor,
    early: Tensor,
    temperature: float,
    barred: tuple[int, ...],
    want_entropy: bool = False,
) -> Tensor:
    """(N,) fp32 log-probs of actions, or entropies of their distributions, in the role in use.

    The logits of a chunk of rows exist at a time, and none are kept for backward.

    Args:
        hidden: (N, H) hidden states, each one position before its action.
        targets: (N,) token ids of the actions.
        early: (N,) bool, on where `barred` token ids have probability 0.
        temperature: divides the logits.
        want_entropy: whether entropies are wanted instead of log-probs.
    """
    head = shared.base.get_output_embeddings()
    size = max(1, LOGIT_CHUNK.get(hidden.device.type, LOGIT_CHUNK["cpu"]) // shared.vocab_size)
    # Without actions, an empty result that is still part of the graph.
    chunks = [hidden.sum(-1).float() * 0.0] if len(hidden) == 0 else []
    for start in range(0, len(hidden), size):
        part = slice(start, start + size)
        run = partial(_from_logits, shared, targets[part], early[part], temperature, barred, want_entropy)
        if not torch.is_grad_enabled():
            chunks.append(run(hidden[part]))
        elif isinstance(head, BaseTunerLayer):  # an adapter on the lm head learns, too
            contexts = shared.checkpoint_contexts
            chunks.append(checkpoint(run, hidden[part], use_reentrant=False, context_fn=contexts))
        else:
            chunks.append(_RowWise.apply(hidden[part], run))
    return torch.cat(chunks)


def bar(logits: Tensor, rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits (N, V) with `tokens` at -inf in the rows where `rows` (N,) is on."""
    barred = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    barred[list(tokens)] = True
    return logits.masked_fill(rows.unsqueeze(-1) & barred, float("-inf"))


class _RowWise(torch.autograd.Function):
    """y (N,) = run(x) of hidden states x (N, H), where y[n] depends on x[n] alone and `run` has no trainable parameters.

    The gradient of sum(y) then holds every row's own derivative. It is computed in the forward, while the chunk's logits
    are in memory, and (N, H) is kept for backward instead of (N, V): two products with the lm head, where recomputing
    the logits takes three.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = run(leaf)
            (derivative,) = torch.autograd.grad(y.sum(), leaf)
        ctx.save_for_backward(derivative)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (derivative,) = ctx.saved_tensors
        return (grads[0].unsqueeze(-1) * derivative).to(derivative.dtype), None


def _from_logits(
    shared: SharedBase,
    targets: Tensor,
    early: Tensor,
    temperature: float,
    barred: tuple[int, ...],
    want_entropy: bool,
    hidden: Tensor,
) -> Tensor:
    """(N,) fp32 log-probs of `targets`, or entropies, of hidden states (N, H)."""
    logits = shared.logits(hidden)
    if temperature != 1.0:  # saves a pass over the largest tensor
        logits = logits / temperature
    if barred:
        logits = bar(logits, early, barred)
    if not want_entropy:
        return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)).sum(-1)
