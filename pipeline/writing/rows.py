"""Defines the inputs and outputs of decoders, and samples tokens from logits.

Unless a row sets `top_p`, tokens are drawn from softmax(logits / temperature), without top-k or a repetition penalty. With top-k
or a penalty, tokens would come from a distribution other than the one in PPO's loss. The estimated KL to the reference could then
be negative.

A completion depends only on the seed, the row's number, its prompt and its role. Each row has its own stream of random numbers,
from a counter-based generator whose key is the seed and the row's number. Therefore, a completion does not depend on the other
rows of the batch or on the number of workers. On a CPU, however, logits are rounded differently in batches of different sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.models.tokenizer import eos_ids


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    eos: tuple[int, ...]  # token ids that end a completion; the same for all rows of a batch
    min_new_tokens: int = 0  # EOS cannot be sampled before this many tokens
    temperature: float = 1.0  # 0 means greedy decoding
    # Sample only from the most likely tokens with a total probability of top_p (https://arxiv.org/abs/1904.09751).
    top_p: float = 1.0
    seed: int = 0

    @classmethod
    def from_args(cls, args: Any, tokenizer: Any) -> Sampling:
        """Returns the Sampling for a PPOConfig, or for arguments with the same names."""
        ends = tuple(eos_ids(tokenizer))
        return cls(args.response_length, ends, args.min_new_tokens, args.temperature, seed=args.seed)


@dataclass
class Completion:
    tokens: list[int]  # token ids, including the end-of-sequence token
    ended: bool  # False if the completion was truncated at the length limit
    # The decoder's log-probs, in nats. PPO does not use these log-probs as old log-probs, because they differ from the trainer's
    # log-probs by rounding, and the first ratio must be 1. PPO only compares the decoder's log-probs with the trainer's
    # log-probs.
    logprobs: list[float]


@dataclass(eq=False)
class Row:
    """A completion that a decoder generates. The decoder sets `tokens`, `logprobs`, `tops` and `ended`."""

    prompt: Sequence[int]
    number: int  # seed and number determine the row's random numbers
    sampling: Sampling
    role: str | None = None  # role whose adapter generates the completion, or None for the bare base
    # Number of alternatives to report with each token. If `top` is None, `logprobs` are those of the sampling distribution, with
    # temperature and masked EOS. If `top` is set, `logprobs` are those of the model at temperature 1.
    top: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # likeliest tokens: (id, log-prob)
    ended: bool = False
    cancelled: bool = False  # if the caller sets True, the next step removes the row
    error: Exception | None = None  # set if the decoder cannot decode the row

    @property
    def done(self) -> bool:
        is_full = len(self.tokens) >= self.sampling.max_new_tokens
        return self.ended or self.cancelled or is_full or self.error is not None

    @property
    def positions(self) -> int:
        """Returns the maximum number of tokens of the row, including its prompt."""
        return len(self.prompt) + self.sampling.max_new_tokens


class Decoder(ABC):
    """Decodes a batch of rows. Rows can have different roles, and can join and leave at any step."""

    rows: list[Row]  # rows in the batch
    max_rows: int | None  # maximum rows in the batch, or None for no limit

    @abstractmethod
    def add(self, role: str, folder: str) -> None:
        """Adds a role with the adapter in a folder. Raises InputError if the decoder cannot run the adapter."""

    @abstractmethod
    def remove(self, role: str) -> None:
        """Removes a role and frees its adapter. No row in the batch may have this role."""

    @abstractmethod
    def changed(self, role: str | None) -> None:
        """Tells the decoder that a role's parameters have changed. Rows that join later use the new parameters."""

    @abstractmethod
    def fits(self, joining: Sequence[Row], row: Row) -> bool:
        """Returns whether `row` can join the batch now, together with `joining`. An empty decoder accepts any row."""

    @abstractmethod
    def join(self, rows: Sequence[Row]) -> None:
        """Adds rows that fit. Computes the KV cache of the prompts, and possibly the first new tokens."""

    @abstractmethod
    def step(self) -> None:
        """Decodes at least one token of each row. Removes rows that are finished or cancelled."""

    @abstractmethod
    def reset(self) -> None:
        """Removes all rows after an error. Raises RuntimeError if the decoder cannot continue."""

    def close(self) -> None:
        """Frees the decoder's resources, such as processes."""
        return

    def generate(
        self, role: str | None, prompts: Sequence[Sequence[int]], numbers: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """Returns one completion for each prompt (token ids), in the same order. `numbers` has each prompt's Row.number.

        The longest prompts join first. Other prompts join when earlier rows have ended.
        """
        rows = [Row(prompt, number, sampling, role) for prompt, number in zip(prompts, numbers, strict=True)]
        waiting = sorted(rows, key=lambda row: len(row.prompt))
        while waiting or self.rows:
            joining: list[Row] = []
            while waiting and self.fits(joining, waiting[-1]):
                joining.append(waiting.pop())
            if joining:
                self.join(joining)
            self.step()
        return [Completion(row.tokens, row.ended, row.logprobs) for row in rows]


class RowSettings(NamedTuple):
    """The sampling settings of B rows, on the device."""

    noise: Tensor  # (B, max_new_tokens) uniform numbers in [0, 1)
    temperature: Tensor  # (B,); 0 means greedy
    top_p: Tensor  # (B,)
    minimum: Tensor  # (B,) EOS is masked before this many tokens
    written: Tensor  # (B,) number of tokens that each row has decoded

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> RowSettings:
        noise = np.zeros((len(rows), max(row.sampling.max_new_tokens for row in rows)))
        for i, row in enumerate(rows):
            if row.sampling.temperature:
                noise[i, : row.sampling.max_new_tokens] = uniforms(row)
        samplings = [row.sampling for row in rows]
        return cls(
            torch.from_numpy(noise).to(device),
            torch.tensor([sampling.temperature for sampling in samplings], device=device),
            torch.tensor([sampling.top_p for sampling in samplings], device=device),
            torch.tensor([sampling.min_new_tokens for sampling in samplings], device=device),
            torch.tensor([len(row.tokens) for row in rows], device=device),
        )

    def take(self, rows: Tensor) -> RowSettings:
        return RowSettings(*(values[rows] for values in self))

    def and_of(self, others: RowSettings) -> RowSettings:
        """Returns the settings of these rows followed by the settings of the rows in `others`."""
        width = max(self.noise.shape[1], others.noise.shape[1])
        noise = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (self.noise, others.noise)]
        merged = (torch.cat(pair) for pair in zip(self[1:], others[1:], strict=True))
        return RowSettings(torch.cat(noise), *merged)


def seed_of(seed: int, number: int) -> int:
    """Returns a seed for one completion. The seed is a 32-bit hash of `seed` and `number`, so that streams are independent."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def uniforms(row: Row) -> np.ndarray:
    """Returns the random numbers (max_new_tokens,) in [0, 1) of a row. The numbers depend only on the row's seed and number."""
    key = np.array([row.sampling.seed, row.number], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(row.sampling.max_new_tokens)


def draw_tokens(
    logits: Tensor, noise: Tensor, temperature: Tensor, top_p: Tensor | None, greedy: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Draws tokens from logits (B, V) by inverse transform sampling. Returns the tokens' ids (B,) and log-probs (B,).

    Args:
        noise: (B,) uniform numbers in [0, 1).
        temperature: (B,) temperatures by which the logits are divided, except in greedy rows.
        top_p: (B,) for nucleus sampling, or None if all are 1. The log-probs do not depend on `top_p`.
        greedy: for each row, whether to return the most likely token.
    """
    if all(greedy):
        token = logits.argmax(-1)
        return token, logits.log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    if any(greedy):
        temperature = temperature.where(temperature > 0, 1.0)
    probabilities = (logits / temperature.unsqueeze(-1)).softmax(-1)
    nucleus = probabilities
    if top_p is not None:
        ordered, index = probabilities.sort(dim=-1, descending=True)
        in_nucleus = ordered.cumsum(-1) - ordered < top_p.unsqueeze(-1)
        nucleus = torch.zeros_like(probabilities).scatter(-1, index, ordered * in_nucleus)
    cumulative = nucleus.cumsum(-1, dtype=torch.float64)
    # right=True finds the first cumulative sum greater than the noise, so a token with probability 0 is never drawn.
    token = torch.searchsorted(cumulative, noise.unsqueeze(-1) * cumulative[:, -1:], right=True)
    token = token.clamp(max=logits.shape[-1] - 1).squeeze(-1)
    if any(greedy):
        token = torch.where(torch.tensor(list(greedy), device=token.device), logits.argmax(-1), token)
    return token, probabilities.gather(-1, token.unsqueeze(-1)).log().squeeze(-1)
