"""Sends questions to a judge's endpoint, a server with OpenAI's chat completions API, until all answers are on disk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.errors import Failure, InputError, escape_controls, in_brief, shorten
from pipeline.job.judge import Definition
from pipeline.scoring.judges.forms import TOP_LOGPROBS, JudgeQuestion, Unusable, scores_in_answer
from pipeline.scoring.judges.store import COUNTS, Store
from pipeline.system.credentials import without_secrets

if TYPE_CHECKING:
    import aiohttp

PAUSES_S = (0.25, 30.0)  # first and longest pause after a failure; each pause is twice the previous one
BUDGET_POLL_S = 0.01  # time between two checks of a budget that open requests may use up
PASSES = {408, 409, 425, 429}  # HTTP statuses after which a request is repeated, in addition to 500 and above
CHARACTERS = 4  # characters per token, in estimates
UNCLEAR = 5  # maximum unusable answers to one question, because each answer costs money
QUOTED = 500  # maximum characters of an endpoint's answer in a message


class JudgeClient:
    """Gets answers from the store, or else from the endpoint.

    Args:
        definition: the judge's definition.
        name: the judge's name in messages.
        reward_timeout_s: a call fails if no usable answer arrives for this many seconds after a failure. -1 means no limit.
    """

    def __init__(self, definition: Definition, store: Store, name: str, reward_timeout_s: float = -1) -> None:
        self.definition, self.store, self.name = definition, store, name
        self.reward_timeout_s = reward_timeout_s
        self.counts = dict.fromkeys(COUNTS, 0.0)  # counts of this call
        self.failing: float | None = None  # time of the first failure since the last usable answer
        self.free_at = 0.0  # time at which the next request may begin
        self.error: BaseException | None = None  # error that ends the call after the open requests
        self.open = 0  # number of open requests
        self.confirmed = False  # whether the model in the judge's file has answered
        self.variable = definition.api_key_variable
        self.key = os.environ.get(self.variable or "", "").strip()
        if self.variable and not self.key:
            raise InputError(f"{name}: ${self.variable} is not set; export {self.variable}=KEY on every node")
        if not self.key.isprintable():
            raise InputError(f"{name}: ${self.variable} has a control character; export it again")
        url = urlsplit(definition.endpoint)
        self.url = url._replace(path=f"{url.path.rstrip('/')}/chat/completions").geturl()

    def body(self, question: JudgeQuestion, draw: int) -> bytes:
        """Returns the body of a question's request."""
        definition = self.definition
        body: dict[str, Any] = {"model": definition.model, "messages": question.messages}
        body |= {"temperature": definition.temperature, "max_tokens": definition.longest}
        if definition.form == "yes":
            body |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS}
        body |= ({"seed": draw} if definition.temperature else {}) | definition.body
        return json.dumps({key: value for key, value in body.items() if value is not None}).encode()

    def key_of(self, draw: int, body: bytes) -> str:
        """Returns the key of an answer in the store."""
        content = [
            self.definition.endpoint.encode(),
            self.definition.digest.encode(),
            b"%d" % draw,
            body,
        ]
        return hashlib.sha256(b"\0".join(content)).hexdigest()

    async def answers(self, requests: Sequence[tuple[JudgeQuestion, int]]) -> list[dict[str, Any]]:
        """Returns the answer to each (question, number of the draw). Raises Failure, InputError, or a disk error.

        Each answer is on disk before this method returns. If a request fails, the method still waits for open requests, because
        answers to open requests cost money.
        """
        import aiohttp

        start = time.monotonic()
        self.counts, self.error, self.failing = dict.fromkeys(COUNTS, 0.0), None, None
        self.store.refresh()
        bodies = [self.body(question, draw) for question, draw in requests]
        keys = [self.key_of(draw, body) for (_, draw), body in zip(requests, bodies, strict=True)]
        questions = [question for question, _ in requests]
        by_key = dict(zip(keys, zip(keys, questions, bodies, strict=True), strict=True))
        missing = iter([item for key, item in by_key.items() if key not in self.store.answers])
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connector = aiohttp.TCPConnector(limit=self.definition.concurrency)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            # Starts more tasks than there may be concurrent requests, because some tasks wait for the disk.
            count = min(2 * self.definition.concurrency, len(by_key))
            self.places = asyncio.Semaphore(self.definition.concurrency)
            await asyncio.gather(*(self._work(session, missing) for _ in range(count)))
        self.counts["from_store"] = sum(key in self.store.answers for key in keys) - self.counts["judged"]
        self.counts["waited"] = time.monotonic() - start
        await self.store.write(counts={key: self.counts[key] for key in COUNTS if key != "judged"})
        if self.error:
            raise self.error
        return [self.store.answers[key] for key in keys]

    async def _work(self, session: aiohttp.ClientSession, missing: Any) -> None:
        """Sends unanswered questions one by one, until no question is left or the call fails."""
        for key, question, body in missing:  # all tasks share this iterator
            try:
                async with self.store.asking(key) as open_question:
                    if open_question and not self.error:
                        await self._ask(session, key, question, body)
            except Exception as error:
                self.error = self.error or error
            if self.error:
                return

    async def _ask(
        self, session: aiohttp.ClientSession, key: str, question: JudgeQuestion, body: bytes
    ) -> None:
        """Repeats a question until its answer is usable, and stores the answer."""
        (pause, longest_pause), unclear_answers = PAUSES_S, 0
        while not self.error:
            await self._wait_for_turn(question)
            await self._reserve(question)
            try:
                async with self.places:
                    if self.error:
                        return
                    content = await self._request(session, body)
                tokens, model, answer, reason = self._read(question, content)
            except Unusable as problem:
                reason, wait = str(problem), problem.wait
            else:
                reason, wait = self._other_model(model) or reason, 0.0
                unclear_answers += bool(reason) and model == self.definition.model
                await self.store.write(tokens=tokens, **({} if reason else {"key": key, "answer": answer}))
                if not reason:
                    self.counts["judged"] += 1
                    self.failing = None
                    return
            finally:
                self.open -= 1
            self.counts["failed"] += 1
            now = time.monotonic()
            self.failing = self.failing or now
            remaining = self.failing + self.reward_timeout_s - now
            is_late = self.reward_timeout_s >= 0 >= remaining
            if is_late or unclear_answers == UNCLEAR:
                span = f"for {self.reward_timeout_s:g} s (trainer.reward_timeout_s)"
                span = span if is_late else f"in {UNCLEAR} answers to one question"
                message = f"{self.name}: no usable answer {span}; the last problem: {reason}"
                self.error = self.error or Failure(
                    f"{message}; to continue the run, repeat the command with the same run.name"
                )
                return
            wait = max(wait, pause * random.Random(key).uniform(0.5, 1.0))
            pause = min(longest_pause, 2 * pause)
            await asyncio.sleep(min(wait, remaining) if self.reward_timeout_s >= 0 else wait)

    def _tokens(self, question: JudgeQuestion) -> tuple[int, int]:
        """Returns the estimated tokens of a question, and the maximum tokens of its answer."""
        return _length(question.messages), self.definition.longest

    async def _wait_for_turn(self, question: JudgeQuestion) -> None:
        """Waits until the limits of requests and tokens per minute allow another request."""
        definition, now = self.definition, time.monotonic()
        start, seconds = max(now, self.free_at), 0.0
        if definition.requests_per_minute:
            seconds = 60 / definition.requests_per_minute
        if definition.tokens_per_minute:
            seconds = max(seconds, 60 * sum(self._tokens(question)) / definition.tokens_per_minute)
        self.free_at = start + seconds
        await asyncio.sleep(start - now)

    async def _reserve(self, question: JudgeQuestion) -> None:
        """Counts a request as open. Raises Failure if the run's budget does not allow another request.

        Waits for open requests first if they may use up the budget, because a failed request costs nothing.
        """
        definition, totals = self.definition, self.store.totals[self.store.run]
        while True:
            dollars = definition.dollars(totals["sent"], totals["answered"])
            estimate = definition.dollars(*self._tokens(question))
            call_cost = dollars / totals["calls"] if totals["calls"] else estimate
            if definition.most_calls is not None and totals["calls"] + self.open >= definition.most_calls:
                key = "most_calls"
            elif (
                definition.most_dollars is not None
                and dollars + call_cost * (self.open + 1) > definition.most_dollars
            ):
                key = "most_dollars"
            else:
                self.open += 1
                return
            if not self.open:
                raise Failure(
                    f"{self.name}: the budget for this run is spent ({totals['calls']:.0f} answers, ${dollars:.4g}; {key}: "
                    f"{getattr(definition, key):g}); raise {key}, and repeat the command with the same run.name to continue the run"
                )
            await asyncio.sleep(BUDGET_POLL_S)

    async def _request(self, session: aiohttp.ClientSession, body: bytes) -> bytes:
        """Returns the body of a response. Raises Unusable after a temporary failure, and InputError after any other failure."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(self.definition.timeout_s)
        try:
            async with session.post(self.url, data=body, timeout=timeout, allow_redirects=False) as response:
                status, content = response.status, await response.read()
                retry_after = response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unusable(self._quoted(in_brief(error, 10 * QUOTED))) from error
        if status == 200:
            return content
        detail = f"status {status}: {self._quoted(content.decode(errors='replace'))}"
        if status not in PASSES and status < 500:
            is_key = self.variable and status in (401, 403)
            key = f"; is the key in ${self.variable} right?" if is_key else ""
            raise InputError(f"{self.name}: {self.definition.endpoint} rejected a request ({detail}){key}")
        problem = Unusable(detail)
        if retry_after.replace(".", "", 1).isdigit():
            problem.wait = min(float(retry_after), PAUSES_S[1])
        raise problem

    def _quoted(self, text: str) -> str:
        """Returns an endpoint's answer on one line, shortened, and without the API key and other secrets."""
        text = without_secrets(text.replace(self.key, "***") if self.key else text)
        return escape_controls(" ".join(text.split())[:QUOTED], lines=False)

    def _read(
        self, question: JudgeQuestion, content: bytes
    ) -> tuple[tuple[int, int], str, dict[str, Any], str]:
        """Returns the tokens of question and answer, the model, the answer, and why the answer is unusable, or "".

        Raises Unusable if the body is no chat completion, and so costs nothing.
        """
        body, reason = None, ""
        answer: dict[str, Any] = {"text": "", "top": None}
        try:
            body = json.loads(content)
            choice = body["choices"][0]
            text = choice["message"]["content"] or ""
            text = text if isinstance(text, str) else "".join(part.get("text", "") for part in text)
            # replaces lone surrogates, which cannot be written to a file
            answer["text"] = text.encode(errors="replace").decode()
            top = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs")
            answer["top"] = [[entry["token"], float(entry["logprob"])] for entry in top] if top else None
            if choice.get("finish_reason") == "length" and self.definition.form != "yes":
                raise Unusable("the answer is truncated; raise max_tokens")
            scores_in_answer(self.definition, question, answer)  # raises Unusable without a score
        except Unusable as problem:
            reason = f"found {self._quoted(answer['text'])!r}: {problem}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"the body is no chat completion ({self._quoted(in_brief(error, 80))})"
        if not isinstance(body, dict) or body.keys().isdisjoint(("choices", "usage")):
            raise Unusable(reason)
        usage = body["usage"] if isinstance(body.get("usage"), dict) else {}
        tokens: Any = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not all(type(count) is int and count >= 0 for count in tokens):
            tokens = _length(question.messages), len(answer["text"]) // CHARACTERS
        return tokens, str(body.get("model", self.definition.model)), answer, reason

    def _other_model(self, model: str) -> str:
        """Returns a message if another model than requested has answered, or else "".

        Ends the call if the requested model has never answered.
        """
        definition = self.definition
        if model == definition.model:
            self.confirmed = True
            return ""
        model = self._quoted(model)
        message = f"{definition.endpoint} answers as {model}"
        if not (self.confirmed or self.store.answers):  # after an earlier answer, the change may be temporary
            self.error = self.error or InputError(
                f"{self.name}: {message}; write `model: {model}` into the judge's file"
            )
        return f"{message}, expected {shorten(definition.model)}"


def _length(messages: Sequence[dict[str, str]]) -> int:
    """Estimates the number of tokens of messages."""
    return sum(len(message["content"]) for message in messages) // CHARACTERS
