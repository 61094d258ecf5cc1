"""A reward model over HTTP, on this machine: prompt and completion in, score out.

    make serve    or    python -m pipeline serve jobs/demo/score.yaml [reward=models:/NAME/3] [run.port=8000]

    curl -s http://127.0.0.1:8000/score -d '{"prompt": "What is the capital of Peru?", "completion": "Lima."}'
    {"score": -1.98}

The job is that of `score`; its data is not read. A request is one row, or a list of rows, of any shape that `score`
reads; GET /health says what is served. Requests that arrive together are scored together. It listens on 127.0.0.1 only
and knows no passwords: put a reverse proxy or an ssh tunnel before it. (The standard library's server: MLflow's own
would load a pyfunc with an environment of its own, and an adapter is not one; Ray Serve would be another dependency.)
"""

import json
import queue
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pipeline.config import Job
from pipeline.data.encode import Dropped, Encoder
from pipeline.data.formats import RowError, parse
from pipeline.errors import InputError
from pipeline.inference import here, options
from pipeline.worker import Host

LARGEST = 8 << 20  # bytes of a request


def run(job: Job) -> None:
    host = here(job)
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
            f"run.port: {port} cannot be used ({error.strerror}); run.port=0 takes any free one"
        ) from error
    http.scores = Scores(host)
    http.health = {"status": "ok", "model": host.job.model.name_or_path, "inputs": host.work.inputs}
    return http


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        128  # connections that wait to be accepted: with the library's 5 a burst of clients is refused
    )
    scores: "Scores"
    health: dict[str, Any]


class Scores:
    """Scores rows in one thread, which takes all that wait, up to a forward's worth, at a time."""

    def __init__(self, host: Host):
        from pipeline.models.tokenizer import eos_ids
        from pipeline.stages.score import scorer

        tokenizer, own = host.tokenizer, host.tokenizer.own_chat_template
        context = host.job.data.max_length or host.work.base["context_length"] or 1 << 20
        apply = own if host.job.data.apply_chat_template is None else host.job.data.apply_chat_template
        data, ends = host.job.data, eos_ids(tokenizer)
        self.encoder = Encoder(tokenizer, "score", context, data.too_long, apply, ends, data.special_tokens)
        self.score = scorer(host)
        self.rows = options(host.job).local_rollout_forward_batch_size
        self.waiting: queue.SimpleQueue[tuple[list[Any], Future]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="scores").start()

    def of(self, rows: list[Any]) -> list[dict[str, Any]]:
        """`score` of each row; of a pair `score_chosen`, `score_rejected` and `score_margin`.

        Raises:
            RowError: for the first row that is wrong, with its number as the line.
        """
        if not rows:
            return []
        replies, sides = [], []
        for number, row in enumerate(rows, 1):
            columns = self._columns(row, number)
            sides.append([side for side in ("chosen_ids", "rejected_ids") if columns[side] is not None])
            replies += [(columns["prompt_ids"], columns[side], row) for side in sides[-1]]
        answer: Future = Future()
        self.waiting.put((replies, answer))
        found = iter(answer.result())
        results = []
        for names in sides:
            one = next(found)
            if len(names) == 1:
                results.append({"score": one})
            else:
                two = next(found)
                results.append({"score_chosen": one, "score_rejected": two, "score_margin": one - two})
        return results

    def _columns(self, row: Any, number: int) -> dict[str, Any]:
        try:
            [outcomes] = self.encoder.encode([parse(row, "score")])
        except RowError as error:
            outcomes = [error]
        found = outcomes[0]
        if isinstance(found, Dropped):
            found = RowError(
                found.reason, "", "a pair that is equal once it is truncated", "a shorter prompt"
            )
        if len(outcomes) > 1:
            found = RowError("wrong_type", "pos_answers", "several pairs in one row", "one pair a row")
        if isinstance(found, RowError):
            found.file, found.line, found.unit = "request", number, "element"
            raise found
        return found.columns

    def _work(self) -> None:
        while True:
            batch = [self.waiting.get()]
            while sum(len(replies) for replies, _ in batch) < self.rows and not self.waiting.empty():
                batch.append(self.waiting.get())
            try:
                found = self.score([reply for replies, _ in batch for reply in replies])
            except Exception as error:  # belongs to those who asked; the next request may be a better one
                for _, answer in batch:
                    answer.set_exception(error)
                continue
            for replies, answer in batch:
                answer.set_result(found[: len(replies)])
                found = found[len(replies) :]


class Handler(BaseHTTPRequestHandler):
    """POST /score, GET /health; everything else is an error that says what is expected."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, self.server.health)
        else:
            self._send(404, {"error": f"no page {self.path}; expected POST /score or GET /health"})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST:
            self.close_connection = True
            self._send(413, {"error": f"Content-Length: found {length!r}; expected at most {LARGEST} bytes"})
            return
        body = self.rfile.read(int(length))
        if self.path != "/score":
            self._send(404, {"error": f"no page {self.path}; expected POST /score or GET /health"})
            return
        try:
            said = json.loads(body)
        except ValueError as error:
            self._send(
                400, {"error": f"the request is not JSON ({error}); expected a row, or a list of rows"}
            )
            return
        try:
            found = self.server.scores.of(said if isinstance(said, list) else [said])
        except RowError as error:
            self._send(400, {"error": str(error)})
            return
        except Exception as error:
            self._send(500, {"error": f"{type(error).__name__}: {error}"})
            raise  # its traceback belongs into the server's log
        self._send(200, found if isinstance(said, list) else found[0])

    def _send(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line a request: only errors are worth one, and they have their traceback."""
