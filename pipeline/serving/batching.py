"""Continuous batching: completions of all requests are written together, a token each a step, whatever policy writes them.

A row joins at any step and leaves when it ends. One thread has the engine: it hands over rows that wait, delivers what was
written, and in between does what it is asked to (`run`): scores, and new versions. Two engines: transformers on the base that
the replica holds (transformers_batcher.py), and vLLM (vllm_batcher.py).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class QueueFull(Exception):
    """As many rows wait as may."""


class Ended(RuntimeError):
    """The batcher works no more: it was closed, or its engine cannot go on."""

    def __init__(self) -> None:
        super().__init__("the batcher has ended")


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


class Batcher(ABC):
    """Writes the rows that are submitted; all of it happens in one thread of its own.

    Args:
        rows: that are written at the same time.
        queue: rows that may wait.
        eos: ids that end a completion.
        min_new_tokens: until then, `eos` has probability 0.
    """

    def __init__(self, rows: int, queue: int, eos: Sequence[int], min_new_tokens: int = 0) -> None:
        self.most_rows, self.queue = rows, queue
        self.eos, self.min_new_tokens = frozenset(eos), min_new_tokens
        self.rows: list[Row] = []  # that are being written
        self.waiting: deque[Row] = deque()
        self.asked: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.condition = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._work, daemon=True, name="batcher")

    # ------------------------------------------------------------------------------------ from other threads

    def submit(self, rows: Sequence[Row]) -> None:
        """Rows of one request. Raises QueueFull, and then none of them is taken."""
        with self.condition:
            self._forget_cancelled()
            if len(self.waiting) + len(rows) > self.queue:
                raise QueueFull
            self.waiting.extend(rows)
            self._wake()

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        """What `function` returns or raises, called between two steps."""
        future: Future[Any] = Future()
        with self.condition:
            self.asked.append((function, future))
            self._wake()
        return future

    def close(self) -> None:
        with self.condition:
            self.closed = True
            self._wake()
        self.thread.join()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def roles(self) -> set[str | None]:
        """Those that rows are being written by, or wait for."""
        with self.condition:
            return {row.role for row in (*self.rows, *self.waiting)}

    def _wake(self) -> None:
        """Tells the thread that there is something new. A closed batcher answers it at once."""
        if self.closed:
            self._end()
        self.condition.notify()

    def _forget_cancelled(self) -> None:
        """Removes rows that nobody waits for from the queue."""
        self.waiting = deque(row for row in self.waiting if not row.cancelled)

    def _end(self) -> None:
        """Answers everything that waits with Ended."""
        while self.waiting:
            row = self.waiting.popleft()
            if not row.cancelled:
                row.deliver(Ended())
        while self.asked:
            self.asked.popleft()[1].set_exception(Ended())

    # ----------------------------------------------------------------------------------------- in its thread

    @abstractmethod
    def add(self, role: str, folder: str) -> None:
        """From now on rows may be of this role, the adapter in a folder. Raises InputError where the engine cannot run it."""

    @abstractmethod
    def remove(self, role: str) -> None:
        """Frees a role that no row is of."""

    @abstractmethod
    def _joining(self) -> list[Row]:
        """Takes from `waiting` the rows that can join, first come first served."""

    @abstractmethod
    def _turn(self, joining: list[Row]) -> None:
        """One step: reads what joins, lets go of cancelled rows, and delivers a token of each row."""

    @abstractmethod
    def _reset(self) -> None:
        """After an error in a turn: the rows that were being written are gone."""

    def _work(self) -> None:
        while True:
            with self.condition:
                while not (self.closed or self.asked or self.waiting or self.rows):
                    self.condition.wait()
                if self.closed:
                    self._end()
                    return
                self._forget_cancelled()
                asked = [self.asked.popleft() for _ in range(len(self.asked))]
                joining = self._joining()
            for function, future in asked:
                try:
                    future.set_result(function())
                except BaseException as error:  # its caller's to handle; this thread is needed for the others
                    future.set_exception(error)
            try:
                self._turn(joining)
            except (
                Exception
            ) as error:  # out of memory, for one: the rows of this step are lost, not the replica
                lost = [row for row in {*self.rows, *joining} if not row.cancelled]
                for row in lost:
                    row.deliver(error)
                self._reset()
