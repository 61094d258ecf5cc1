"""Defines the Ray Serve application: replicas of `Server`, which implement OpenAI's API, and one `Recorder`.

    handle = serve.run(make_application(work, digests), name="serve")

A request is parsed, decoded and answered by a single replica, which batches it with other requests. The recorder stores the
feedback and the metrics of all replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
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
from pipeline.data.formats import kind_of, parse_row
from pipeline.data.values import RowError
from pipeline.errors import in_brief
from pipeline.models.tokenizer import eos_ids
from pipeline.run import memory
from pipeline.run.model_host import ModelHost
from pipeline.run.roles import longest_row
from pipeline.serving import LOOPBACK, protocol
from pipeline.serving.answer import Answer, Stream, complete_prompts, time_limit
from pipeline.serving.feedback import FeedbackStore, feedback_encoders, feedback_folder
from pipeline.serving.metrics import Metrics, MetricsPage
from pipeline.serving.models import Models, Served, start_decoder
from pipeline.serving.protocol import ChatRequest, Completion, CompletionRequest, Feedback, Refused
from pipeline.serving.scores import MAX_ROWS, Scores
from pipeline.settle.work import Work
from pipeline.system import console
from pipeline.system.credentials import without_credentials
from pipeline.writing.rows import Sampling

TOO_LONG = "context_length_exceeded"  # OpenAI's error code
HEAD = "node:__internal_head__"  # resource that only the head node has in Ray
REQUEST_S = 30  # time limit in which a client must send the body of a request
FLUSH_S = 0.2  # time between two reports of a replica to the recorder
MAX_UNSENT_ANSWERS = 10_000  # maximum number of answers that a replica keeps while the recorder restarts
RETRY, CLOSE = {"Retry-After": "1"}, {"Connection": "close"}
# {HTTP status of an error: headers of the response}
HEADERS = {
    408: CLOSE,
    413: CLOSE,
    429: RETRY,
    503: RETRY,
}
app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


def make_application(work: Work, digests: list[str]) -> Any:
    """Returns the Ray Serve application of a checked job.

    Args:
        digests: sha256 of each valid client token. If there are no tokens, only requests to localhost are accepted.
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
        # Runs on the head node, so that users find the feedback folder there, and because an autoscaler never removes the head.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
        max_ongoing_requests=1000,
        logging_config=logging,
    )
    server = serve.deployment(Ingress).options(
        name="server",
        ray_actor_options=workers.each.options(),
        # This limit is so high that Ray Serve never rejects requests with status 503. A replica with a full queue responds with
        # status 429.
        max_ongoing_requests=4 * (limits.max_queue + work.args.local_rollout_forward_batch_size) + 64,
        graceful_shutdown_timeout_s=min(limits.timeout_s, 60.0),
        health_check_period_s=2.0,
        logging_config=logging,
        **replicas,
    )
    host = ModelHost(work)
    encoding = (work.tokenizer, longest_row(host), eos_ids(work.tokenizer), work.data.parse_special_tokens)
    folder = feedback_folder(limits, work.identity.storage_path) if limits.log_prompts else None
    return server.bind(work, digests, recorder.bind(folder, limits.max_feedback_bytes, encoding))


def bind_to_node_address() -> None:
    """Makes the gRPC server of this replica listen only on the node's Ray address. A local Ray has the address 127.0.0.1.

    In Ray Serve 2.60, this server listens on all interfaces, which is unsafe because the server unpickles requests. Remove this
    patch of a private function when Ray Serve has a setting for the address.
    """
    import ray
    from ray.serve._private import replica

    add_port, node_ip = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    host = f"[{node_ip}]" if ":" in node_ip else node_ip
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", host))


class Recorder:
    """Writes feedback to the feedback folder, and keeps the newest metrics of each replica. The application has one recorder."""

    def __init__(self, folder: str | None, max_bytes: int, encoding: tuple[Any, ...]) -> None:
        bind_to_node_address()
        self.store = folder and FeedbackStore(folder, max_bytes, feedback_encoders(*encoding))
        self.page = MetricsPage()
        self.lock = threading.Lock()  # Ray Serve may call methods in several threads

    def add_report(self, replica: str, metrics: Any, answers: list[dict[str, Any]]) -> Refused | None:
        """Stores a replica's metrics and its new answers. Returns a Refused error instead of raising it."""
        self.page.update(replica, metrics)
        return self._in_store("remember", answers) if answers else None

    def add_feedback(self, feedback: dict[str, Any]) -> dict[str, Any] | Refused:
        return self._in_store("add", feedback)

    def _in_store(self, method: str, argument: Any) -> Any:
        """Calls a method of the feedback store. Returns Refused errors, because Ray would log a traceback if they were raised."""
        try:
            with self.lock:
                return getattr(self.store, method)(argument)
        except Refused as error:
            return error

    def metrics(self) -> bytes:
        return self.page.text()


def endpoint(handler: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Decorates a request handler: checks the sender before the handler runs, and turns exceptions into error responses."""

    @functools.wraps(handler)  # FastAPI reads the handler's signature
    async def wrapped(self: Any, request: Request, **parameters: Any) -> Response:
        path = request.scope["route"].path
        try:
            if path != "/health":
                self.check_sender(request)
            response = await handler(self, request, **parameters)
        except (ClientDisconnect, TaskCancelledError):  # the client has disconnected
            response = Response(status_code=499)
        except Exception as error:
            if isinstance(error, RowError):
                refusal = Refused(400, str(error), error.field or None)
            elif isinstance(error, Refused):
                refusal = error
            else:
                print(f"a request failed: {in_brief(error)}", flush=True)
                refusal = Refused(500, without_credentials(f"{type(error).__name__}: {error}")[:1000])
            response = JSONResponse(refusal.body(), refusal.status, HEADERS.get(refusal.status))
        self.metrics.requests.labels(path, response.status_code).inc()
        return response

    return wrapped


class Server:
    """A replica, with the base, its adapters, and the batch that all requests share."""

    def __init__(self, work: Work, digests: list[str], recorder: DeploymentHandle) -> None:
        bind_to_node_address()
        console.silence_libraries()
        host = ModelHost(work)
        self.serve, self.args = work.serve, work.args
        self.digests, self.recorder, self.tokenizer = digests, recorder, work.tokenizer
        self.name = secrets.token_hex(4)
        with memory.memory_errors_explained(work):
            shared, self.batcher = start_decoder(host)
            self.models = Models(host, shared, self.batcher)
        stops, args, self.longest = eos_ids(host.tokenizer), work.args, longest_row(host)
        self.sampling = Sampling(args.response_length, tuple(stops), args.min_new_tokens, args.temperature)
        self.scores = Scores(host, self.batcher)
        settings = (self.longest - args.response_length, "error", True, stops, work.data.parse_special_tokens)
        self.encoder = Encoder(self.tokenizer, kind_of("generate"), *settings)
        # A separate thread tokenizes requests, so that a long prompt does not block the event loop.
        self.reader = ThreadPoolExecutor(1, "reader")
        self.metrics = Metrics()
        self.answers: list[dict[str, Any]] = []  # finished answers that have not been sent to the recorder
        self.flushing = asyncio.Lock()
        self.flusher = asyncio.get_running_loop().create_task(self._flush_often())
        interval = (self.serve.alias_poll_interval_s,)
        threading.Thread(target=self.models.watch_aliases, args=interval, daemon=True).start()

    def check_health(self) -> None:
        """Raises RuntimeError if the batcher's thread has ended. Ray Serve then restarts the replica."""
        if not self.batcher.alive:
            raise RuntimeError("the batcher's thread has ended")

    # ---------------------------------------------------------------------------------------- the recorder

    async def _ask_recorder(self, method: str, *arguments: Any) -> Any:
        try:
            result = await getattr(self.recorder, method).remote(*arguments)
        except Exception as error:
            raise Refused(503, "the recorder is restarting; send the request again") from error
        if isinstance(result, Refused):
            raise result
        return result

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            # If the recorder restarts or cannot write, the next flush sends the same answers again.
            with contextlib.suppress(Exception):
                await self._flush()

    async def _flush(self) -> None:
        """Sends metrics and finished answers to the recorder."""
        async with self.flushing:  # while a call waits for this lock, another call may send the answers
            self.metrics.running.set(len(self.batcher.rows))
            self.metrics.waiting.set(len(self.batcher.waiting))
            self.metrics.versions.clear()
            for name, version in self.models.versions.items():
                self.metrics.versions.labels(name, version).set(1)
            answers, self.answers = self.answers, []
            try:
                metrics = list(self.metrics.registry.collect())
                await self._ask_recorder("add_report", self.name, metrics, answers)
            except (Refused, asyncio.CancelledError):  # the client's disconnection raises CancelledError
                self.answers = (answers + self.answers)[-MAX_UNSENT_ANSWERS:]
                raise

    def remember(self, answer: Answer) -> None:
        """Keeps a finished chat completion for the recorder, so that clients can give feedback on it."""
        request = answer.request
        if not self.serve.log_prompts or not isinstance(request, ChatRequest):
            return
        record = {"id": answer.head["id"], "time": time.time(), "version": answer.version}
        record |= {"model": request.model, "seed": answer.seed, "choices": request.n}
        record |= {"messages": request.messages, "chat_template_kwargs": request.chat_template_kwargs}
        record["texts"] = [text.text for text in answer.texts]
        record["truncated"] = [i for i, reason in enumerate(answer.reasons) if reason == "length"]
        self.answers.append(record)

    # --------------------------------------------------------------------------------- parts of every request

    def check_sender(self, request: Request) -> None:
        """Raises Refused with status 401 if the token is missing or invalid.

        If the server has no tokens, raises Refused with status 403 if the header Host or Origin does not name this machine."""
        if self.digests:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            digest = hashlib.sha256(token.strip().encode()).hexdigest()
            if scheme.lower() != "bearer" or digest not in self.digests:
                raise Refused(401, "expected `Authorization: Bearer TOKEN` with a valid token")
            return
        for header, prefix in (("host", "//"), ("origin", "")):
            for value in request.headers.getlist(header):
                try:
                    hostname = urlsplit(prefix + value).hostname
                except ValueError:
                    hostname = None
                if hostname not in LOOPBACK:
                    raise Refused(403, f"{header}: found {value[:80]!r}; expected 127.0.0.1 or localhost")

    async def _body(self, request: Request) -> Any:
        """Returns the parsed JSON of the request's body. Raises Refused if the body is invalid, too large or too slow."""
        limit, body = self.serve.max_body_bytes, bytearray()
        too_large = Refused(413, f"the body has more than {limit} bytes (serve.max_body_bytes)")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        async with time_limit(REQUEST_S, Refused(408, f"no complete body within {REQUEST_S} s")):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
        return protocol.parse_json(bytes(body))

    async def _parse(self, request: Request, kind: type[Completion]) -> tuple[Completion, Served]:
        """Returns a parsed completion request and the requested policy. Raises Refused if the request is invalid."""
        parsed = protocol.parse_request(kind, await self._body(request))
        if parsed.model not in self.models.policies:
            raise protocol.unknown_model("policy", parsed.model, self.models.policies)
        if parsed.n > self.serve.max_n:
            raise Refused(400, f"n: found {parsed.n}; expected at most {self.serve.max_n}", "n")
        return parsed, self.models.policies[parsed.model]

    async def _in_reader(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.reader, function, *arguments)

    # -------------------------------------------------------------------------------------------- requests

    @app.get("/health")
    @endpoint
    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    @endpoint
    async def prometheus(self, request: Request) -> Response:
        with contextlib.suppress(Refused):  # metrics are returned even if the recorder cannot store answers
            await self._flush()
        page = await self._ask_recorder("metrics")
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    @endpoint
    async def list_models(self, request: Request) -> Response:
        models = [self._model_facts(name) for name in self.models.versions]
        return JSONResponse({"object": "list", "data": models})

    @app.get("/v1/models/{name}")
    @endpoint
    async def get_model(self, request: Request, name: str) -> Response:
        if name not in self.models.versions:
            raise protocol.unknown_model("model", name, self.models.versions)
        return JSONResponse(self._model_facts(name))

    def _model_facts(self, name: str) -> dict[str, Any]:
        kind = "policy" if name in self.models.policies else "reward"
        fields = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "rlhf"}
        return {**fields, "version": self.models.versions[name], "kind": kind}

    @app.post("/v1/chat/completions")
    @endpoint
    async def chat(self, request: Request) -> Response:
        parsed, served = await self._parse(request, ChatRequest)
        answer = Answer(self, parsed, await self._in_reader(self._chat_ids, parsed), served)
        self.batcher.submit(answer.rows)
        headers = {"x-model-version": answer.version}
        if parsed.stream:
            return Stream(answer, headers)
        return JSONResponse(await answer.as_json(), headers=headers)

    @app.post("/v1/completions")
    @endpoint
    async def complete(self, request: Request) -> Response:
        parsed, served = await self._parse(request, CompletionRequest)
        if len(parsed.prompts) * parsed.n > self.serve.max_queue:
            expected = f"at most {self.serve.max_queue} completions (serve.max_queue)"
            raise Refused(400, f"prompt: found {len(parsed.prompts)} prompts; expected {expected}", "prompt")
        reply = await complete_prompts(self, parsed, await self._in_reader(self._prompt_ids, parsed), served)
        return JSONResponse(reply, headers={"x-model-version": served.version})

    def _prompt_ids(self, request: CompletionRequest) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises Refused if a prompt is empty, invalid or too long."""
        length = self.args.response_length
        limit = self.longest - min(request.token_limit or length, length)
        vocabulary, prompts = len(self.tokenizer), []
        for prompt in request.prompts:
            ids = self.encoder.ids([(prompt, None)])[0] if isinstance(prompt, str) else prompt
            if not ids or max(ids) >= vocabulary:
                problem = f"prompt: found {str(prompt)[:80]!r}; expected token ids below {vocabulary}"
                raise Refused(400, problem, "prompt")
            if len(ids) > limit:
                raise Refused(400, f"prompt: {len(ids)} tokens; expected at most {limit}", "prompt", TOO_LONG)
            prompts.append(ids)
        return prompts

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        """Returns the token ids of the messages in the chat template. Raises Refused if the messages are invalid or too long."""
        row = {"prompt": request.messages, "chat_template_kwargs": request.chat_template_kwargs}
        try:
            record = parse_row(row, self.encoder.kind)
            if unused := [name for name in self.encoder.unread(record) if name.startswith("chat_")]:
                problem = f"{unused[0]}: the chat template does not use this variable"
                raise Refused(400, problem, "chat_template_kwargs")
            [[outcome]] = self.encoder.encode([record])
            if isinstance(outcome, RowError):
                raise outcome
        except RowError as error:
            field = error.field.replace("prompt", "messages", 1) or "messages"
            overlong = error.kind == "overlong"
            problem = (
                f"{'messages:' if overlong else f'{field}: found'} {error.found}; expected {error.expected}"
            )
            raise Refused(400, problem, "messages", TOO_LONG if overlong else None) from error
        assert isinstance(outcome, Example)
        return outcome.columns["input_ids"]

    @app.post("/score")
    @endpoint
    async def score(self, request: Request) -> Response:
        body = await self._body(request)
        rows = body if isinstance(body, list) else [body]
        name = request.query_params.get("model") or next(iter(self.models.rewards), "")
        if name not in self.models.rewards:
            raise protocol.unknown_model("reward model", name, self.models.rewards)
        if len(rows) > MAX_ROWS:
            raise Refused(413, f"found {len(rows)} rows; expected at most {MAX_ROWS} rows")
        served = self.models.rewards[name]
        future = await self._in_reader(self.scores.score, served, rows)
        async with time_limit(self.serve.timeout_s):
            scored = await asyncio.wrap_future(future)
        headers = {"x-model-version": served.version}
        return JSONResponse(scored if isinstance(body, list) else scored[0], headers=headers)

    @app.post("/v1/feedback")
    @endpoint
    async def feedback(self, request: Request) -> Response:
        feedback = protocol.parse_request(Feedback, await self._body(request))
        if not self.serve.log_prompts:
            raise Refused(400, "this server stores no answers; start the server with serve.log_prompts=true")
        await self._flush()  # the answer may not have been sent to the recorder yet
        return JSONResponse(await self._ask_recorder("add_feedback", feedback.model_dump(exclude_none=True)))


Ingress = serve.ingress(app)(Server)
