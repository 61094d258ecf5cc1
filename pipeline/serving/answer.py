"""Answers to requests for completions: choices as the batch writes them, in one piece or as a stream; log-probs of prompts."""

from __future__ import annotations

import asyncio
import codecs
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

import torch
from ray.exceptions import TaskCancelledError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pipeline.errors import in_brief
from pipeline.inference.rows import Sampling
from pipeline.models.adapters import SharedBase
from pipeline.models.logprobs import LOGIT_CHUNK
from pipeline.ppo import forward
from pipeline.ppo.episodes import collate_ids
from pipeline.serving.batching import ServedRow, Token
from pipeline.serving.models import Served
from pipeline.serving.protocol import ChatRequest, CompletionRequest, Refused

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level vocabularies
# Token id, log-prob in nats (the first token of a prompt has none), and the most likely ids with their log-probs.
Rated = tuple[int, float | None, list[tuple[int, float]]]


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
            with contextlib.suppress(RuntimeError):  # the loop is closed, because the replica ends
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self.waking = False
        while self.letters:
            queue, *letter = self.letters.popleft()
            queue.put_nowait(letter)


class Text:
    """Text of a growing list of tokens.

    Holds back incomplete characters, and text that may be the beginning of a stop text.

    Args:
        stops: texts that end the completion, which then lacks them and all that follows.
    """

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stream = DecodeStream(skip_special_tokens=True)
        self.ids: list[int] = []
        self.written = ""  # the decoded text
        self.shown = 0  # number of returned characters
        self.stopped = False

    def add(self, token: int) -> str:
        """Returns what can be shown because of one more token."""
        self.ids.append(token)
        self.written += self.stream.step(self.tokenizer.backend_tokenizer, token) or ""
        # The longest end of the text with which a stop text begins
        longest = min(max(map(len, self.stops), default=1) - 1, len(self.written))
        ends = (self.written[-size:] for size in range(longest, 0, -1))
        waits = (len(end) for end in ends if any(stop.startswith(end) for stop in self.stops))
        return self._show(next(waits, 0))

    def close(self) -> str:
        """Returns what is still to be shown when the last token has come."""
        if self.stopped:
            return ""
        whole = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        # A decoder may change earlier text
        if whole.startswith(self.written[: self.shown]):
            self.written = whole
        return self._show(0)

    @property
    def text(self) -> str:
        return self.written[: self.shown]

    def _show(self, waiting: int) -> str:
        """Returns the text up to the first stop text, or else without its last `waiting` characters."""
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
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()  # of [choice, token or error]
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
        """Removes the rows from the batch. Rows that have ended have left it already."""
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
                if more or self.asked.logprobs:
                    yield part(choice, {"content": more}, tokens)
                if reason := self.reasons[choice]:
                    yield part(choice, {}, reason=reason)
            if wants_usage:
                yield chunk([], usage([self]))
        except Refused as error:  # too late for another status
            yield event(error.body())
            return
        yield b"data: [DONE]\n\n"

    def _logprobs(self, tokens: Iterable[Token]) -> dict[str, Any] | None:
        """Returns OpenAI's list of tokens with their log-probs, and of each the most likely ones, if the request wants it."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            written = bytes_of(self.server.tokenizer, token)
            return {"token": name_of(written), "logprob": logprob, "bytes": list(written)}

        if not self.asked.logprobs:
            return None
        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(*one) for one in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


@lru_cache(1 << 14)
def bytes_of(tokenizer: Any, token: int) -> bytes:
    """Returns what a token adds to a text, which may be a part of a character."""
    entry, decoder = tokenizer.backend_tokenizer.id_to_token(token), tokenizer.backend_tokenizer.decoder
    if entry is None or decoder is None or token in tokenizer.added_tokens_decoder:
        return str(tokenizer.decode([token])).encode()
    if decoder.decode(["Ġ"]) == " " and all(character in BYTES for character in entry):
        return bytes(BYTES[character] for character in entry)
    if decoder.decode(["<0x41>"]) == "A" and re.fullmatch("<0x[0-9A-F]{2}>", entry):  # SentencePiece
        return bytes.fromhex(entry[3:5])
    return decoder.decode(["a", entry])[1:].encode()  # a text's first token loses its space


def name_of(written: bytes) -> str:
    """Returns a token's text, or for a part of a character what OpenAI writes: `bytes:` and the escaped bytes."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return f"bytes:{str(written)[2:-1]}"


def head_of(kind: str, asked: ChatRequest | CompletionRequest, served: Served) -> dict[str, Any]:
    """Returns the fields with which every answer begins."""
    facts = {"id": f"{kind}-{secrets.token_hex(16)}", "created": int(time.time()), "model": asked.model}
    return {**facts, "system_fingerprint": served.version}


def usage(answers: list[Answer], prompts: int | None = None) -> dict[str, int]:
    """Returns the tokens of some answers. `prompts` are those of the prompts, if not all of them have an answer."""
    prompt = sum(len(answer.prompt) for answer in answers) if prompts is None else prompts
    completion = sum(len(tokens) for answer in answers for tokens in answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


class Stream(StreamingResponse):
    """The response of a streamed answer, whose rows it cancels if the client goes away, even before the first chunk."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(answer.streamed(), headers=headers, media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TaskCancelledError):  # from Ray Serve's `receive`: the client is gone
                await super().__call__(scope, receive, send)
        finally:
            self.answer.cancel()


# -------------------------------------------------------------------------- completions of prompts as they are


async def complete(
    server: Any, asked: CompletionRequest, prompts: list[list[int]], served: Served
) -> dict[str, Any]:
    """Returns the completions of all prompts; with `echo`, each behind its prompt."""
    writes = asked.most_tokens != 0
    answers = [Answer(server, asked, prompt, served) for prompt in prompts if writes]
    rated = await _rate(server, asked, prompts, served) if asked.echo and asked.logprobs is not None else None
    try:
        server.batcher.submit([row for answer in answers for row in answer.rows])
        await asyncio.gather(*(answer.finish() for answer in answers))
    finally:
        for answer in answers:
            answer.cancel()
    choices: list[dict[str, Any]] = []
    for index in range(len(prompts) * asked.n):
        number, choice = divmod(index, asked.n)
        tokens: list[Rated] = list(rated[number]) if rated else []
        text = server.tokenizer.decode(prompts[number]) if asked.echo else ""
        reason: str | None = "length"
        if writes:
            answer = answers[number]
            text += answer.texts[choice].text
            tokens += [token[:3] for token in answer.tokens[choice]]
            reason = answer.reasons[choice]
        logprobs = None if asked.logprobs is None else text_logprobs(tokens, server.tokenizer)
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    spent = usage(answers, sum(map(len, prompts)))
    head = head_of("cmpl", asked, served)
    return {"object": "text_completion", **head, "choices": choices, "usage": spent}


def text_logprobs(tokens: Iterable[Rated], tokenizer: Any) -> dict[str, Any]:
    """Returns OpenAI's parallel lists of tokens, their log-probs, and of each the most likely ones."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    at, text = 0, codecs.getincrementaldecoder("utf-8")("replace")
    for token, logprob, most_likely in tokens:
        top: dict[str, float] = {}
        for other, value in [] if logprob is None else [(token, logprob), *most_likely]:
            name = name_of(bytes_of(tokenizer, other))
            top[name] = max(value, top.get(name, value))  # several ids may have the same bytes
        written = bytes_of(tokenizer, token)
        for column, entry in zip(found.values(), (name_of(written), logprob, top or None, at), strict=True):
            column.append(entry)
        at += len(text.decode(written))
    return found


async def _rate(
    server: Any, asked: CompletionRequest, prompts: list[list[int]], served: Served
) -> list[list[Rated]]:
    """Computes log-probs of the prompts in the batcher's thread, one batch between two decoding steps."""
    shared, size = server.models.shared, server.job.args.local_rollout_forward_batch_size
    if server.job.rollout_config.engine == "vllm":
        raise Refused(400, "echo: no log-probs of prompts with rollout.engine=vllm", "echo")
    found: list[list[Rated]] = []
    async with limit(server.serve.timeout_s):
        for start in range(0, len(prompts), size):
            given = (shared, served.role, prompts[start : start + size], asked.logprobs or 0)
            found += await asyncio.wrap_future(server.batcher.run(lambda given=given: rate(*given)))
    return found


@torch.no_grad()
def rate(shared: SharedBase, role: str | None, prompts: list[list[int]], top: int) -> list[list[Rated]]:
    """Returns for each prompt its tokens with their log-probs at temperature 1 and the `top` most likely ids."""
    found: list[list[Rated]] = [[(prompt[0], None, [])] for prompt in prompts]
    longer = [i for i, prompt in enumerate(prompts) if len(prompt) > 1]
    if not longer:
        return found
    ids = [prompts[i] for i in longer]
    episodes = collate_ids([one[:1] for one in ids], [one[1:] for one in ids], shared.device)
    size = max(1, LOGIT_CHUNK[shared.device.type] // shared.vocab_size)
    for rows, part in forward.parts_of(shared, episodes):
        for row, hidden in zip(rows, forward.states(shared, role, part), strict=True):
            targets = torch.tensor(ids[row][1:], device=shared.device)
            for states, actions in zip(hidden[: len(targets)].split(size), targets.split(size), strict=True):
                with shared.use(role):
                    logprobs = shared.logits(states).log_softmax(-1)
                own = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1).tolist()
                values, most_likely = (one.tolist() for one in logprobs.topk(top))
                tops = [list(zip(*one, strict=True)) for one in zip(most_likely, values, strict=True)]
                found[longer[row]] += zip(actions.tolist(), own, tops, strict=True)
    return found
