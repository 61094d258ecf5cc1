"""Continuous batching: each step writes one token of every completion, for all requests and policies together.

A row joins at any step and leaves when it ends. One thread has the decoder. It hands over rows that wait, delivers what was
written, and between steps runs what other threads request (`run`): scores, and new versions.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.inference.rows import Decoder, Row


class QueueFull(Exception):
    """The queue has no space for these rows."""


class Ended(RuntimeError):
    """The batcher has stopped: it was closed, or its decoder cannot continue."""

    def __init__(self) -> None:
        super().__init__("the batcher has ended")


class Token(NamedTuple):
    """One token of a row."""

    id: int
    logprob: float  # nats, of the model at temperature 1 if the row reports alternatives
    top: list[tuple[int, float]]  # the most likely ids and their log-probs, as many as requested
    last: bool  # whether it ends the row


@dataclass(eq=False)
class ServedRow(Row):
    """A row with a receiver.

    Args:
        deliver: called in the batcher's thread with each token, or with the error that ended the row.
    """

    deliver: Callable[[Token | BaseException], None] = field(kw_only=True)
    delivered: int = field(default=0, init=False)

    def deliver_new(self) -> None:
        """Delivers the tokens, and the error, that came since the last call."""
        for i in range(self.delivered, len(self.tokens)):
            if self.cancelled:
                return
            top = self.tops[i] if self.top else []
            last = i + 1 == len(self.tokens) and self.done
            self.delivered += 1
            self.deliver(Token(self.tokens[i], self.logprobs[i], top, last))
        if self.error and not self.cancelled:
            self.deliver(self.error)


class Batcher:
    """Writes the rows that are submitted, in a separate thread.

    Args:
        queue: rows that may wait.
        prompt_tokens: most padded tokens of the prompts that join at once, because other rows wait meanwhile.
    """

    def __init__(self, decoder: Decoder, queue: int, prompt_tokens: int = 1 << 30) -> None:
        self.decoder, self.queue, self.prompt_tokens = decoder, queue, prompt_tokens
        self.rows: list[ServedRow] = []  # being written
        self.waiting: deque[ServedRow] = deque()
        self.requested: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.condition = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._work, daemon=True, name="batcher")
        self.thread.start()

    # ------------------------------------------------------------------------------------ from other threads

    def submit(self, rows: Sequence[ServedRow]) -> None:
        """Takes all rows of one request, or none. Raises QueueFull."""
        with self.condition:
            self._forget_cancelled()
            if len(self.waiting) + len(rows) > self.queue:
                raise QueueFull
            self.waiting.extend(rows)
            self._wake()

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        """Calls `function` between two steps. Returns a future of its result."""
        future: Future[Any] = Future()
        with self.condition:
            self.requested.append((function, future))
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
        """Returns the roles of all rows that are being written or wait."""
        with self.condition:
            return {row.role for row in (*self.rows, *self.waiting)}

    def _wake(self) -> None:
        """Wakes the thread. If the batcher is closed, answers what is new."""
        if self.closed:
            self._end()
        self.condition.notify()

    def _forget_cancelled(self) -> None:
        """Removes cancelled rows from the queue, so that they do not count."""
        self.waiting = deque(row for row in self.waiting if not row.cancelled)

    def _end(self) -> None:
        """Answers everything that waits with Ended."""
        while self.waiting:
            row = self.waiting.popleft()
            if not row.cancelled:
                row.deliver(Ended())
        while self.requested:
            self.requested.popleft()[1].set_exception(Ended())

    # ----------------------------------------------------------------------------------------- in its thread

    def _work(self) -> None:
        while True:
            with self.condition:
                while not (self.closed or self.requested or self.waiting or self.decoder.rows):
                    self.condition.wait()
                if self.closed:
                    self._end()
                    return
                requested = [self.requested.popleft() for _ in range(len(self.requested))]
            for function, future in requested:
                try:
                    future.set_result(function())
                except BaseException as error:  # the caller handles it; the thread also serves others
                    future.set_exception(error)
            with self.condition:
                self._forget_cancelled()
                joining = self._joining()
                self.rows += joining
            try:
                if joining:
                    self.decoder.join(joining)
                    self._deliver()
                self.decoder.step()
                self._deliver()
            except Exception as error:  # such as out of memory: the rows are lost, the replica continues
                self._lose_rows(error)

    def _joining(self) -> list[ServedRow]:
        """Takes from `waiting` the rows that can join, first come first served."""
        joining: list[ServedRow] = []
        width = 0
        while self.waiting and self.decoder.fits([*joining], self.waiting[0]):
            width = max(width, len(self.waiting[0].prompt))
            if joining and width * (len(joining) + 1) > self.prompt_tokens:
                break
            joining.append(self.waiting.popleft())
        return joining

    def _deliver(self) -> None:
        for row in self.rows:
            row.deliver_new()
        self.rows = [row for row in self.rows if not row.done]

    def _lose_rows(self, error: Exception) -> None:
        """Delivers the error to all rows that were being written. Closes the batcher if its decoder cannot continue."""
        lost, self.rows = self.rows, []
        for row in lost:
            if not row.cancelled:
                row.deliver(error)
        try:
            self.decoder.reset()
        except RuntimeError:
            self.closed = True
