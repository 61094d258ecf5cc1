"""Tests the keys of a request. Keys without an effect are accepted. The error for an unsupported key names the key."""

import pytest

from pipeline.serving.protocol import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    Feedback,
    Refused,
    parse_request,
)

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
KINDS = ((ChatRequest, CHAT), (CompletionRequest, {"model": "toy", "prompt": "Hi"}))


@pytest.mark.parametrize(("kind", "request_"), KINDS)
def test_null_and_values_without_an_effect_equal_a_missing_key(kind, request_):
    expected = parse_request(kind, request_)
    unset = {*kind.model_fields, *NEUTRAL, "some_new_key"} - request_.keys()
    assert parse_request(kind, {**request_, **dict.fromkeys(unset)}) == expected
    for key, values in NEUTRAL.items():
        for value in values:
            assert parse_request(kind, {**request_, key: value}) == expected
    with pytest.raises(Refused, match=r"^model: Field required"):
        parse_request(kind, {**request_, "model": None})


WRONG = {
    "tools": [{"type": "function"}],
    "frequency_penalty": 0.5,
    "response_format": {"type": "json_object"},
    "suffix": "the end",
    "some_new_key": 0,
}


@pytest.mark.parametrize(("kind", "request_"), KINDS)
def test_a_key_with_an_effect_is_refused_by_name(kind, request_):
    for key, value in WRONG.items():
        with pytest.raises(Refused, match=f"^{key}: is not supported here; found ") as refused:
            parse_request(kind, {**request_, key: value})
        assert (refused.value.status, refused.value.param) == (400, key)


@pytest.mark.parametrize(
    ("kind", "request_", "message"),
    [
        (ChatRequest, [], "^found a list, expected an object"),
        (ChatRequest, {**CHAT, "stop": ["a", ""]}, "^stop: expected up to 4 texts"),
        (ChatRequest, {**CHAT, "top_logprobs": 3}, "^top_logprobs: requires logprobs"),
        (ChatRequest, {**CHAT, "temperature": float("nan")}, "^temperature: "),
        (ChatRequest, {**CHAT, "temperature": float("inf")}, "^temperature: "),
        (CompletionRequest, {"model": "toy", "prompt": "a", "stream": True}, "^stream: "),
        (CompletionRequest, {"model": "toy", "prompt": "a", "max_tokens": 0}, "^max_tokens: .*; found 0"),
        (Feedback, {"id": "x", "label": True, "edit": "y"}, "^label: expected exactly one of"),
        (Feedback, {"id": "x", "chosen": 1, "rejected": 1}, "^chosen: requires rejected"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(kind, request_, message):
    with pytest.raises(Refused, match=message):
        parse_request(kind, request_)
