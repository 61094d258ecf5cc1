"""Continuous batching: completions of all requests are written together, a token each a step, whatever policy writes them.

A row joins at any step and leaves when it ends. One thread has the model: it reads the prompts that wait, steps all rows in
one forward (adapters.SharedBase.use_each), and in between does what it is asked to (`run`): scores, and new versions.

A completion depends on its prompt, version and seed. On a CPU, batches of other sizes round differently, in the last bits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import InputError
from pipeline.models.adapters import SharedBase
from pipeline.models.logprobs import bar
from pipeline.ppo.rollout import PREFILL_TOKENS, uniforms
from pipeline.serving.slots import SlotCache


class QueueFull(Exception):
    """As many rows wait as may."""


class Token(NamedTuple):
    """One token of a row."""

    id: int
    logprob: float  # nats, of the model at temperature 1
    top: list[tuple[int, float]]  # the most likely ids and their log-probs, as many as were asked for
    last: bool  # it ends the completion, or is the last for which there is room


@dataclass(eq=False)
class Row:
    """One completion that is to be written.

    Args:
        role: of the shared base; None: the bare base.
        number: of the completion among those of its request; with the seed it is the key of its random numbers.
        deliver: called in the batcher's thread with each token, or with the error that ended the row.
    """

    prompt: list[int]
    role: str | None
    deliver: Callable[[Token | BaseException], None]
    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0
    number: int = 0
    top: int | None = None  # alternatives that are reported with each token; None: no log-probs either
    cancelled: bool = False
    written: int = field(default=0, init=False)
    noise: Any = field(default=None, init=False)

    @property
    def most(self) -> int:
        """The most positions that it can take."""
        return len(self.prompt) + self.max_new_tokens


class Batcher:
    """Writes the rows that are submitted; all of it happens in one thread of its own.

    Args:
        rows: that are written at the same time.
        positions: of the KV cache, over all of its slots: rows join while it stays within that. One alone always may.
        queue: rows that may wait.
        eos: ids that end a completion.
        pad: token id that fills up prompts.
        min_new_tokens: until then, `eos` has probability 0.

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
        self.shared, self.most_rows, self.positions, self.queue = shared, rows, positions, queue
        self.eos, self.pad, self.min_new_tokens = frozenset(eos), pad, min_new_tokens
        self.cache = self._new_cache()
        self.rows: list[Row] = []  # in the order of their slots
        self.newest: list[int] = []  # the token of each row that is to be read next
        self.waiting: deque[Row] = deque()
        self.asked: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.condition = threading.Condition()
        self.closed = False
        self._check()
        self.thread = threading.Thread(target=self._work, daemon=True, name="batcher")
        self.thread.start()

    # ------------------------------------------------------------------------------------ from other threads

    def submit(self, rows: Sequence[Row]) -> None:
        """Rows of one request. Raises QueueFull, and then none of them is taken."""
        for row in rows:
            row.noise = uniforms(row.seed, [row.number], row.max_new_tokens)[0]
        with self.condition:
            if len(self.waiting) + len(rows) > self.queue:
                raise QueueFull
            self.waiting.extend(rows)
            self.condition.notify()

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        """What `function` returns or raises, called between two steps."""
        future: Future[Any] = Future()
        with self.condition:
            self.asked.append((function, future))
            self.condition.notify()
        return future

    def close(self) -> None:
        with self.condition:
            self.closed = True
            self.condition.notify()
        self.thread.join()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def roles(self) -> set[str | None]:
        """Those that rows are being written by, or wait for."""
        with self.condition:
            return {row.role for row in (*self.rows, *self.waiting)}

    # ----------------------------------------------------------------------------------------- in its thread

    def _work(self) -> None:
        while True:
            with self.condition:
                while not (self.closed or self.asked or self.waiting or self.rows):
                    self.condition.wait()
                if self.closed:
                    return
                asked = [self.asked.popleft() for _ in range(len(self.asked))]
                joining = self._joining()
            for function, future in asked:
                try:
                    future.set_result(function())
                except BaseException as error:  # its caller's to handle; this thread is needed for the others
                    future.set_exception(error)
            try:
                if joining:
                    self._read(joining)
                self._leave([i for i, row in enumerate(self.rows) if row.cancelled])
                if self.rows:
                    self._step()
            except (
                Exception
            ) as error:  # out of memory, for one: the rows of this step are lost, not the replica
                lost = [row for row in {*self.rows, *joining} if not row.cancelled]
                self.rows, self.newest, self.cache = [], [], self._new_cache()
                for row in lost:
                    row.deliver(error)

    def _joining(self) -> list[Row]:
        """The rows that wait, first come first served, as far as there is room for them."""
        joining: list[Row] = []
        limit, width = PREFILL_TOKENS.get(self.shared.device.type, PREFILL_TOKENS["cuda"]), 0
        most = max((row.most for row in self.rows), default=0)
        while self.waiting:
            row = self.waiting[0]
            if row.cancelled:
                self.waiting.popleft()
                continue
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
    """Token ids (B,) from logits (B, V), by inverse transform sampling; the same as ppo.rollout.sample where top_p is 1.

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
