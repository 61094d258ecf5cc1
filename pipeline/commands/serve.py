"""Serves policies and reward models on one base, with OpenAI's chat completions API, /score and /v1/feedback.

    make serve    or    python -m pipeline serve jobs/demo/serve.yaml [serve.port=9000] [serve.log_prompts=true]

    curl -s http://127.0.0.1:8000/v1/chat/completions \
         -d '{"model": "rlhf-ppo", "messages": [{"role": "user", "content": "Hello"}]}'
    curl -s http://127.0.0.1:8000/score -d '{"prompt": "What is the capital of Peru?", "completion": "Lima."}'

The Ray Serve application of pipeline/serving/ runs on a local Ray, or on a cluster if RAY_ADDRESS is set. By default, only this
machine can reach the server. For other machines, set serve.host, and set RLHF_SERVE_TOKENS to the tokens that clients send.
"""

import contextlib
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline.errors import Failure, InputError
from pipeline.job import Job, Serve, load_job
from pipeline.run.model_host import load_model_host
from pipeline.run.session import ray_session
from pipeline.serving import LOOPBACK
from pipeline.settle import placement
from pipeline.settle.identity import with_run_name
from pipeline.settle.work import Work
from pipeline.system import console

TOKENS = "RLHF_SERVE_TOKENS"
MIN_TOKEN_LENGTH = 16  # characters


def run(job: Job) -> None:
    token_digests(job.serve.host)  # raises an error about a missing token before models are downloaded
    with serve_models(load_model_host(with_run_name(job)).work, job.run.name or "serve") as work:
        print(describe_server(work), flush=True)
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            print("\nstopping", flush=True)


@contextlib.contextmanager
def serve_models(work: Work, name: str = "serve") -> Iterator[Work]:
    """Serves the models of a job during the `with` block. Yields `work` with the server's port.

    Raises InputError if the port is in use, and Failure if a replica cannot be placed or does not start.
    """
    from ray import serve

    from pipeline.serving import feedback
    from pipeline.serving.app import make_application

    section = with_port(work.serve)
    work = replace(work, serve=section)
    # On a cluster, the feedback folder is on the head node, so this machine cannot check the folder.
    if section.log_prompts and not os.environ.get("RAY_ADDRESS"):
        folder = feedback.feedback_folder(section, work.identity.storage_path)
        feedback.FeedbackStore(folder, max_bytes=section.max_feedback_bytes, encoders={}).close()
    with ray_session(work.places, work.identity.storage_path, work.uri):
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        placement.wait_for_one(work.places)
        # Ray Serve's timeout is longer than serve.timeout_s, so that requests fail with our error message.
        limit = section.timeout_s + 5
        serve.start(
            http_options={"host": section.host, "port": section.port, "request_timeout_s": limit},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        try:
            with console.print_if_slow("loading the models"):
                serve.run(make_application(work, token_digests(section.host)), name=name, route_prefix="/")
        except RuntimeError as error:
            deployments = serve.status().applications[name].deployments.values()
            message = next((d.message for d in deployments if d.message.strip()), str(error))
            reason = message.strip().splitlines()[-1].strip()  # the last line of the replica's traceback
            raise Failure(f"the application did not start: {reason}") from error
        else:
            yield work
        finally:
            with console.native_lines_filtered():
                serve.shutdown()


def describe_server(work: Work) -> str:
    """Returns the text that `serve` prints at the start: the address, the served versions, and an example request."""
    from pipeline.serving.models import pinned_versions

    serve = work.serve
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    url = f"http://{host}:{serve.port}"
    lines = [f"   {key.partition('.')[2]:<28}{version}" for key, version in pinned_versions(work).items()]
    header = f' -H "Authorization: Bearer ${TOKENS}"' if os.environ.get(TOKENS) else ""
    if serve.policies:
        body = f'{{"model": "{next(iter(serve.policies))}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        example = f"curl -s {url}/v1/chat/completions{header} -d '{body}'"
    else:
        example = (
            f"""curl -s {url}/score{header} -d '{{"prompt": "Who is there?", "completion": "A friend."}}'"""
        )
    return "\n".join([f"\nserving at {url}", *lines, f"   {example}", "Ctrl-C stops the server"])


def token_digests(host: str) -> list[str]:
    """Returns the SHA-256 of each token in RLHF_SERVE_TOKENS. The tokens are separated by commas or white space.

    Raises InputError if a token is short, or if other machines can reach the server and there is no token.
    """
    tokens = os.environ.get(TOKENS, "").replace(",", " ").split()
    if not tokens and host not in LOOPBACK:
        raise InputError(
            f"found {host}, which other machines can reach, but no tokens; run export {TOKENS}=$(openssl rand -hex 32), "
            "or use serve.host=127.0.0.1",
            key="serve.host",
        )
    if any(len(token) < MIN_TOKEN_LENGTH for token in tokens):
        raise InputError(
            f"found a token of less than {MIN_TOKEN_LENGTH} characters; run export {TOKENS}=$(openssl rand -hex 32)",
            key=TOKENS,
        )
    return [hashlib.sha256(token.encode()).hexdigest() for token in tokens]


def with_port(serve: Serve) -> Serve:
    """Returns the section `serve`, with a free port in place of port 0. Raises InputError if the port is in use."""
    if os.environ.get("RAY_ADDRESS"):  # the server's port is on the head node, not on this machine
        return serve
    family = socket.AF_INET6 if ":" in serve.host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((serve.host, serve.port))
        except OSError as error:
            raise InputError(
                f"the server cannot listen on {serve.host}:{serve.port} ({error.strerror}); set serve.port=0 for any free port",
                key="serve.port",
            ) from error
        return replace(serve, port=sock.getsockname()[1])


def build(args: dict[str, Any]) -> Any:
    """Builds the application for `serve deploy` and KubeRay's RayService: import_path pipeline.commands.serve:build.

    Args:
        args: a dict with `job`, the path of a job file, and `overrides`, a list of section.key=value.
    """
    import ray

    from pipeline.serving.app import make_application

    # Ray Serve calls this function in a task, often on a head node without GPUs. The replicas run on other nodes.
    if ray.is_initialized():
        os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    work = load_model_host(with_run_name(load_job(args["job"], args.get("overrides") or [], "serve"))).work
    return make_application(work, token_digests(work.serve.host))
