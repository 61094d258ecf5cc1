"""Collects the tokens of each choice of a completion request, and returns or streams the choices in OpenAI's JSON format."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ray.exceptions import TaskCancelledError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from tokenizers.decoders import DecodeStream

from pipeline.errors import in_brief
from pipeline.serving.batching import ServedRow, Token
from pipeline.serving.models import Served
from pipeline.serving.protocol import ChatRequest, CompletionRequest, Refused
from pipeline.writing.rows import Sampling


@contextlib.asynccontextmanager
async def time_limit(seconds: float, timeout_error: Refused | None = None) -> AsyncIterator[None]:
    """Raises `timeout_error` (default: Refused with status 504) if the `with` block takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise timeout_error or Refused(504, f"no answer within {seconds:g} s (serve.timeout_s)") from error


class Text:
    """Decodes the tokens of one completion as they arrive.

    Holds back incomplete characters, and a possible start of a stop text, until more tokens arrive.

    Args:
        stops: texts that end the completion. The stop text and all text after it are removed.
    """

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stream = DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.decoded = ""  # the text of all tokens so far
        self.shown = 0  # number of characters that were sent to the client
        self.stopped = False

    def add(self, token: int) -> str:
        """Adds a token. Returns the text that can be sent to the client now, or ""."""
        self.ids.append(token)
        self.decoded += self.stream.step(self.tokenizer.backend_tokenizer, token) or ""
        return self._show(held_back=max(map(len, self.stops), default=1) - 1)

    def close(self) -> str:
        """Returns the text that was held back. Called after the last token."""
        if self.stopped:
            return ""
        decoded = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        # Some tokenizers change earlier text when a token is added. Text that was sent to the client cannot change.
        if decoded.startswith(self.decoded[: self.shown]):
            self.decoded = decoded
        return self._show(held_back=0)

    @property
    def text(self) -> str:
        return self.decoded[: self.shown]

    def _show(self, held_back: int) -> str:
        """Returns new text up to the first stop text. If there is no stop text, holds back the last `held_back` characters."""
        positions = [position for stop in self.stops if (position := self.decoded.find(stop)) >= 0]
        end = min(positions) if positions else len(self.decoded) - held_back
        self.stopped = bool(positions)
        start, self.shown = self.shown, max(self.shown, end)
        return self.decoded[start : self.shown]


class Answer:
    """Collects the choices of one request while the batcher decodes them. Must be created in the event loop."""

    def __init__(
        self, server: Any, request: ChatRequest | CompletionRequest, prompt: list[int], served: Served
    ) -> None:
        self.server, self.request, self.prompt, self.version = server, request, prompt, served.version
        self.start_time = time.monotonic()
        self.seed = secrets.randbits(32) if request.seed is None else request.seed
        self.texts = [Text(server.tokenizer, request.stops) for _ in range(request.n)]
        self.tokens: list[list[Token]] = [[] for _ in range(request.n)]
        self.reasons: list[str | None] = [None] * request.n
        self.arrivals: asyncio.Queue[tuple[int, Token | BaseException]] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.head = answer_head("chatcmpl", request, served)
        defaults: Sampling = server.sampling
        temperature = defaults.temperature if request.temperature is None else request.temperature
        sampling = replace(
            defaults,
            max_new_tokens=min(request.token_limit or defaults.max_new_tokens, defaults.max_new_tokens),
            temperature=temperature
            if temperature >= 1e-6
            else 0.0,  # dividing by a smaller temperature overflows fp32 logits
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=self.seed,
        )
        self.rows = [
            ServedRow(prompt, i, sampling, served.role, request.top, deliver=partial(self._deliver, i))
            for i in range(request.n)
        ]

    def _deliver(self, choice: int, token: Token | BaseException) -> None:
        """Passes a token or an error from the batcher's thread to the event loop."""
        with contextlib.suppress(RuntimeError):  # the replica is shutting down, and has closed its event loop
            self.loop.call_soon_threadsafe(self.arrivals.put_nowait, (choice, token))

    def cancel(self) -> None:
        """Makes the batcher drop this request's unfinished completions."""
        for row in self.rows:
            row.cancelled = True

    async def _pieces(self) -> AsyncIterator[tuple[int, str, list[Token]]]:
        """Yields (choice, new text, tokens of the new text) until all choices are complete."""
        unshown: list[list[Token]] = [[] for _ in self.rows]
        metrics = self.server.metrics
        async with time_limit(self.server.serve.timeout_s):
            while not all(self.reasons):
                choice, token = await self.arrivals.get()
                text, row = self.texts[choice], self.rows[choice]
                if isinstance(token, BaseException):
                    raise Refused(503, f"the completion failed ({in_brief(token)}); try again") from token
                if self.reasons[choice]:
                    continue  # the choice has ended at a stop text before this token
                if not any(self.tokens):
                    metrics.first_token.observe(time.monotonic() - self.start_time)
                self.tokens[choice].append(token)
                unshown[choice].append(token)
                piece = text.add(token.id)
                if token.last and not text.stopped:
                    piece += text.close()
                if text.stopped or token.last:
                    self.reasons[choice] = "stop" if text.stopped or row.ended else "length"
                    row.cancelled = True
                if piece or self.reasons[choice]:
                    yield choice, piece, unshown[choice]
                    unshown[choice] = []
        metrics.answers.labels(self.request.model, self.version).inc()
        metrics.prompt_tokens.labels(self.version).inc(len(self.prompt))
        metrics.completion_tokens.labels(self.version).inc(sum(map(len, self.tokens)))
        metrics.seconds.observe(time.monotonic() - self.start_time)
        self.server.remember(self)

    async def wait_until_complete(self) -> None:
        try:
            async for _ in self._pieces():
                pass
        finally:
            self.cancel()

    async def as_json(self) -> dict[str, Any]:
        """Waits until all choices are complete. Returns the response as a dict."""
        await self.wait_until_complete()
        choices = [
            {
                "index": choice,
                "message": {"role": "assistant", "content": text.text, "refusal": None},
                "logprobs": self._logprobs(self.tokens[choice]),
                "finish_reason": self.reasons[choice],
            }
            for choice, text in enumerate(self.texts)
        ]
        return {"object": "chat.completion", **self.head, "choices": choices, "usage": token_usage([self])}

    async def as_events(self) -> AsyncIterator[bytes]:
        """Yields the response as server-sent events while the choices are decoded."""
        options = self.request.stream_options
        wants_usage = bool(options and options.include_usage)

        def chunk(choices: list[dict[str, Any]], total: dict[str, int] | None = None) -> bytes:
            usage = {"usage": total} if wants_usage else {}
            return event({"object": "chat.completion.chunk", **self.head, "choices": choices, **usage})

        def part(
            choice: int, delta: dict[str, str], tokens: Iterable[Token] = (), reason: str | None = None
        ) -> bytes:
            logprobs = self._logprobs(tokens) if tokens else None
            return chunk([{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

        try:
            for choice in range(self.request.n):
                yield part(choice, {"role": "assistant", "content": ""})
            async for choice, piece, tokens in self._pieces():
                if piece or self.request.top is not None:
                    yield part(choice, {"content": piece}, tokens)
                if reason := self.reasons[choice]:
                    yield part(choice, {}, reason=reason)
            if wants_usage:
                yield chunk([], token_usage([self]))
        except Refused as error:  # the HTTP status has already been sent
            yield event(error.body())
            return
        yield b"data: [DONE]\n\n"

    def _logprobs(self, tokens: Iterable[Token]) -> dict[str, Any] | None:
        """Returns tokens with log-probs and top alternatives in OpenAI's format, or None if not requested.

        As in vLLM, `bytes` are the bytes of the token's text. The text of a part of a character is the replacement character.
        """

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.server.tokenizer.decode([token])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        if self.request.top is None:
            return None
        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def answer_head(kind: str, request: ChatRequest | CompletionRequest, served: Served) -> dict[str, Any]:
    """Returns the first fields of every response."""
    fields = {"id": f"{kind}-{secrets.token_hex(16)}", "created": int(time.time()), "model": request.model}
    return {**fields, "system_fingerprint": served.version}


def token_usage(answers: list[Answer]) -> dict[str, int]:
    """Returns OpenAI's `usage` field: the numbers of prompt and completion tokens of all answers."""
    prompt = sum(len(answer.prompt) for answer in answers)
    completion = sum(len(tokens) for answer in answers for tokens in answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload, ensure_ascii=False)}\n\n".encode()


class Stream(StreamingResponse):
    """A streamed response. If the client disconnects, the batcher drops the response's completions."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(answer.as_events(), headers=headers, media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Ray Serve raises this error if the client disconnects
            with contextlib.suppress(TaskCancelledError):
                await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()


async def complete_prompts(
    server: Any, request: CompletionRequest, prompts: list[list[int]], served: Served
) -> dict[str, Any]:
    """Decodes the completions of all prompts. Returns a response of OpenAI's legacy completions API."""
    answers = [Answer(server, request, prompt, served) for prompt in prompts]
    try:
        server.batcher.submit([row for answer in answers for row in answer.rows])
        await asyncio.gather(*(answer.wait_until_complete() for answer in answers))
    finally:
        for answer in answers:
            answer.cancel()
    completed = [pair for answer in answers for pair in zip(answer.texts, answer.reasons, strict=True)]
    choices = [
        {"index": index, "text": text.text, "logprobs": None, "finish_reason": reason}
        for index, (text, reason) in enumerate(completed)
    ]
    head = answer_head("cmpl", request, served)
    return {"object": "text_completion", **head, "choices": choices, "usage": token_usage(answers)}
