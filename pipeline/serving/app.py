"""The Ray Serve application: `Server`, replicas with the models behind OpenAI's endpoint, and one `Recorder`.

    handle = serve.run(application(work, digests), name="serve")

After the proxy, a request goes through one process: its replica parses it, batches it with others, and answers. The recorder
stores feedback and the metrics of all replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from pipeline.data.encode import Encoder, Example
from pipeline.data.shapes import kind_of, parse
from pipeline.data.values import RowError
from pipeline.errors import in_brief
from pipeline.run import memory
from pipeline.run.model_host import ModelHost
from pipeline.run.roles import longest_row
from pipeline.serving import LOOPBACK, REQUEST_S, answer, protocol
from pipeline.serving.answer import Answer, Mailbox, Stream, limit
from pipeline.serving.feedback import FeedbackStore, encoders, folder_of
from pipeline.serving.metrics import Metrics, Page
from pipeline.serving.models import Models, Served, ends, start
from pipeline.serving.protocol import Asked, ChatRequest, CompletionRequest, Feedback, Refused
from pipeline.serving.scores import ROWS, Scores
from pipeline.settle.work import Work
from pipeline.system import console
from pipeline.system.credentials import without_credentials
from pipeline.writing.rows import Sampling

TOO_LONG = "context_length_exceeded"  # OpenAI's code
HEAD = "node:__internal_head__"  # a resource that Ray gives to the head
FLUSH_S = 0.2  # maximum seconds until an answer reaches the recorder and can get feedback
MAX_UNSENT_ANSWERS = 10_000  # number of answers that are kept while the recorder restarts
RETRY, CLOSE = {"Retry-After": "1"}, {"Connection": "close"}
HEADERS = {408: CLOSE, 413: CLOSE, 429: RETRY, 503: RETRY}
app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


def application(work: Work, digests: list[str]) -> Any:
    """Returns the application of a checked job.

    Args:
        digests: sha256 of valid client tokens. Without tokens, only this machine gets answers.
    """
    limits, workers = work.serve, work.places.workers
    low, high = workers.fewest, workers.most
    replicas: dict[str, Any] = {"num_replicas": low}
    if low < high:
        scaling = {"min_replicas": low, "max_replicas": high}
        replicas = {"num_replicas": "auto", "autoscaling_config": scaling}
    logging = {"enable_access_log": False, "log_level": "WARNING"}
    recorder = serve.deployment(Recorder).options(
        name="recorder",
        # The recorder is on the head node, where users look for its folder, and which no autoscaler removes.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        max_ongoing_requests=1000,
        logging_config=logging,
    )
    server = serve.deployment(Ingress).options(
        name="server",
        ray_actor_options=workers.each.options(),
        # The replica itself answers 429 if its queue is full. Ray Serve would hold requests back and answer 503.
        max_ongoing_requests=4 * (limits.max_queue + work.args.local_rollout_forward_batch_size) + 64,
        graceful_shutdown_timeout_s=min(limits.timeout_s, 60.0),
        health_check_period_s=2.0,
        logging_config=logging,
        **replicas,
    )
    host = ModelHost(work)
    reading = (work.tokenizer, longest_row(host), ends(host), work.data.parse_special_tokens)
    kept = recorder.bind(
        folder_of(limits, work.run.storage_path),
        limits.log_prompts,
        limits.max_feedback_bytes,
        reading,
    )
    return server.bind(work, digests, kept)


def bind_to_node_address() -> None:
    """Makes Ray Serve's own server in this replica listen on the node's address in Ray, 127.0.0.1 in an embedded Ray.

    The server unpickles all of its input, and Ray Serve (2.60, private) binds it to all interfaces. Remove when a replica
    accepts an address; tests/serving/test_server.py lists the sockets.
    """
    import ray
    from ray.serve._private import replica

    bind, home = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    host = f"[{home}]" if ":" in home else home
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", host))


class Recorder:
    """Writes the feedback folder, as the only writer, and holds the newest metrics of each replica."""

    def __init__(self, folder: str, log_prompts: bool, max_bytes: int, reading: tuple[Any, ...]) -> None:
        bind_to_node_address()
        self.store, self.page = FeedbackStore(folder, log_prompts, max_bytes, encoders(*reading)), Page()
        self.lock = threading.Lock()  # Ray Serve may call from several threads

    def take(self, replica: str, metrics: Any, answers: list[dict[str, Any]]) -> Refused | None:
        self.page.take(replica, metrics)
        return self._stored(self.store.remember, answers)

    def give(self, feedback: dict[str, Any]) -> dict[str, Any] | Refused:
        return self._stored(self.store.give, feedback)

    def _stored(self, work: Callable[[Any], Any], given: Any) -> Any:
        """Returns the result of the store, or the Refused that it raises, because Ray would log an exception."""
        try:
            with self.lock:
                return work(given)
        except Refused as error:
            return error

    def metrics(self) -> bytes:
        return self.page.text()


def answered(handler: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Returns a handler that checks the sender first, and turns errors into answers."""

    @functools.wraps(handler)  # FastAPI reads its signature
    async def wrapped(self: Any, request: Request, **given: Any) -> Response:
        path = request.url.path
        try:
            if path != "/health":
                self.check_sender(request)
            response = await handler(self, request, **given)
        except (ClientDisconnect, TaskCancelledError):  # the client has disconnected
            response = Response(status_code=499)
        except Exception as error:
            if isinstance(error, RowError):
                refused = Refused(400, str(error), error.field or None, error.kind)
            elif isinstance(error, Refused):
                refused = error
            else:
                print(f"a request failed: {in_brief(error)}", flush=True)
                refused = Refused(500, without_credentials(f"{type(error).__name__}: {error}")[:1000])
            response = JSONResponse(refused.body(), refused.status, HEADERS.get(refused.status))
        self.metrics.requests.labels(path if path in PATHS else "other", response.status_code).inc()
        return response

    return wrapped


class Server:
    """One replica: the base, the versions on it, and the batch that all requests share."""

    def __init__(self, work: Work, digests: list[str], recorder: DeploymentHandle) -> None:
        bind_to_node_address()
        console.silence_libraries()
        host = ModelHost(work)
        self.serve, self.args = work.serve, work.args
        self.digests, self.recorder, self.tokenizer = digests, recorder, work.tokenizer
        self.name = secrets.token_hex(4)
        with memory.explained(work):
            shared, self.batcher = start(host)
            self.models = Models(host, shared, self.batcher)
        stops, args, self.longest = ends(host), work.args, longest_row(host)
        self.sampling = Sampling(args.response_length, tuple(stops), args.min_new_tokens, args.temperature)
        self.scores = Scores(host, self.batcher)
        settings = (self.longest - args.response_length, "error", True, stops, work.data.parse_special_tokens)
        self.encoder = Encoder(self.tokenizer, kind_of("generate"), *settings)
        # Requests are parsed in a separate thread, so that tokenizing a long prompt does not delay other answers.
        self.reader = ThreadPoolExecutor(1, "reader")
        self.metrics = Metrics()
        self.mailbox = Mailbox()
        self.answers: list[dict[str, Any]] = []  # answers that the recorder does not have yet
        self.flushing = asyncio.Lock()
        self.flusher = asyncio.get_running_loop().create_task(self._flush_often())
        threading.Thread(
            target=self.models.watch, args=(self.serve.alias_poll_interval_s,), daemon=True
        ).start()

    def check_health(self) -> None:
        """Raises if the replica is unhealthy. Ray Serve calls it periodically, and restarts the replica if it raises."""
        if not self.batcher.alive:
            raise RuntimeError("the thread that has the model has ended")

    # ---------------------------------------------------------------------------------------- the recorder

    async def _ask_recorder(self, method: str, *given: Any) -> Any:
        try:
            said = await getattr(self.recorder, method).remote(*given)
        except Exception as error:
            raise Refused(503, "the recorder restarts; try again") from error
        if isinstance(said, Refused):
            raise said
        return said

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            # While the recorder restarts or cannot write, the answers stay queued.
            with contextlib.suppress(Exception):
                await self._flush()

    async def _flush(self) -> None:
        """Sends metrics and finished answers to the recorder."""
        async with self.flushing:  # when a caller gets the lock, earlier answers have arrived
            self.metrics.running.set(len(self.batcher.rows))
            self.metrics.waiting.set(len(self.batcher.waiting))
            self.metrics.versions.clear()
            for name, version in self.models.versions.items():
                self.metrics.versions.labels(name, version).set(1)
            answers, self.answers = self.answers, []
            try:
                measured = list(self.metrics.registry.collect())
                await self._ask_recorder("take", self.name, measured, answers)
            except (Refused, asyncio.CancelledError):  # canceled because the client has disconnected
                self.answers = (answers + self.answers)[-MAX_UNSENT_ANSWERS:]
                raise

    def remember(self, answer: Answer) -> None:
        """Records a finished answer, so that feedback on it is accepted."""
        asked = answer.asked
        if not isinstance(asked, ChatRequest):
            return  # feedback is only about conversations
        facts = {"id": answer.head["id"], "time": time.time(), "version": answer.version}
        facts |= {"model": asked.model, "seed": answer.seed, "choices": asked.n}
        if self.serve.log_prompts:
            facts["chat_template_kwargs"] = asked.chat_template_kwargs
            facts |= {"messages": asked.messages, "texts": [text.text for text in answer.texts]}
            facts["truncated"] = [i for i, reason in enumerate(answer.reasons) if reason == "length"]
        self.answers.append(facts)

    # --------------------------------------------------------------------------------- what every request needs

    def check_sender(self, request: Request) -> None:
        """Raises Refused: 401 without a valid token, 403 for a browser's request that another origin's web page caused."""
        if self.digests:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            digest = hashlib.sha256(token.strip().encode()).hexdigest()
            known = [hmac.compare_digest(digest, one) for one in self.digests]
            if scheme.lower() != "bearer" or not any(known):
                raise Refused(401, "expected `Authorization: Bearer TOKEN` with a token of this server")
            return
        for header, before in (("host", "//"), ("origin", "")):
            for value in request.headers.getlist(header):
                try:
                    name = urlsplit(before + value).hostname
                except ValueError:
                    name = None
                if name not in LOOPBACK:
                    expected = "expected this machine's, e.g. 127.0.0.1"
                    raise Refused(403, f"{header}: found {value[:80]!r}; {expected}")

    async def _body(self, request: Request) -> Any:
        """Returns the JSON value of the request's body. Raises Refused."""
        most, body = self.serve.max_body_bytes, bytearray()
        too_large = Refused(413, f"a body of more than {most} bytes (serve.max_body_bytes)")
        if int(request.headers.get("content-length", 0)) > most:
            raise too_large
        async with limit(REQUEST_S, Refused(408, f"no whole body within {REQUEST_S} s")):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large
        return protocol.decoded(bytes(body))

    async def _asked(self, request: Request, kind: type[Asked]) -> tuple[Asked, Served]:
        """Returns a request for completions, and the policy that it names. Raises Refused."""
        asked = protocol.read(kind, await self._body(request))
        if asked.model not in self.models.policies:
            raise protocol.unknown("policy", asked.model, self.models.policies)
        if asked.n > self.serve.max_n:
            raise Refused(400, f"n: found {asked.n}; expected at most {self.serve.max_n}", "n")
        return asked, self.models.policies[asked.model]

    async def _read(self, function: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.reader, function, *given)

    # -------------------------------------------------------------------------------------------- requests

    @app.api_route("/health", methods=["GET", "HEAD"])
    @answered
    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    @answered
    async def prometheus(self, request: Request) -> Response:
        with contextlib.suppress(Refused):  # a full disk does not affect the metrics
            await self._flush()
        page = await self._ask_recorder("metrics")
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    @answered
    async def list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._listed(name) for name in self.models.versions]})

    @app.get("/v1/models/{name}")
    @answered
    async def get_model(self, request: Request, name: str) -> Response:
        if name not in self.models.versions:
            raise protocol.unknown("model", name, self.models.versions)
        return JSONResponse(self._listed(name))

    def _listed(self, name: str) -> dict[str, Any]:
        kind = "policy" if name in self.models.policies else "reward"
        facts = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "rlhf"}
        return {**facts, "version": self.models.versions[name], "kind": kind}

    @app.post("/v1/chat/completions")
    @answered
    async def chat(self, request: Request) -> Response:
        asked, served = await self._asked(request, ChatRequest)
        written = Answer(self, asked, await self._read(self._prompt, asked), served)
        self.batcher.submit(written.rows)
        headers = {"x-model-version": written.version}
        if asked.stream:
            return Stream(written, headers)
        return JSONResponse(await written.whole(), headers=headers)

    @app.post("/v1/completions")
    @answered
    async def complete(self, request: Request) -> Response:
        asked, served = await self._asked(request, CompletionRequest)
        if len(asked.prompts) * asked.n > self.serve.max_queue:
            most = f"at most {self.serve.max_queue} completions (serve.max_queue)"
            raise Refused(400, f"prompt: found {len(asked.prompts)} prompts; expected {most}", "prompt")
        found = await answer.complete(self, asked, await self._read(self._ids, asked), served)
        return JSONResponse(found, headers={"x-model-version": served.version})

    def _ids(self, asked: CompletionRequest) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises Refused."""
        most = self.args.response_length
        writes = most if asked.most_tokens is None else min(asked.most_tokens, most)
        room, vocabulary, prompts = self.longest - writes, len(self.tokenizer), []
        for prompt in asked.prompts:
            ids = self.encoder.ids([(prompt, None)])[0] if isinstance(prompt, str) else prompt
            if not ids or max(ids) >= vocabulary:
                why = f"prompt: found {str(prompt)[:80]!r}; expected token ids below {vocabulary}"
                raise Refused(400, why, "prompt")
            if len(ids) > room:
                raise Refused(400, f"prompt: {len(ids)} tokens; expected at most {room}", "prompt", TOO_LONG)
            prompts.append(ids)
        return prompts

    def _prompt(self, asked: ChatRequest) -> list[int]:
        """Returns the token ids of the messages. Raises Refused."""
        outcome: Any
        row = {"prompt": asked.messages, "chat_template_kwargs": asked.chat_template_kwargs}
        try:
            record = parse(row, self.encoder.kind)
            if unknown := [name for name in self.encoder.unread(record) if name.startswith("chat_")]:
                why = f"{unknown[0]}: the chat template does not read it"
                raise Refused(400, why, "chat_template_kwargs")
            [[outcome]] = self.encoder.encode([record])
        except RowError as error:
            outcome = error
        if isinstance(outcome, Example):
            return outcome.columns["input_ids"]
        field = outcome.field.replace("prompt", "messages", 1) or "messages"
        long = outcome.kind == "overlong"
        why = f"{'messages:' if long else f'{field}: found'} {outcome.found}; expected {outcome.expected}"
        raise Refused(400, why, "messages", TOO_LONG if long else None)

    @app.post("/score")
    @answered
    async def score(self, request: Request) -> Response:
        sent = await self._body(request)
        rows = sent if isinstance(sent, list) else [sent]
        name = request.query_params.get("model") or next(iter(self.models.rewards), "")
        if name not in self.models.rewards:
            raise protocol.unknown("reward model", name, self.models.rewards)
        if len(rows) > ROWS:
            raise Refused(413, f"found {len(rows)} rows; expected at most {ROWS} a request")
        served = self.models.rewards[name]
        future = await self._read(self.scores.ask, served, rows)
        async with limit(self.serve.timeout_s):
            scored = await asyncio.wrap_future(future)
        headers = {"x-model-version": served.version}
        return JSONResponse(scored if isinstance(sent, list) else scored[0], headers=headers)

    @app.post("/v1/feedback")
    @answered
    async def feedback(self, request: Request) -> Response:
        given = protocol.read(Feedback, await self._body(request))
        await self._flush()  # the recorder may not have the answer yet
        return JSONResponse(await self._ask_recorder("give", given.model_dump(exclude_none=True)))

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    @answered
    async def not_found(self, request: Request, path: str) -> Response:
        expected = ", ".join(f"{method} {path}" for path, method in PATHS.items())
        why = f"not found: {request.method} {request.url.path[:80]}; expected {expected}"
        raise Refused(405 if request.url.path in PATHS else 404, why)


PATHS = {route.path: min(route.methods) for route in app.routes if "{" not in route.path}  # type: ignore[attr-defined]
Ingress = serve.ingress(app)(Server)
