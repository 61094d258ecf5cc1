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
from pipeline.models.lora import cast_once
from pipeline.models.tokenizer import eos_ids
from pipeline.ppo.batch import micro_batches
from pipeline.ppo.graphs import Recorder, Window


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


# Padded tokens in one forward of prompts: many keep the device busy, few keep the activations small beside the KV cache.
PREFILL_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 14}
# Decoding steps between two looks at which rows have ended. On a CPU looking is free, and a step is shorter with each row
# that leaves. A GPU waits for the host whenever it looks, and its steps are bound by launches more than by rows.
STEPS_PER_LOOK = {"cpu": 1, "cuda": 8}
# The same where steps are replayed as a CUDA graph, which is recorded anew after each look.
STEPS_PER_GRAPH = 32


class TransformersEngine:
    """Decodes on the shared base itself: no second copy of any weight, nothing to synchronise.

    Prompts are sorted by length and decoded `rows` at a time with a KV cache. They are padded on the left, so that the
    cache is one block and sliding windows are right; positions count from each row's first token. A prompt that several
    completions of a batch answer goes through the model once. Rows that have ended leave the batch.

    Args:
        role: the role that samples; None: the bare base.
        pad: token id that fills rows up.
    """

    share = True  # off to measure what it saves

    def __init__(self, shared: SharedBase, role: str | None = "policy", rows: int = 64, pad: int = 0) -> None:
        self.shared, self.role, self.rows, self.pad = shared, role, rows, pad
        # Steps of one shape (graphs.py), where the base takes them; no graph holds what gathers shards.
        self.windows = shared.device.type == "cuda" and not shared.sharded
        self.recorder = Recorder() if self.windows else None

    def sync(self) -> None:
        """Does nothing: the adapter that is trained is the one that samples."""

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], episodes: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        completions: dict[int, Completion] = {}
        with self.shared.use(self.role), cast_once():
            for start in range(0, len(order), self.rows):
                batch = order[start : start + self.rows]
                decoded = self._decode([prompts[i] for i in batch], [episodes[i] for i in batch], sampling)
                completions.update(zip(batch, decoded, strict=True))
        return [completions[i] for i in range(len(prompts))]

    def _decode(
        self, prompts: list[Sequence[int]], episodes: list[int], sampling: Sampling
    ) -> list[Completion]:
        """One completion to each prompt of a batch, shortest prompt first."""
        device, limit = self.shared.device, sampling.max_new_tokens
        count, width = len(prompts), len(prompts[-1])
        noise = torch.from_numpy(uniforms(sampling.seed, episodes, limit)).to(device)
        cache = room_for(self.shared, count, width + limit)
        hidden = self._prefill(prompts, cache)
        mask = self._mask(prompts, width + limit, cache)
        positions = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
        tokens = torch.zeros(count, limit, dtype=torch.long, device=device)
        logprobs = torch.zeros(count, limit, device=device)
        lengths = torch.full((count,), limit, device=device)
        eos = torch.tensor(sampling.eos, device=device)
        rows = torch.arange(count, device=device)  # indices of those still in the cache
        live = torch.ones(count, dtype=torch.bool, device=device)
        look = STEPS_PER_LOOK.get(device.type, STEPS_PER_LOOK["cuda"])
        window: Window | None = None
        in_windows = self.windows and self._takes_bias(cache) and (not self.recorder or self.recorder.works)
        if in_windows:
            look = STEPS_PER_GRAPH
            mask = self._bias(count, width + limit) if mask is None else mask
        for step in range(limit):
            barred = sampling.eos if step < sampling.min_new_tokens else ()
            token, logprob = sample(
                self.shared.logits(hidden), noise[rows, step], sampling.temperature, barred
            )
            tokens[rows, step], logprobs[rows, step] = token, logprob
            ending = torch.isin(token, eos) & live
            lengths[rows] = lengths[rows].where(~ending, step + 1)
            live &= ~ending
            if window is not None and not window.left:
                window.close()
                window = None
            if (step + 1) % look == 0 and not all(going := live.tolist()):
                if not any(going):
                    break
                index = live_first(going)
                cache.reorder_cache(index)
                index = index.to(device)
                rows, token, positions, live = rows[index], token[index], positions[index], live[index]
                mask = None if mask is None else mask[index]
            if step + 1 == limit:
                break
            if in_windows and mask is not None:
                if window is None:
                    ahead = min(look - (step + 1) % look, limit - step - 1)
                    window = Window(self._forward, cache, mask, positions, width + step, ahead, self.recorder)
                hidden = window(token)
            else:
                seen = None if mask is None else mask[..., : width + step + 1]
                hidden = self._forward(token.unsqueeze(-1), seen, positions, cache)
            positions = positions + 1
        ended = torch.isin(tokens[torch.arange(count, device=device), lengths - 1], eos)
        return [
            Completion(tokens=t[:n], ended=e, logprobs=p[:n])
            for t, n, e, p in zip(
                tokens.tolist(), lengths.tolist(), ended.tolist(), logprobs.tolist(), strict=True
            )
        ]

    def _prefill(self, prompts: list[Sequence[int]], cache: DynamicCache) -> Tensor:
        """(B, H) hidden states of the last tokens of B prompts, shortest first; the cache then holds the prompts."""
        device, width = self.shared.device, len(prompts[-1])
        numbers: dict[tuple[int, ...], int] = {}
        index = torch.tensor([numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts])
        distinct: list[Sequence[int]] = list(numbers)
        if not self.share:
            index, distinct = torch.arange(len(prompts)), prompts
        parts = [list(range(len(distinct)))]
        if is_preallocated(cache):  # layers of other kinds are filled once, and all their rows have one width
            limit = PREFILL_TOKENS.get(device.type, PREFILL_TOKENS["cuda"])
            parts = micro_batches([len(prompt) for prompt in distinct], len(distinct), limit, device.type)
        hidden = []
        for part in parts:
            ids, mask = pad_left([distinct[i] for i in part], self.pad, device)
            for layer in cache.layers:
                if isinstance(layer, Room):
                    layer.open(part[0], len(part), width - ids.shape[1])
            padded = len(distinct[part[0]]) < len(distinct[part[-1]])
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            hidden.append(self._forward(ids, mask if padded else None, positions, cache))
        for layer in cache.layers:
            if isinstance(layer, Room):
                layer.open(0, len(distinct), 0, width)
        if len(distinct) < len(prompts):
            cache.reorder_cache(index)
        return torch.cat(hidden)[index.to(device)]

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache) -> Tensor:
        """(B, H) hidden states at the last of some tokens (B, T), which are appended to the cache."""
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": cache,
        }
        return self.shared.body(**inputs, use_cache=True).last_hidden_state[:, -1]

    def _mask(self, prompts: list[Sequence[int]], width: int, cache: DynamicCache) -> Tensor | None:
        """What the attention of each step sees the beginning of, for rows padded on the left that leave room on the right.

        Returns:
            (B, 1, 1, width), 0 on tokens and -inf on padding, as attention adds it to its scores, where the model takes
            that: made from a mask of ones and zeros anew in each step, it would cost a synchronisation and, in each layer,
            a conversion. Else that mask, (B, width). None where nothing is padded.
        """
        device, longest = self.shared.device, len(prompts[-1])
        if len(prompts[0]) == longest:
            return None
        padding = torch.tensor([[longest - len(prompt)] for prompt in prompts], device=device)
        mask = torch.arange(width, device=device) >= padding
        if not self._takes_bias(cache):
            return mask.long()
        return self._bias(len(prompts), width).masked_fill(~mask[:, None, None], float("-inf"))

    def _takes_bias(self, cache: DynamicCache) -> bool:
        """Whether the base's attention takes a mask that is added to its scores, at any position of the cache."""
        config = self.shared.base.config.get_text_config()
        # Models without rotary positions may compute those from the mask.
        rotary = getattr(config, "rope_parameters", None) and not getattr(config, "alibi", False)
        return bool(rotary and is_preallocated(cache) and config._attn_implementation in ("sdpa", "eager"))

    def _bias(self, rows: int, width: int) -> Tensor:
        """(rows, 1, 1, width) zeros in the dtype of attention's scores."""
        dtype = self.shared.autocast or self.shared.base.dtype
        return torch.zeros(rows, 1, 1, width, dtype=dtype, device=self.shared.device)


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


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (B, T) padded on the left, and their mask (B, T)."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def live_first(live: Sequence[bool]) -> Tensor:
    """Indices of the live rows, each in its place if that is among the first ones, else in that of a row that ended."""
    count = sum(live)
    movers = [row for row in range(count, len(live)) if live[row]]
    return torch.tensor([row if live[row] else movers.pop() for row in range(count)])


def room_for(shared: SharedBase, rows: int, tokens: int) -> DynamicCache:
    """An empty KV cache with room for `rows` of `tokens` positions; layers with a sliding window keep transformers' class."""
    cache = DynamicCache(config=shared.base.config)
    cache.layers = [Room(rows, tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def is_preallocated(cache: DynamicCache) -> bool:
    """Whether all layers of a cache are allocated once, as `room_for` makes those that attend to all tokens."""
    return all(isinstance(layer, Room) for layer in cache.layers)


class Room(DynamicLayer):
    """A DynamicLayer that is allocated once, where its parent makes a longer copy of itself at every token.

    Blocks of ever new sizes cost time, and on a GPU leave holes that no later block fits into. Overrides what transformers
    5.23 calls in a decoding loop. Remove when its StaticCache has a length to look at only as much as is filled.

    Args:
        rows, tokens: that there is room for. More tokens raise RuntimeError.
    """

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__()
        self.rows, self.tokens = rows, tokens
        self.place: Tensor | None = None
        self.open(0, rows)

    def open(self, row: int, count: int, start: int = 0, length: int = 0) -> None:
        """Show `count` rows from `row`, and of each `length` positions from `start`; `update` writes behind these."""
        self.row, self.count, self.start, self.length = row, count, start, length
        if self.is_initialized:
            self._show()

    def fix(self, place: Tensor | None, length: int) -> None:
        """Show `length` positions; from now on `update` writes to those in `place` (1,), and behind all if that is None."""
        self.place = place
        self.open(self.row, self.count, self.start, length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Zeros, because attention multiplies what lies before `start` by 0.
        self.all_keys, self.all_values = (
            states.new_zeros(self.rows, states.shape[1], self.tokens, states.shape[3])
            for states in (key_states, value_states)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.place is not None:
            self.keys.index_copy_(2, self.place, key_states)
            self.values.index_copy_(2, self.place, value_states)
            return self.keys, self.values
        more = key_states.shape[2]
        self.length += more
        self._show()
        self.keys.narrow(2, self.length - more, more).copy_(key_states)
        self.values.narrow(2, self.length - more, more).copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` is, and there are as many as indices; those that stay are not copied."""
        moves = [(to, row) for to, row in enumerate(beam_idx.tolist()) if to != row]
        if moves:
            to, row = torch.tensor(moves, device=self.all_keys.device).T
            for states in (self.all_keys, self.all_values):
                shown = states.narrow(2, self.start, self.length)
                shown[to] = shown[row]
        self.open(0, len(beam_idx), self.start, self.length)

    def _show(self) -> None:
        self.keys, self.values = (
            states.narrow(0, self.row, self.count).narrow(2, self.start, self.length)
            for states in (self.all_keys, self.all_values)
        )
