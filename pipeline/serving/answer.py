"""One request's answer: its choices as the batch writes them, in one piece or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pipeline.errors import in_brief
from pipeline.inference.rows import Sampling
from pipeline.serving import protocol
from pipeline.serving.batching import Batcher, QueueFull, ServedRow, Token
from pipeline.serving.models import Served
from pipeline.serving.protocol import ChatRequest, CompletionRequest, Refused
from pipeline.serving.text import Text


@contextlib.asynccontextmanager
async def limit(seconds: float) -> AsyncIterator[None]:
    """Raises Refused (504) if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Refused(504, f"no answer within {seconds:g} s (serve.timeout_s)") from error


class Mailbox:
    """Carries tokens from the batcher's thread to the event loop, with one wake-up per step."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.letters: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self.waking = False

    def put(self, queue: asyncio.Queue[Any], letter: Any) -> None:
        self.letters.append((queue, letter))
        if not self.waking:
            self.waking = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, because the replica ends
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self.waking = False
        while self.letters:
            queue, letter = self.letters.popleft()
            queue.put_nowait(letter)


def submit(batcher: Batcher, rows: list[ServedRow]) -> None:
    """Takes all rows, or none. Raises Refused, 429, if the queue is full."""
    try:
        batcher.submit(rows)
    except QueueFull as error:
        raise Refused(429, "the queue is full (serve.max_queue); try again") from error


class Answer:
    """The choices of one request, while they are written."""

    def __init__(
        self, server: Any, asked: ChatRequest | CompletionRequest, prompt: list[int], served: Served
    ) -> None:
        self.server, self.asked, self.prompt, self.version = server, asked, prompt, served.version
        self.id, self.created = f"chatcmpl-{secrets.token_hex(16)}", int(time.time())
        self.began = time.monotonic()
        self.seed = secrets.randbits(32) if asked.seed is None else asked.seed
        self.texts = [Text(server.tokenizer, asked.stops) for _ in range(asked.n)]
        self.tokens: list[list[Token]] = [[] for _ in range(asked.n)]
        self.reasons: list[str | None] = [None] * asked.n
        self.arrived: asyncio.Queue[tuple[int, Token | BaseException]] = asyncio.Queue()
        usual: Sampling = server.sampling
        sampling = replace(
            usual,
            max_new_tokens=min(asked.most_tokens or usual.max_new_tokens, usual.max_new_tokens),
            temperature=usual.temperature if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=self.seed,
        )
        self.rows = [
            ServedRow(prompt, choice, sampling, served.role, asked.top, deliver=self._deliver(choice))
            for choice in range(asked.n)
        ]

    def _deliver(self, choice: int) -> Callable[[Token | BaseException], None]:
        mailbox, arrived = self.server.mailbox, self.arrived
        return lambda token: mailbox.put(arrived, (choice, token))

    def cancel(self) -> None:
        """Removes the rows from the batch. Rows that have ended have left it already."""
        for row in self.rows:
            row.cancelled = True

    async def written(self) -> AsyncIterator[tuple[int, str, list[Token]]]:
        """Yields (choice, more text, its tokens) as they come."""
        unshown: list[list[Token]] = [[] for _ in self.rows]
        async with limit(self.server.serve.timeout_s):
            while not all(self.reasons):
                choice, token = await self.arrived.get()
                if isinstance(token, BaseException):
                    raise Refused(
                        503, f"the answer was lost ({in_brief(token)}); try again", code="lost"
                    ) from token
                if self.reasons[choice]:
                    continue  # this token follows a stop text
                if not any(self.tokens):
                    self.server.metrics.first_token.observe(time.monotonic() - self.began)
                more = self._take(choice, token)
                unshown[choice].append(token)
                if more or self.reasons[choice]:
                    yield choice, more, unshown[choice]
                    unshown[choice] = []
        self._finish()

    def _take(self, choice: int, token: Token) -> str:
        text, row = self.texts[choice], self.rows[choice]
        self.tokens[choice].append(token)
        more = text.add(token.id)
        if token.last and not text.stopped:
            more += text.close()
        if text.stopped:
            row.cancelled = True
        if text.stopped or token.last:
            self.reasons[choice] = "stop" if text.stopped or row.ended else "length"
        return more

    def _finish(self) -> None:
        metrics = self.server.metrics
        metrics.answers.labels(self.asked.model, self.version).inc()
        metrics.prompt_tokens.labels(self.version).inc(len(self.prompt))
        metrics.completion_tokens.labels(self.version).inc(self.counted)
        metrics.seconds.observe(time.monotonic() - self.began)
        self.server.remember(self)

    @property
    def counted(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "created": self.created,
            "model": self.asked.model,
            "system_fingerprint": self.version,
        }

    async def finish(self) -> None:
        """Waits until all choices are written."""
        try:
            async for _ in self.written():
                pass
        finally:
            self.cancel()

    async def whole(self) -> dict[str, Any]:
        """Returns the answer in one piece."""
        await self.finish()
        choices = [
            {
                "index": choice,
                "message": {"role": "assistant", "content": text.text, "refusal": None},
                "logprobs": protocol.logprobs(self.tokens[choice], self.server.tokenizer)
                if self.asked.logprobs
                else None,
                "finish_reason": self.reasons[choice],
            }
            for choice, text in enumerate(self.texts)
        ]
        return protocol.chat_answer(False, self.head, choices, protocol.usage(len(self.prompt), self.counted))

    async def streamed(self) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events."""
        wants_usage = bool(self.asked.stream_options and self.asked.stream_options.include_usage)

        def chunk(
            choice: int, delta: dict[str, Any], tokens: list[Token] | None = None, reason: str | None = None
        ) -> bytes:
            listed = (
                protocol.logprobs(tokens, self.server.tokenizer) if tokens and self.asked.logprobs else None
            )
            one = {"index": choice, "delta": delta, "logprobs": listed, "finish_reason": reason}
            return protocol.event(
                protocol.chat_answer(True, self.head, [one]) | ({"usage": None} if wants_usage else {})
            )

        try:
            for choice in range(self.asked.n):
                yield chunk(choice, {"role": "assistant", "content": ""})
            async for choice, more, tokens in self.written():
                if more or (tokens and self.asked.logprobs):
                    yield chunk(choice, {"content": more}, tokens)
                if self.reasons[choice]:
                    yield chunk(choice, {}, reason=self.reasons[choice])
            if wants_usage:
                spent = protocol.usage(len(self.prompt), self.counted)
                yield protocol.event(protocol.chat_answer(True, self.head, [], spent))
        except Refused as error:  # too late for another status
            yield protocol.event(error.body())
            return
        yield protocol.event("[DONE]")


class Stream(StreamingResponse):
    """The response of a streamed answer, whose rows it cancels if the client goes away, even before the first chunk."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(answer.streamed(), headers=headers, media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()
