"""A reward model over HTTP, on this machine: prompt and completion in, score out.

    make serve    or    python -m pipeline serve jobs/demo/score.yaml [reward=models:/NAME/3] [run.port=8000]

    curl -s http://127.0.0.1:8000/score -d '{"prompt": "What is the capital of Peru?", "completion": "Lima."}'
    {"score": -1.98}

The job is that of `score`; its data is not read. A request is one row, or a list of rows, of any shape that `score`
reads; GET /health says what is served. Requests that arrive together are scored together. It listens on 127.0.0.1 only
and has no authentication: put a reverse proxy (which sends `Host: 127.0.0.1`) or an ssh tunnel in front of it. (The
standard library's server: MLflow's own would load a pyfunc with an environment of its own, and an adapter is not one; Ray
Serve would be another dependency.)
"""

import contextlib
import json
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import Job
from pipeline.data.encode import Dropped, Encoder
from pipeline.data.kinds import kind_of
from pipeline.data.parse import parse
from pipeline.data.values import RowError, mapping
from pipeline.errors import InputError
from pipeline.registry import first_line
from pipeline.runtime.host import Host
from pipeline.runtime.inputs import functions, unfilled
from pipeline.runtime.preparation import load_host
from pipeline.system.credentials import without_credentials

LARGEST = 8 << 20  # bytes of a request
ROWS = 4096  # of a request
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names in Host and Origin under which it is spoken to
CONNECTIONS = 512  # at a time; each has a thread
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 33\r\n"
    b'Connection: close\r\n\r\n{"error": "too many connections"}'
)
SECONDS = 30.0  # for a client to send a request, and for a connection to be idle


def run(job: Job) -> None:
    host = load_host(job)
    with server(host) as http:
        named = ", ".join(host.work.inputs.values())
        print(f"scoring with {named} at http://127.0.0.1:{http.server_port}/score", flush=True)
        try:
            http.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped")


def server(host: Host) -> ThreadingHTTPServer:
    """The HTTP server, bound but not yet serving; each request has its thread, the model has one of its own.

    Raises:
        InputError: when the port is taken.
    """
    port = host.job.run.port
    try:
        http = Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise InputError(
            f"{port} cannot be used ({error.strerror}); run.port=0 takes any free one", key="run.port"
        ) from error
    http.scores = Scores(host)
    http.health = {"status": "ok", "model": host.job.model.name_or_path, "inputs": host.work.inputs}
    return http


class Server(ThreadingHTTPServer):
    """One thread per connection, at most CONNECTIONS of them; an idle connection is closed after SECONDS."""

    daemon_threads = True
    # Connections that wait to be accepted: with the library's 5 a burst of clients is refused.
    request_queue_size = 128
    scores: "Scores"
    health: dict[str, Any]

    def __init__(self, *given: Any):
        self.listening: dict[Any, float] = {}  # connections that are to send a request, and since when
        self.open: set[Any] = set()
        super().__init__(*given)

    def service_actions(self) -> None:
        """What serve_forever does twice a second."""
        for connection, since in list(self.listening.items()):
            if time.monotonic() - since > SECONDS:
                with contextlib.suppress(OSError):  # its client was faster
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.open) < CONNECTIONS:
            self.open.add(request)
            self.listening[request] = time.monotonic()
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.send(BUSY)
        super().shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection. What its client still sends is read for a moment: else it would not see the answer."""
        self.listening.pop(request, None)
        self.open.discard(request)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            request.settimeout(1.0)
            until = time.monotonic() + 3
            while request.recv(1 << 16) and time.monotonic() < until:
                pass
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error and not isinstance(error, OSError):  # a client that went away is none of ours
            print(f"serve: {first_line(error)}", file=sys.stderr, flush=True)


class Scores:
    """Scores rows in one thread, which takes all that wait, up to a forward's worth, at a time."""

    def __init__(self, host: Host):
        from pipeline.commands.score import scorer
        from pipeline.models.template import text_as_chat
        from pipeline.models.tokenizer import eos_ids

        tokenizer = host.tokenizer
        context = host.job.data.max_length or host.work.base["context_length"] or 1 << 20
        apply = text_as_chat(tokenizer, host.job.data.apply_chat_template)
        data, ends = host.job.data, eos_ids(tokenizer)
        kind = kind_of("score")
        self.encoder = Encoder(tokenizer, kind, context, data.too_long, apply, ends, data.special_tokens)
        self.score = scorer(host)
        self.functions = functions(host.job)
        self.rows = host.job.args.local_rollout_forward_batch_size
        self.waiting: queue.SimpleQueue[tuple[list[Any], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="scores").start()

    def of(self, rows: list[Any]) -> list[dict[str, Any]]:
        """`score` of each row; of a pair `score_chosen`, `score_rejected` and `score_margin`.

        Raises:
            RowError: for the first row that is wrong, with its number as the line.
        """
        if not rows:
            return []
        completions, sides = [], []
        for number, row in enumerate(rows, 1):
            columns = self._columns(row, number)
            sides.append([side for side in ("chosen_ids", "rejected_ids") if columns[side] is not None])
            completions += [(columns["prompt_ids"], columns[side], row) for side in sides[-1]]
        answer: Future = Future()
        self.waiting.put((completions, answer))
        scores = iter(answer.result())
        results = []
        for names in sides:
            first = next(scores)
            if len(names) == 1:
                results.append({"score": first})
            else:
                second = next(scores)
                results.append(
                    {"score_chosen": first, "score_rejected": second, "score_margin": first - second}
                )
        return results

    def _columns(self, row: Any, number: int) -> dict[str, Any]:
        try:
            [outcomes] = self.encoder.encode([parse(row, self.encoder.kind)])
            for key, source in self.functions.items():
                if wanted := unfilled(source, {*row, "messages"}):
                    raise RowError("missing", wanted, "no such field", f"one, since {key} asks for it")
        except RowError as error:
            outcomes = [error]
        outcome = outcomes[0]
        if isinstance(outcome, Dropped):
            outcome = RowError(
                outcome.reason, "", "a pair that is equal once it is truncated", "a shorter prompt"
            )
        if len(outcomes) > 1:
            outcome = RowError("wrong_type", "pos_answers", "several pairs in one row", "one pair a row")
        if isinstance(outcome, RowError):
            outcome.file, outcome.line, outcome.unit = "request", number, "element"
            raise outcome
        return outcome.columns

    def _work(self) -> None:
        while True:
            batch = [self.waiting.get()]
            while sum(len(completions) for completions, _ in batch) < self.rows and not self.waiting.empty():
                batch.append(self.waiting.get())
            if not self._answer(batch) and len(batch) > 1:
                for one in batch:  # which of them it was that cannot be scored
                    self._answer([one])

    def _answer(self, batch: list[tuple[list[Any], Future]]) -> bool:
        """Scores the completions of several requests in one go; False: that failed, and only a lone request has been told."""
        try:
            scores = self.score([completion for completions, _ in batch for completion in completions])
        # A reward's sys.exit() too: the thread is needed for the next request.
        except BaseException as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
            return False
        for completions, answer in batch:
            answer.set_result(scores[: len(completions)])
            scores = scores[len(completions) :]
        return True


class Refused(Exception):
    """A request that is not answered: (status, why)."""


class Handler(BaseHTTPRequestHandler):
    """POST /score, GET /health; everything else is an error that says what is expected."""

    server: Server
    protocol_version = default_request_version = "HTTP/1.1"
    raw_requestline: bytes
    timeout = SECONDS

    def handle_one_request(self) -> None:
        self.server.listening[self.connection] = time.monotonic()
        super().handle_one_request()

    def parse_request(self) -> bool:
        if len(self.raw_requestline.split()) == 2:  # HTTP/0.9, after which the library waits for headers
            self.raw_requestline = b"HTTP/0.9"
        return super().parse_request() and self._holds(self._check_sender)

    def handle_expect_100(self) -> bool:
        """Before the client is asked to send its body."""
        return self._holds(self._check_sender) and self._holds(self._length) and super().handle_expect_100()

    def _holds(self, check: Callable[[], Any]) -> bool:
        """Whether a check of the headers passes; if not, the client has been told why."""
        try:
            check()
            return True
        except Refused as error:
            self.close_connection = True
            self._send(*error.args)
            return False

    def _check_sender(self) -> None:
        """Refuses what a web page elsewhere has a browser send: under a name that leads to this machine, or across sites.

        A client that is no browser may leave both headers out.
        """
        for header in ("Host", "Origin"):
            for value in self.headers.get_all(header, []):
                try:
                    host = urlsplit(value if header == "Origin" else f"//{value}").hostname
                except ValueError:
                    host = None
                if host not in LOOPBACK:
                    raise Refused(
                        403, f"{header}: found {value[:80]!r}; expected this machine's, e.g. 127.0.0.1"
                    )

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what it sends is not read
        if self.path == "/health":
            self._send(200, self.server.health)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        try:
            sent = self._body()
            self.server.listening.pop(self.connection, None)  # now it is the client that waits
            scored = self.server.scores.of(sent if isinstance(sent, list) else [sent])
            self._send(200, scored if isinstance(sent, list) else scored[0])
        except Refused as error:
            self._send(*error.args)
        except RowError as error:
            self._send(400, str(error))
        except OSError:
            raise  # the client went away
        except BaseException as error:  # whatever a reward raises
            self._send(500, without_credentials(f"{type(error).__name__}: {error}"))
            raise RuntimeError(f"a request failed ({first_line(error)})") from error

    def _body(self) -> Any:
        """The value that was sent. Raises Refused, and the connection is closed where its body has not been read."""
        asked_to_close, self.close_connection = self.close_connection, True
        length = self._length()
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the client went away")
        self.close_connection = asked_to_close
        if self.path != "/score":
            raise Refused(404, self._nowhere())
        try:
            sent = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=mapping)
            json.dumps(sent, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except (ValueError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:200]
            raise Refused(
                400, f"the request is not JSON ({why}); expected a row, or a list of rows"
            ) from error
        if isinstance(sent, list) and len(sent) > ROWS:
            raise Refused(413, f"found {len(sent)} rows; expected at most {ROWS} a request")
        return sent

    def _length(self) -> int:
        """Bytes of the body. Raises Refused."""
        given = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers:
            raise Refused(501, "Transfer-Encoding: expected a body with a Content-Length instead")
        if not given:
            raise Refused(411, "Content-Length: missing, expected the number of bytes of the body")
        if len(given) > 1 or not re.fullmatch("[0-9]+", given[0]):
            raise Refused(
                400, f"Content-Length: found {', '.join(given)[:80]!r}; expected one number of bytes"
            )
        if len(given[0]) > 9 or int(given[0]) > LARGEST:
            raise Refused(413, f"Content-Length: found {given[0][:80]}; expected at most {LARGEST} bytes")
        return int(given[0])

    def _nowhere(self) -> str:
        return f"not found: {self.path[:80]}; expected POST /score or GET /health"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The library's own refusals, as JSON too."""
        self.close_connection = True
        self._send(code, self._nowhere() if code == 404 else message or HTTPStatus(code).phrase)

    def _send(self, status: int, answer: Any) -> None:
        """A JSON answer; a text is an error."""
        body = json.dumps({"error": answer} if isinstance(answer, str) else answer, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line a request: only errors are worth one."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"found {name}")
