"""Rollouts: prompts in, sampled completions out, through one small interface (`Engine`).

Sampling is pure: softmax(logits / temperature), no top-k, no top-p, no repetition penalty. Anything else samples from
another distribution than the one whose log-probs enter the loss, and the estimated KL to the reference goes negative.

A completion depends on seed, episode number, prompt and policy, and on nothing else: each episode has its own stream of
random numbers (a counter-based generator keyed by seed and episode), so that batch composition and order, rows that
ended and the number of workers do not change a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from pipeline.models.adapters import SharedBase
from pipeline.models.logprobs import bar
from pipeline.models.tokenizer import eos_ids


@dataclass(frozen=True)
class Sampling:
    """How to sample."""

    max_new_tokens: int
    eos: tuple[int, ...]  # every token id that ends a completion
    min_new_tokens: int = 0  # until then, `eos` has probability 0
    temperature: float = 1.0  # 0: greedy
    seed: int = 0

    @classmethod
    def of(cls, args: Any, tokenizer: Any, shared: SharedBase, eos: Sequence[int] | None = None) -> Sampling:
        """Sampling with the settings of a job.

        Args:
            args: a PPOConfig, or other settings with the same names.
            eos: token ids that end a completion; ids without a logit are dropped. None: those of the tokenizer and the
                base's generation config.
        """
        ids = eos_ids(tokenizer, shared.base.generation_config) if eos is None else eos
        ends = tuple(i for i in ids if i < shared.vocab_size)
        return cls(args.response_length, ends, args.min_new_tokens, args.temperature, args.seed)


@dataclass
class Completion:
    """One sampled completion."""

    tokens: list[int]  # token ids, the end-of-sequence token included
    ended: bool  # False: truncated at the length limit
    # The sampler's, in nats. Compared with the trainer's, never used as old log-probs: they differ from the training
    # forward's by rounding, and the first ratio must be 1.
    logprobs: list[float]


class Engine(Protocol):
    """A sampler, as the trainer needs it. Completions must depend on seed, episode, prompt and policy alone."""

    def sync(self) -> None:
        """Called when the policy has changed: later calls of `generate` sample from the new one."""

    def generate(
        self, prompts: Sequence[Sequence[int]], episodes: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """One completion to each prompt (token ids), in their order; `episodes` are the episodes' numbers in the run."""


class TransformersEngine:
    """Decodes on the shared base itself: no second copy of any weight, nothing to synchronise.

    Prompts are sorted by length and decoded `rows` at a time with a KV cache. They are padded on the left, so that the
    cache is one block and sliding windows are right; positions count from each row's first token. Once a quarter of a
    batch's rows have ended, they are removed from it.

    Args:
        role: the role that samples; None: the bare base.
        pad: token id that fills rows up.
    """

    def __init__(self, shared: SharedBase, role: str | None = "policy", rows: int = 64, pad: int = 0) -> None:
        self.shared, self.role, self.rows, self.pad = shared, role, rows, pad

    def sync(self) -> None:
        """Does nothing: the adapter that is trained is the one that samples."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], episodes: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        completions: dict[int, Completion] = {}
        with self.shared.use(self.role):
            for start in range(0, len(order), self.rows):
                batch = order[start : start + self.rows]
                decoded = self._decode([prompts[i] for i in batch], [episodes[i] for i in batch], sampling)
                completions.update(zip(batch, decoded, strict=True))
        return [completions[i] for i in range(len(prompts))]

    def _decode(
        self, prompts: list[Sequence[int]], episodes: list[int], sampling: Sampling
    ) -> list[Completion]:
        """One completion to each prompt of a batch."""
        device, limit = self.shared.device, sampling.max_new_tokens
        ids, mask = pad_left(prompts, self.pad, room=limit, device=device)
        width = ids.shape[1]
        padded = not bool(mask[:, :width].all())
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        noise = torch.from_numpy(uniforms(sampling.seed, episodes, limit)).to(device)
        cache = room_for(self.shared, width + limit)
        tokens = torch.zeros(len(prompts), limit, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(prompts), limit, device=device)
        lengths = torch.full((len(prompts),), limit, device=device)
        eos = torch.tensor(sampling.eos, device=device)
        rows = torch.arange(len(prompts), device=device)  # indices of those still in the cache
        live = torch.ones(len(prompts), dtype=torch.bool, device=device)
        for step in range(limit):
            attention = mask[:, : width + step] if padded else None
            out = self.shared.body(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            logits = self.shared.logits(out.last_hidden_state[:, -1])  # of the last position only
            barred = sampling.eos if step < sampling.min_new_tokens else ()
            token, logprob = sample(logits, noise[rows, step], sampling.temperature, barred)
            tokens[rows, step], logprobs[rows, step] = token, logprob
            ending = torch.isin(token, eos) & live
            lengths[rows[ending]] = step + 1
            live &= ~ending
            n_live = int(live.sum())
            if n_live == 0:
                break
            if n_live <= 0.75 * len(rows):  # copying the cache pays once a quarter of the rows are gone
                rows, mask, token, positions, cache = _live_rows(live, rows, mask, token, positions, cache)
                live = live[live]
            ids, positions = token.unsqueeze(-1), positions[:, -1:] + 1
        ended = torch.isin(tokens[torch.arange(len(prompts), device=device), lengths - 1], eos)
        return [
            Completion(tokens=t[:n], ended=e, logprobs=p[:n])
            for t, n, e, p in zip(
                tokens.tolist(), lengths.tolist(), ended.tolist(), logprobs.tolist(), strict=True
            )
        ]


def sample(
    logits: Tensor, noise: Tensor, temperature: float, barred: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Token ids (B,) and their log-probs (B,) from logits (B, V), by inverse transform sampling.

    Args:
        noise: (B,) uniform numbers in [0, 1).
        temperature: divides the logits; 0: greedy.
        barred: token ids of probability 0.
    """
    if barred:
        logits = bar(logits, torch.ones(len(logits), dtype=torch.bool, device=logits.device), barred)
    if temperature == 0:
        token = logits.argmax(-1)
        return token, logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    probabilities = (logits / temperature).softmax(-1)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # right=True: the first index *above* the noise, so that a token of probability 0 is never drawn
    token = torch.searchsorted(cumulative, noise.unsqueeze(-1) * cumulative[:, -1:], right=True)
    token = token.clamp(max=logits.shape[-1] - 1)
    return token.squeeze(-1), probabilities.gather(-1, token).log().squeeze(-1)


def uniforms(seed: int, episodes: Sequence[int], count: int) -> np.ndarray:
    """(len(episodes), count) random numbers in [0, 1), each row a function of seed and episode alone."""
    rows = [
        np.random.Generator(np.random.Philox(key=np.array([seed, e], dtype=np.uint64))).random(count)
        for e in episodes
    ]
    return np.stack(rows)


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, room: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids (B, T) padded on the left, and a mask (B, T + room): 1 on tokens and on the room behind them."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * (len(row) + room) for row in rows], device=device)
    return ids, mask


def _live_rows(
    live: Tensor, rows: Tensor, mask: Tensor, token: Tensor, positions: Tensor, cache: DynamicCache
) -> tuple[Tensor, Tensor, Tensor, Tensor, DynamicCache]:
    """The state of a batch, reduced to its live rows; the cache in place."""
    index = live.nonzero().squeeze(-1)
    cache.batch_select_indices(index)
    return rows[index], mask[index], token[index], positions[index], cache


def room_for(shared: SharedBase, tokens: int) -> DynamicCache:
    """An empty KV cache with room for `tokens` positions; layers with a sliding window keep transformers' class."""
    cache = DynamicCache(config=shared.base.config)
    cache.layers = [Room(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class Room(DynamicLayer):
    """A DynamicLayer that is allocated once, where its parent makes a longer copy of itself at every token.

    Blocks of ever new sizes cost time, and on a GPU leave holes that no later block fits into. Overrides what transformers
    5.23 calls in a decoding loop. Remove when its StaticCache has a length to look at only as much as is filled.

    Args:
        tokens: positions that there is room for. More raise RuntimeError.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.all_keys, self.all_values = (
            states.new_empty(*states.shape[:-2], self.tokens, states.shape[-1])
            for states in (key_states, value_states)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.all_keys[..., start : start + key_states.shape[-2], :] = key_states
        self.all_values[..., start : start + value_states.shape[-2], :] = value_states
        self._show(start + key_states.shape[-2])
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, moved to the front: the room stays as it is."""
        length = self.get_seq_length()
        self.all_keys[: len(indices), ..., :length, :] = self.keys[indices]
        self.all_values[: len(indices), ..., :length, :] = self.values[indices]
        self.all_keys, self.all_values = self.all_keys[: len(indices)], self.all_values[: len(indices)]
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = self.all_keys[..., :length, :], self.all_values[..., :length, :]
