"""A fake endpoint of an LLM judge, which counts paid answers and fails like real endpoints."""

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter

from servers import Handler, listening

MODEL = "wise"
# the faults that happen to the first requests, one fault per request
FAULTS = ["hangs", "closes", 429, 500, "torn", "nonsense", "other model", 408, "closes", 503, 429, "nonsense"]


def liking(text):
    """Returns a score from 1 to 10, computed from the question alone."""
    return 1 + int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10


def answer_score(request):
    return f"It is fine.\nScore: {liking(request['messages'][-1]['content'])}"


def chat(text, model=MODEL, top=None, tokens=(100, 10)):
    logprobs = {"content": [{"token": text, "top_logprobs": top}]} if top else None
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": logprobs}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return {"object": "chat.completion", "model": model, "choices": [choice], "usage": usage}


class Judging(Handler):
    """Applies the next fault in `server.faults` to each request. When no fault is left, the server answers requests."""

    def do_POST(self):
        server, request = self.server, json.loads(self.body())
        with server.lock:
            server.requests.append((dict(self.headers), request))
            fault = server.faults.pop(0) if server.faults else None
        if fault == "hangs":
            server.never.wait(60)
            return
        if fault == "closes":
            self.close_connection = True
            self.connection.close()
            return
        if isinstance(fault, int):
            self.send(fault, b'{"error": "no"}', "application/json", Retry_After="0.01")
            return
        if fault == "refuses":
            self.send(401, f"{'x' * 60}\n not {self.headers['Authorization']}; ask for another".encode())
            return
        if fault == "torn":
            self.send(200, b'{"choices": [', "application/json")
            return
        if server.delay:
            time.sleep(server.delay)
        reply = server.answer(request)
        reply = reply if isinstance(reply, dict) else chat(reply)
        if fault == "nonsense":
            reply = chat("I cannot say.")
        elif fault == "other model":
            reply["model"] = "cheap"
        self.send(200, json.dumps(reply).encode(), "application/json")
        if fault is None:
            with server.lock:
                server.paid[json.dumps(request, sort_keys=True)] += 1


@contextlib.contextmanager
def judging(answer=answer_score, faults=(), delay=0.0):
    state = dict(
        answer=answer, faults=list(faults), delay=delay, requests=[], paid=Counter(), lock=threading.Lock()
    )
    with listening(Judging, never=threading.Event(), **state) as server:
        try:
            yield server
        finally:
            server.never.set()
