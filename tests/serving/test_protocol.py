"""Tests the keys of a request: keys that change nothing are accepted, keys with an effect are refused by name."""

import pytest

from pipeline.serving.protocol import NEUTRAL, ChatRequest, CompletionRequest, Feedback, Refused, read

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "toy", "messages": MESSAGES}
COMPLETION = {"model": "toy", "prompt": "Hi"}
KINDS = ((ChatRequest, CHAT), (CompletionRequest, COMPLETION))


@pytest.mark.parametrize(("kind", "asked"), KINDS)
def test_null_equals_a_missing_key(kind, asked):
    keys = {*kind.model_fields, *NEUTRAL, "some_new_key"} - asked.keys()
    assert read(kind, {**asked, **dict.fromkeys(keys)}) == read(kind, asked)
    with pytest.raises(Refused, match=r"^model: Field required"):
        read(kind, {**asked, "model": None})
    assert read(Feedback, {"id": "a", "label": None, "edit": "b", "more": None}).kind == "edits"


@pytest.mark.parametrize(("kind", "asked"), KINDS)
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in NEUTRAL.items() for value in values]
)
def test_a_value_that_changes_nothing_is_accepted(kind, asked, key, value):
    assert read(kind, {**asked, key: value}) == read(kind, asked)


ZED = {"tool_choice": "none", "parallel_tool_calls": False, "stream": True, "n": None}  # no tools
SENT_BY_CLIENTS = [
    ZED,
    {"modalities": ["text"], "metadata": {}, "service_tier": "auto"},
    {"best_of": 1, "suffix": None},
]


@pytest.mark.parametrize("sent", SENT_BY_CLIENTS)
def test_the_requests_of_common_clients_are_read(sent):
    assert read(ChatRequest, {**CHAT, **sent}).n == 1


WITH_AN_EFFECT = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "metadata": {"a": "b"},
    "store": True,
    "best_of": 3,
    "suffix": "the end",
    "service_tier": "priority",
    "some_new_key": 0,
}


@pytest.mark.parametrize(("kind", "asked"), KINDS)
@pytest.mark.parametrize(("key", "value"), WITH_AN_EFFECT.items())
def test_a_value_with_an_effect_is_refused_by_name(kind, asked, key, value):
    with pytest.raises(Refused, match=f"^{key}: is not supported here; found ") as refused:
        read(kind, {**asked, key: value})
    assert (refused.value.status, refused.value.param) == (400, key)
