"""Implements continuous batching. Each step decodes one token of every completion, for all requests and policies together.

A row is one completion. A row can join the batch before any step, and leaves the batch when it ends. Only one thread uses the
decoder: it adds waiting rows and delivers new tokens. Between two steps, this thread also calls functions that other threads
submit, for example to score rows or to load an adapter.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.errors import SelfCheckFailed
from pipeline.serving.protocol import Refused
from pipeline.writing.rows import Decoder, Row

ENDED = "the batcher has ended"  # error of requests after `close` or after the decoder failed


class Token(NamedTuple):
    """One decoded token of a row."""

    id: int
    logprob: float  # log-prob of the token under the sampling distribution, or at temperature 1 if the row has `top`
    top: list[tuple[int, float]]  # the most likely token ids, with their log-probs
    last: bool  # whether the token ends the row


@dataclass(eq=False)
class ServedRow(Row):
    """A row whose tokens are delivered to a client.

    Args:
        deliver: function that the batcher's thread calls with each token, or with the error that ended the row.
    """

    deliver: Callable[[Token | BaseException], None] = field(kw_only=True)
    delivered: int = field(default=0, init=False)

    def deliver_new(self) -> None:
        """Delivers the tokens that were decoded since the last call, or the row's error."""
        while self.delivered < len(self.tokens) and not self.cancelled:
            i = self.delivered
            self.delivered += 1
            last = self.delivered == len(self.tokens) and self.done
            self.deliver(Token(self.tokens[i], self.logprobs[i], self.tops[i] if self.top else [], last))
        if self.error:
            self.fail(self.error)

    def fail(self, error: Exception) -> None:
        if not self.cancelled:
            self.deliver(error)


class Batcher:
    """Decodes submitted rows in a separate thread.

    Args:
        queue: maximum number of rows that wait to join the batch.
        prompt_tokens: maximum number of prompt tokens, with padding, that join the batch in one step. Further rows wait.
    """

    def __init__(self, decoder: Decoder, queue: int, prompt_tokens: int = 1 << 30) -> None:
        self.decoder, self.queue, self.prompt_tokens = decoder, queue, prompt_tokens
        self.rows: list[ServedRow] = []  # rows that the decoder is decoding
        self.waiting: deque[ServedRow] = deque()
        self.calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.condition = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._work, daemon=True, name="batcher")
        self.thread.start()

    # ------------------------------------------------------------------------------------ from other threads

    def submit(self, rows: Sequence[ServedRow]) -> None:
        """Adds all rows of a request to the queue. If the queue has no space for all rows, raises Refused (429)."""
        with self.condition:
            self._forget_cancelled()
            if len(self.waiting) + len(rows) > self.queue:
                raise Refused(429, "the queue is full (serve.max_queue); try again")
            self.waiting.extend(rows)
            self._wake()

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        """Makes the batcher's thread call `function` between two steps. Returns a future for the result."""
        future: Future[Any] = Future()
        with self.condition:
            self.calls.append((function, future))
            self._wake()
        return future

    def close(self) -> None:
        with self.condition:
            self.closed = True
            self._wake()
        self.thread.join()
        self.decoder.close()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def roles(self) -> set[str | None]:
        """Returns the roles of all rows that are waiting or in the batch."""
        with self.condition:
            return {row.role for row in (*self.rows, *self.waiting)}

    def _wake(self) -> None:
        """Wakes the batcher's thread. If the batcher is closed, all waiting rows and calls fail."""
        while self.closed and self.waiting:
            self.waiting.popleft().fail(RuntimeError(ENDED))
        while self.closed and self.calls:
            _, future = self.calls.popleft()
            if future.set_running_or_notify_cancel():  # returns False if the client has disconnected
                future.set_exception(RuntimeError(ENDED))
        self.condition.notify()

    def _forget_cancelled(self) -> None:
        """Removes canceled rows from the queue."""
        self.waiting = deque(row for row in self.waiting if not row.cancelled)

    # ----------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        while True:
            with self.condition:
                self.condition.wait_for(
                    lambda: self.closed or self.calls or self.waiting or self.decoder.rows
                )
                if self.closed:
                    return
                calls, self.calls = self.calls, deque()
            fatal_error: SelfCheckFailed | None = None
            for function, future in calls:
                if not future.set_running_or_notify_cancel():
                    continue  # the client has disconnected
                try:
                    future.set_result(function())
                except BaseException as error:  # other requests need the thread, so an error must not end it
                    future.set_exception(error)
                    fatal_error = error if isinstance(error, SelfCheckFailed) else fatal_error
            try:
                if fatal_error:  # the weights of the base have changed, so later tokens may be wrong
                    raise fatal_error
                if joining := self._joining():
                    self.decoder.join(joining)
                    self._deliver()
                self.decoder.step()
                self._deliver()
            except Exception as error:  # e.g. out of memory; only the rows in the batch fail
                rows, self.rows = self.rows, []
                for row in rows:
                    row.fail(error)
                with contextlib.suppress(RuntimeError):
                    if not fatal_error:
                        self.decoder.reset()
                        continue
                with self.condition:  # the decoder cannot be reset
                    self.closed = True
                    self._wake()

    def _joining(self) -> list[ServedRow]:
        """Moves rows from the queue to `rows`, as many as the decoder and `prompt_tokens` allow. Returns the moved rows."""
        joining: list[ServedRow] = []
        width = 0
        with self.condition:
            self._forget_cancelled()
            while self.waiting and self.decoder.fits([*joining], self.waiting[0]):
                width = max(width, len(self.waiting[0].prompt))
                if joining and width * (len(joining) + 1) > self.prompt_tokens:
                    break
                joining.append(self.waiting.popleft())
            self.rows += joining
        return joining

    def _deliver(self) -> None:
        for row in self.rows:
            row.deliver_new()
        self.rows = [row for row in self.rows if not row.done]
