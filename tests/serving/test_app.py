"""Tests how long a prompt may be for a replica."""

import asyncio
import functools
from types import SimpleNamespace

import pytest
from toy_models import ROOT, tokenizer

from pipeline.job import load_job
from pipeline.run.model_host import load_model_host
from pipeline.serving.app import Server
from pipeline.serving.protocol import ChatRequest, Refused

CONTEXT = 256  # context length of the demo's base
SYSTEM = {"role": "system", "content": "You answer questions about the world in one short sentence."}
TURNS = [
    SYSTEM,
    {"role": "user", "content": "What is the capital of Peru?"},
    {"role": "assistant", "content": "The capital of Peru is Lima."},
    {"role": "user", "content": "And what is the capital of Chile? Please name only the city."},
]


@functools.cache
def read(*overrides):
    """Returns the function that reads the messages of a request, in a replica of the demo's base with these settings."""
    given = ["serve.policies={toy: base}", "serve.rewards={}", *overrides]
    work = load_model_host(load_job(ROOT / "jobs/demo/serve.yaml", given, "serve")).work

    async def started():
        server = Server(work, [], SimpleNamespace())
        server.flusher.cancel()
        server.batcher.close()
        return server

    server = asyncio.run(started())
    return lambda messages: server._prompt(ChatRequest(model="toy", messages=messages))


def ids(messages):
    return tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_conversation_with_the_rows_system_prompt_may_fill_the_context(tmp_path):
    reads = read("data.max_length=null", "trainer.response_length=40", f"run.storage_path={tmp_path}")
    assert reads(TURNS) == ids(TURNS)
    words = next(n for n in range(CONTEXT) if len(ids(asked(n + 1))) > CONTEXT - 40)
    assert len(reads(asked(words))) == len(ids(asked(words)))
    says = (
        rf"^messages: \d+ tokens; expected at most {CONTEXT - 40} tokens \(data.max_length or the context\)$"
    )
    with pytest.raises(Refused, match=says) as refused:
        reads(asked(words + 1))
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


def asked(words):
    return [*TURNS[:-1], {"role": "user", "content": "word " * words}]
