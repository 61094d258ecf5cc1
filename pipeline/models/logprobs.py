"""Computes log-probs and entropies of actions from hidden states. Applies the lm head to one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGIT_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}  # logits per chunk: 16 MiB and 256 MiB in fp32


def per_action(
    shared: Any,
    hidden: Tensor,
    targets: Tensor,
    early: Tensor,
    temperature: float,
    barred: tuple[int, ...],
    want_entropy: bool = False,
) -> Tensor:
    """Returns the fp32 log-probs (1, N) of N actions with the active role, or log-probs and entropies (2, N).

    At any time, only the logits of one chunk are in memory. No logits are kept for backward.

    Args:
        shared: the SharedBase.
        hidden: (N, H) hidden states at the position before each action.
        targets: (N,) token ids of the actions.
        early: (N,) bool, True for actions that cannot be one of the token ids `barred`.
        want_entropy: whether to compute the entropies.
    """
    head = shared.base.get_output_embeddings()
    size = max(1, LOGIT_CHUNK[hidden.device.type] // shared.vocab_size)
    # If there are no actions, the result is empty, but must still be connected to autograd's graph.
    chunks = [hidden.new_zeros(1 + want_entropy, 0).float() + hidden.sum() * 0.0] if len(hidden) == 0 else []
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        run = partial(_from_logits, shared, targets[rows], early[rows], temperature, barred, want_entropy)
        if not torch.is_grad_enabled():
            chunks.append(run(hidden[rows]))
        elif isinstance(head, BaseTunerLayer):  # the adapter on the lm head may need gradients
            contexts = shared.checkpoint_contexts
            chunks.append(checkpoint(run, hidden[rows], use_reentrant=False, context_fn=contexts))
        else:
            chunks.append(_RowWise.apply(hidden[rows], run))
    return torch.cat(chunks, dim=1)


def bar_tokens(logits: Tensor, rows: Tensor, tokens: Sequence[int]) -> Tensor:
    """Returns logits (N, V) in which `tokens` are -inf in the rows selected by `rows` (N,) bool."""
    barred = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    barred[list(tokens)] = True
    return logits.masked_fill(rows.unsqueeze(-1) & barred, float("-inf"))


class _RowWise(torch.autograd.Function):
    """Computes y (K, N) = run(x) for hidden states x (N, H). y[:, n] must depend only on x[n]. `run` trains no parameters.

    If y[:, n] depends only on x[n], row n of the gradient of sum(y[k]) is the derivative of y[k, n]. The forward computes all K
    gradients while the chunk's logits are in memory. For backward, K tensors (N, H) are kept instead of the logits (N, V).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = run(leaf)
            derivatives = [torch.autograd.grad(row.sum(), leaf, retain_graph=True)[0] for row in y]
        ctx.save_for_backward(*derivatives)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        weighted = [g.unsqueeze(-1) * d for g, d in zip(grads[0], ctx.saved_tensors, strict=True)]
        return torch.stack(weighted).sum(0).to(ctx.saved_tensors[0].dtype), None


def _from_logits(
    shared: Any,
    targets: Tensor,
    early: Tensor,
    temperature: float,
    barred: tuple[int, ...],
    want_entropy: bool,
    hidden: Tensor,
) -> Tensor:
    """Returns (1, N) fp32 log-probs of `targets` for hidden states (N, H), or (2, N) with the entropies."""
    logits = shared.logits(hidden)
    if temperature != 1.0:  # for 1, skips a division that would read and write the largest tensor
        logits = logits / temperature
    if barred:
        logits = bar_tokens(logits, early, barred)
    normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normalizer
    if not want_entropy:
        return logprobs.unsqueeze(0)
    all_logprobs = logits - normalizer.unsqueeze(-1)
    # For a token with probability 0, probability * logit would be 0 * -inf = NaN.
    entropies = -(all_logprobs.exp() * all_logprobs.masked_fill(all_logprobs == float("-inf"), 0.0)).sum(-1)
    return torch.stack([logprobs, entropies])
