"""Answers requests for completions: choices as the batch writes them, in one piece or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ray.exceptions import TaskCancelledError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pipeline.errors import in_brief
from pipeline.serving.batching import ServedRow, Token
from pipeline.serving.models import Served
from pipeline.serving.protocol import ChatRequest, CompletionRequest, Refused
from pipeline.writing.rows import Sampling

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # for byte-level vocabularies


@contextlib.asynccontextmanager
async def limit(seconds: float, late: Refused | None = None) -> AsyncIterator[None]:
    """Raises `late`, or Refused (504), if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise late or Refused(504, f"no answer within {seconds:g} s (serve.timeout_s)") from error


class Mailbox:
    """Carries tokens from the batcher's thread to the event loop, with one wake-up per step."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.letters: deque[tuple[asyncio.Queue[Any], int, Any]] = deque()
        self.waking = False

    def put(self, queue: asyncio.Queue[Any], choice: int, token: Token | BaseException) -> None:
        self.letters.append((queue, choice, token))
        if not self.waking:
            self.waking = True
            with contextlib.suppress(RuntimeError):  # the replica ends and has closed the loop
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self.waking = False
        while self.letters:
            queue, *letter = self.letters.popleft()
            queue.put_nowait(letter)


class Text:
    """The text of a growing list of tokens.

    Holds back incomplete characters, and text that may be the start of a stop text.

    Args:
        stops: texts that end the completion. They and all text after them are removed.
    """

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stream = DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.written = ""  # the decoded text
        self.shown = 0  # number of returned characters
        self.stopped = False

    def add(self, token: int) -> str:
        """Returns the text that can be shown after one more token."""
        self.ids.append(token)
        self.written += self.stream.step(self.tokenizer.backend_tokenizer, token) or ""
        # the longest end of the text that is the start of a stop text
        longest = min(max(map(len, self.stops), default=1) - 1, len(self.written))
        ends = (self.written[-size:] for size in range(longest, 0, -1))
        waits = (len(end) for end in ends if any(stop.startswith(end) for stop in self.stops))
        return self._show(next(waits, 0))

    def close(self) -> str:
        """Returns the remaining text after the last token."""
        if self.stopped:
            return ""
        whole = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        # a decoder may change earlier text
        if whole.startswith(self.written[: self.shown]):
            self.written = whole
        return self._show(0)

    @property
    def text(self) -> str:
        return self.written[: self.shown]

    def _show(self, waiting: int) -> str:
        """Returns the text up to the first stop text, or otherwise without its last `waiting` characters."""
        found = [
            at for stop in self.stops if (at := self.written.find(stop, max(0, self.shown - len(stop)))) >= 0
        ]
        end = min(found) if found else len(self.written) - waiting
        self.stopped = bool(found)
        more, self.shown = self.written[self.shown : end], max(self.shown, end)
        return more


class Answer:
    """The choices of one request, while they are written."""

    def __init__(
        self, server: Any, asked: ChatRequest | CompletionRequest, prompt: list[int], served: Served
    ) -> None:
        self.server, self.asked, self.prompt, self.version = server, asked, prompt, served.version
        self.began = time.monotonic()
        self.seed = secrets.randbits(32) if asked.seed is None else asked.seed
        self.texts = [Text(server.tokenizer, asked.stops) for _ in range(asked.n)]
        self.tokens: list[list[Token]] = [[] for _ in range(asked.n)]
        self.reasons: list[str | None] = [None] * asked.n
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()  # [choice, token or error]
        self.head = head_of("chatcmpl", asked, served)
        usual: Sampling = server.sampling
        temperature = usual.temperature if asked.temperature is None else asked.temperature
        sampling = replace(
            usual,
            max_new_tokens=min(asked.most_tokens or usual.max_new_tokens, usual.max_new_tokens),
            temperature=temperature if temperature >= 1e-6 else 0.0,  # logits divided by less overflow fp32
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=self.seed,
        )
        deliver = partial(server.mailbox.put, self.arrived)
        self.rows = [
            ServedRow(prompt, i, sampling, served.role, asked.top, deliver=partial(deliver, i))
            for i in range(asked.n)
        ]

    def cancel(self) -> None:
        """Removes the rows from the batch. Finished rows have left it already."""
        for row in self.rows:
            row.cancelled = True

    async def written(self) -> AsyncIterator[tuple[int, str, list[Token]]]:
        """Yields (choice, more text, its tokens) as they come."""
        unshown: list[list[Token]] = [[] for _ in self.rows]
        metrics = self.server.metrics
        async with limit(self.server.serve.timeout_s):
            while not all(self.reasons):
                choice, token = await self.arrived.get()
                text, row = self.texts[choice], self.rows[choice]
                if isinstance(token, BaseException):
                    why = f"the answer was lost ({in_brief(token)}); try again"
                    raise Refused(503, why, code="lost") from token
                if self.reasons[choice]:
                    continue  # this token follows a stop text
                if not any(self.tokens):
                    metrics.first_token.observe(time.monotonic() - self.began)
                self.tokens[choice].append(token)
                unshown[choice].append(token)
                more = text.add(token.id)
                if token.last and not text.stopped:
                    more += text.close()
                if text.stopped or token.last:
                    self.reasons[choice] = "stop" if text.stopped or row.ended else "length"
                    row.cancelled = True
                if more or self.reasons[choice]:
                    yield choice, more, unshown[choice]
                    unshown[choice] = []
        metrics.answers.labels(self.asked.model, self.version).inc()
        metrics.prompt_tokens.labels(self.version).inc(len(self.prompt))
        metrics.completion_tokens.labels(self.version).inc(sum(map(len, self.tokens)))
        metrics.seconds.observe(time.monotonic() - self.began)
        self.server.remember(self)

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
                "logprobs": self._logprobs(self.tokens[choice]),
                "finish_reason": self.reasons[choice],
            }
            for choice, text in enumerate(self.texts)
        ]
        return {"object": "chat.completion", **self.head, "choices": choices, "usage": usage([self])}

    async def streamed(self) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events."""
        wants_usage = bool(self.asked.stream_options and self.asked.stream_options.include_usage)

        def chunk(choices: list[dict[str, Any]], spent: dict[str, int] | None = None) -> bytes:
            total = {"usage": spent} if wants_usage else {}
            return event({"object": "chat.completion.chunk", **self.head, "choices": choices, **total})

        def part(
            choice: int, delta: dict[str, str], tokens: Iterable[Token] = (), reason: str | None = None
        ) -> bytes:
            logprobs = self._logprobs(tokens) if tokens else None
            return chunk([{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])

        try:
            for choice in range(self.asked.n):
                yield part(choice, {"role": "assistant", "content": ""})
            async for choice, more, tokens in self.written():
                if more or self.asked.top is not None:
                    yield part(choice, {"content": more}, tokens)
                if reason := self.reasons[choice]:
                    yield part(choice, {}, reason=reason)
            if wants_usage:
                yield chunk([], usage([self]))
        except Refused as error:  # too late for another HTTP status
            yield event(error.body())
            return
        yield b"data: [DONE]\n\n"

    def _logprobs(self, tokens: Iterable[Token]) -> dict[str, Any] | None:
        """Returns OpenAI's list of tokens with log-probs and most likely alternatives, if the request wants it."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            written = bytes_of(self.server.tokenizer, token)
            return {"token": name_of(written), "logprob": logprob, "bytes": list(written)}

        if self.asked.top is None:
            return None
        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(*one) for one in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


@lru_cache(1 << 14)
def bytes_of(tokenizer: Any, token: int) -> bytes:
    """Returns the bytes that a token adds to a text, which may be part of a character."""
    entry, decoder = tokenizer.backend_tokenizer.id_to_token(token), tokenizer.backend_tokenizer.decoder
    if entry is None or decoder is None or token in tokenizer.added_tokens_decoder:
        return str(tokenizer.decode([token])).encode()
    if decoder.decode(["Ġ"]) == " " and all(character in BYTES for character in entry):
        return bytes(BYTES[character] for character in entry)
    if decoder.decode(["<0x41>"]) == "A" and re.fullmatch("<0x[0-9A-F]{2}>", entry):  # SentencePiece
        return bytes.fromhex(entry[3:5])
    return decoder.decode(["a", entry])[1:].encode()  # the first token of a text loses its space


def name_of(written: bytes) -> str:
    """Returns a token's text. For part of a character returns `bytes:` and the escaped bytes, like OpenAI."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return f"bytes:{str(written)[2:-1]}"


def head_of(kind: str, asked: ChatRequest | CompletionRequest, served: Served) -> dict[str, Any]:
    """Returns the first fields of every answer."""
    facts = {"id": f"{kind}-{secrets.token_hex(16)}", "created": int(time.time()), "model": asked.model}
    return {**facts, "system_fingerprint": served.version}


def usage(answers: list[Answer]) -> dict[str, int]:
    """Returns the number of tokens of some answers."""
    prompt = sum(len(answer.prompt) for answer in answers)
    completion = sum(len(tokens) for answer in answers for tokens in answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


class Stream(StreamingResponse):
    """The response of a streamed answer. It cancels the rows if the client disconnects, even before the first chunk."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(answer.streamed(), headers=headers, media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TaskCancelledError):  # from Ray Serve, if the client has disconnected
                await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()


# -------------------------------------------------------------------------- completions of prompts as they are


async def complete(
    server: Any, asked: CompletionRequest, prompts: list[list[int]], served: Served
) -> dict[str, Any]:
    """Returns the completions of all prompts."""
    answers = [Answer(server, asked, prompt, served) for prompt in prompts]
    try:
        server.batcher.submit([row for answer in answers for row in answer.rows])
        await asyncio.gather(*(answer.finish() for answer in answers))
    finally:
        for answer in answers:
            answer.cancel()
    written = [one for answer in answers for one in zip(answer.texts, answer.reasons, strict=True)]
    choices = [
        {"index": index, "text": text.text, "logprobs": None, "finish_reason": reason}
        for index, (text, reason) in enumerate(written)
    ]
    head = head_of("cmpl", asked, served)
    return {"object": "text_completion", **head, "choices": choices, "usage": usage(answers)}
