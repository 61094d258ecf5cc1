"""Tests the server with a real vLLM. The CPU build of vLLM suffices."""

import os

import pytest
from served import ask, chat, served
from toy_models import registered, second

from pipeline import registry
from tools.chaos.runs import until

pytest.importorskip("vllm", reason="needs the extra `vllm`")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("embedded_ray")]
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
# prompts to which the versions give different answers
TEXTS = [
    "7 blue of",
    "Why?",
    "Say the",
    "xq zz 12 capital",
]


def greedy(url, model):
    return [
        chat(url, text, model, temperature=0, max_tokens=12)[1]["choices"][0]["message"] for text in TEXTS
    ]


def test_vllm_answers_like_transformers_follows_aliases_and_scores(storage, tmp_path):
    registered(storage)
    with served(storage) as plain:
        expected = {model: greedy(plain.url, model) for model in ("toy", "bare")}
    assert expected["toy"] != expected["bare"]
    settings = [
        "rollout.engine=vllm",
        "serve.alias_poll_interval_s=0.3",
        "rollout.vllm_kwargs={enforce_eager: true}",
    ]
    with served(storage, *settings) as server:
        assert {model: greedy(server.url, model) for model in ("toy", "bare")} == expected
        sampled = [chat(server.url, seed=5, n=3)[1]["choices"] for _ in range(2)]
        assert sampled[0] == sampled[1] and len({one["message"]["content"] for one in sampled[0]}) > 1
        status, answer = chat(server.url, logprobs=True, top_logprobs=3, temperature=0, max_tokens=4)
        listed = answer["choices"][0]["logprobs"]["content"]
        assert status == 200 and all(len(one["top_logprobs"]) == 3 for one in listed)
        assert [one["logprob"] for one in listed] == [one["top_logprobs"][0]["logprob"] for one in listed]
        row = {"prompt": TEXTS[0], "completion": "Oslo."}
        assert ask(server.url, "/score", row)[0] == 200

        client, number = registry.client(server.work.uri), second(storage)
        client.set_registered_model_alias("toy-policy", "champion", number)
        try:
            until(
                lambda: chat(server.url)[1]["system_fingerprint"] == f"models:/toy-policy/{number}",
                "the alias",
            )
            assert greedy(server.url, "toy") not in (expected["toy"], expected["bare"])
        finally:
            client.set_registered_model_alias("toy-policy", "champion", "1")
