"""Runs the server of `serve` on the Ray of the tests."""

import contextlib
import http.client
import json
from types import SimpleNamespace
from urllib.parse import urlsplit

from running import ROOT

from pipeline.commands.serve import serve_models
from pipeline.job import load_job
from pipeline.run.model_host import load_model_host
from pipeline.settle.identity import with_run_name

POLICIES = "serve.policies={toy: models:/toy-policy@champion, bare: base}"
REWARDS = "serve.rewards={toy-rm: models:/toy-rm@champion}"


@contextlib.contextmanager
def served(storage, *overrides, policies=POLICIES, rewards=REWARDS):
    """Starts the server. Yields an object with the server's address (`url`) and the job's Work object (`work`)."""
    arguments = [policies, rewards, "serve.port=0", f"run.storage_path={storage}", *overrides]
    job = load_job(ROOT / "jobs/demo/serve.yaml", arguments, "serve")
    with serve_models(load_model_host(with_run_name(job)).work) as work:
        yield SimpleNamespace(url=f"http://127.0.0.1:{work.serve.port}", work=work)


def ask(url, path, body=None, **headers):
    """Sends a request. Returns (status, headers, body), where the body is a JSON value or bytes."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=120)
    with contextlib.closing(connection):
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", path, data, headers)
        response = connection.getresponse()
        content = response.read()
        with contextlib.suppress(ValueError):
            content = json.loads(content)
        return response.status, dict(response.getheaders()), content


def chat(url, text="What is the capital of Peru?", model="toy", **settings):
    """Requests a chat completion. Returns (status, body)."""
    payload = {"model": model, "messages": [{"role": "user", "content": text}], **settings}
    status, _, answer = ask(url, "/v1/chat/completions", payload)
    return status, answer
