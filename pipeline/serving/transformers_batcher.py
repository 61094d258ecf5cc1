"""The batching loop on the base that a replica holds: rows of all policies in one forward (adapters.SharedBase.use_each).

A completion depends on its prompt, version and seed. On a CPU, batches of other sizes round differently, in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import InputError
from pipeline.models.adapters import SharedBase
from pipeline.models.logprobs import bar
from pipeline.ppo.engine import PREFILL_TOKENS, uniforms
from pipeline.serving.batching import Batcher, Row, Token
from pipeline.serving.slots import SlotCache


class TransformersBatcher(Batcher):
    """Decodes on the shared base itself.

    Args:
        positions: of the KV cache, over all of its slots: rows join while it stays within that. One alone always may.
        pad: token id that fills up prompts.

    Raises:
        InputError: when the base cannot be batched in this way.
    """

    def __init__(
        self,
        shared: SharedBase,
        rows: int,
        positions: int,
        queue: int,
        eos: Sequence[int],
        pad: int = 0,
        min_new_tokens: int = 0,
    ) -> None:
        super().__init__(rows, queue, eos, min_new_tokens)
        self.shared, self.positions, self.pad = shared, positions, pad
        self.cache = self._new_cache()  # of `rows`, in the order of its slots
        self.newest: list[int] = []  # the token of each row that is to be read next
        self._check()
        self.thread.start()

    def submit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.noise = uniforms(row.seed, [row.number], row.max_new_tokens)[0]
        super().submit(rows)

    def add(self, role: str, folder: str) -> None:
        self.shared.add(role, folder=folder)

    def remove(self, role: str) -> None:
        self.shared.remove(role)

    def _turn(self, joining: list[Row]) -> None:
        if joining:
            self._read(joining)
        self._leave([i for i, row in enumerate(self.rows) if row.cancelled])
        if self.rows:
            self._step()

    def _reset(self) -> None:
        self.rows, self.newest, self.cache = [], [], self._new_cache()

    def _joining(self) -> list[Row]:
        joining: list[Row] = []
        limit, width = PREFILL_TOKENS.get(self.shared.device.type, PREFILL_TOKENS["cuda"]), 0
        most = max((row.most for row in self.rows), default=0)
        while self.waiting:
            row = self.waiting[0]
            count = len(self.rows) + len(joining) + 1
            most, width = max(most, row.most), max(width, len(row.prompt))
            full = count > self.most_rows or self.cache.size_with(count, most) > self.positions
            if (full and count > 1) or (joining and width * (len(joining) + 1) > limit):
                break
            joining.append(self.waiting.popleft())
        return joining

    @torch.no_grad()
    def _read(self, rows: list[Row]) -> None:
        """Prompts, and the first token of each completion."""
        width, device = max(len(row.prompt) for row in rows), self.shared.device
        ids = torch.tensor(
            [row.prompt + [self.pad] * (width - len(row.prompt)) for row in rows], device=device
        )
        self.cache.join([len(row.prompt) for row in rows])
        positions = torch.arange(width, device=device).expand(len(rows), -1)
        last = torch.tensor([len(row.prompt) - 1 for row in rows], device=device)
        with self.shared.use_each([row.role for row in rows]):
            hidden = self._body(ids, None, positions)[torch.arange(len(rows), device=device), last]
            tokens = self._draw(rows, hidden)
        self.cache.joined()
        self.rows, self.newest = self.rows + rows, self.newest + [token.id for token in tokens]
        self._deliver(rows, tokens, first=len(self.rows) - len(rows))

    @torch.no_grad()
    def _step(self) -> None:
        """The next token of each row."""
        cache, device = self.cache, self.shared.device
        ids = torch.tensor(self.newest, device=device).unsqueeze(1)
        mask = None
        if min(cache.counts) < cache.longest:
            unseen = torch.arange(cache.longest + 1, device=device) > cache.lengths.unsqueeze(1)
            mask = torch.zeros(
                unseen.shape, dtype=self.shared.autocast or self.shared.base.dtype, device=device
            )
            mask = mask.masked_fill_(unseen, float("-inf"))[:, None, None]
        with self.shared.use_each([row.role for row in self.rows]):
            hidden = self._body(ids, mask, cache.lengths.unsqueeze(1))[:, -1]
            tokens = self._draw(self.rows, hidden)
        cache.step()
        self.newest = [token.id for token in tokens]
        self._deliver(list(self.rows), tokens, first=0)

    def _body(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        """(B, T, H) hidden states of tokens (B, T), which are appended to the cache."""
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return self.shared.body(**inputs, past_key_values=self.cache, use_cache=True).last_hidden_state

    def _draw(self, rows: list[Row], hidden: Tensor) -> list[Token]:
        """One token a row, from the hidden states (B, H) before it, in the roles in use."""
        logits, device = self.shared.logits(hidden), hidden.device
        early = [row.written < self.min_new_tokens for row in rows]
        if any(early):
            logits = bar(logits, torch.tensor(early, device=device), tuple(self.eos))
        noise = torch.tensor([row.noise[row.written] for row in rows], dtype=torch.float64, device=device)
        temperature = torch.tensor([row.temperature for row in rows], device=device)
        top_p = torch.tensor([row.top_p for row in rows], device=device)
        drawn = draw(logits, noise, temperature, top_p)
        ids = drawn.tolist()
        logprobs, best = [0.0] * len(rows), None
        if any(row.top is not None for row in rows):
            all_logprobs = logits.log_softmax(-1)
            logprobs = all_logprobs.gather(-1, drawn.unsqueeze(-1)).squeeze(-1).tolist()
            if most := max(row.top or 0 for row in rows):
                best = all_logprobs.topk(most, dim=-1)
        tokens = []
        for i, row in enumerate(rows):
            row.written += 1
            top = (
                list(zip(*(x[i, : row.top].tolist() for x in (best.indices, best.values)), strict=True))
                if best and row.top
                else []
            )
            tokens.append(
                Token(ids[i], logprobs[i], top, ids[i] in self.eos or row.written == row.max_new_tokens)
            )
        return tokens

    def _deliver(self, rows: list[Row], tokens: list[Token], first: int) -> None:
        """Each row's token; those whose last one it was leave. `first` is the slot of the first of them."""
        for row, token in zip(rows, tokens, strict=True):
            if not row.cancelled:
                row.deliver(token)
        self._leave([first + i for i, token in enumerate(tokens) if token.last or rows[i].cancelled])

    def _leave(self, slots: list[int]) -> None:
        if slots:
            order = self.cache.leave(slots)
            self.rows, self.newest = [self.rows[i] for i in order], [self.newest[i] for i in order]
        if not self.rows and self.cache.slots:
            self.cache = self._new_cache()  # of the size that the next rows need

    def _new_cache(self) -> SlotCache:
        try:
            return SlotCache(self.shared.base.config, self.shared.device)
        except TypeError as error:
            raise self._unfit(str(error)) from error

    def _check(self) -> None:
        """Proves on three short prompts that rows of other lengths, which come and go, change nothing for a row."""
        size = min(self.shared.vocab_size, 97)
        prompts = [[(7 * i + 3 * j) % size for i in range(2 + 3 * j)] for j in range(3)]
        found: list[list[Token | BaseException]] = [[] for _ in prompts]
        rows = [
            Row(prompt, None, found[j].append, 1 + 2 * (j % 2) + j, temperature=0.0, top=1, number=j)
            for j, prompt in enumerate(prompts)
        ]
        for row in rows:
            row.noise = np.zeros(row.max_new_tokens)
        eos, self.eos = self.eos, frozenset()
        try:
            self._read(rows[:1])
            self._read(rows[1:])
            while self.rows:
                self._step()
        except (TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise self._unfit(f"{type(error).__name__}: {error}"[:200]) from error
        finally:
            self.eos = eos
        exact = self.shared.autocast is None and self.shared.base.dtype == torch.float32
        for prompt, tokens in zip(prompts, found, strict=True):
            ids = prompt + [token.id for token in tokens if isinstance(token, Token)]
            given = torch.tensor([ids], device=self.shared.device)
            actions = torch.ones(1, len(tokens), dtype=torch.bool, device=self.shared.device)
            starts = torch.tensor([len(prompt)], device=self.shared.device)
            with torch.no_grad():
                whole = self.shared.logprobs(None, given, starts, actions)[0][0].tolist()
            ours = [token.logprob for token in tokens if isinstance(token, Token)]
            if max(abs(a - b) for a, b in zip(whole, ours, strict=True)) > (1e-3 if exact else 0.2):
                raise self._unfit("its log-probs differ from those of a whole forward")

    def _unfit(self, why: str) -> InputError:
        return InputError(
            f"{type(self.shared.base).__name__}: requests cannot be batched on it ({why}); expected a decoder whose layers all "
            "attend to all tokens, with rotary positions, as Llama's and Qwen's",
            key="model.name_or_path",
        )


def draw(logits: Tensor, noise: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Token ids (B,) from logits (B, V), by inverse transform sampling; the same as ppo.engine.sample where top_p is 1.

    Args:
        noise: (B,) uniform numbers in [0, 1).
        temperature: (B,) divides the logits; 0: greedy.
        top_p: (B,) the most likely tokens that together have this probability are kept (https://arxiv.org/abs/1904.09751).
    """
    greedy = temperature == 0
    best = logits.argmax(-1)
    if greedy.all():
        return best
    probabilities = (logits / temperature.where(~greedy, 1.0).unsqueeze(-1)).softmax(-1)
    if (top_p < 1).any():
        ordered, index = probabilities.sort(dim=-1, descending=True)
        kept = ordered.cumsum(-1) - ordered < top_p.unsqueeze(-1)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered * kept)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cumulative, noise.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    return torch.where(greedy, best, token.clamp(max=logits.shape[-1] - 1))
