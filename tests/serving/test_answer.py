"""Tests the text of streamed completions, and that completions are canceled when their client disconnects."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect
from toy_data import BOT, THINKING, USER, encoder
from toy_models import tokenizer

from pipeline.serving.answer import Answer, Stream, Text
from pipeline.serving.app import Server
from pipeline.serving.batching import Token
from pipeline.serving.models import Served
from pipeline.serving.protocol import ChatRequest, Refused
from pipeline.writing.rows import Sampling


def test_a_prompt_has_the_reasoning_and_the_template_variables_of_its_request():
    server = SimpleNamespace(encoder=encoder("generate", template=THINKING))
    tok = server.encoder.tokenizer
    turns = [USER, {**BOT, "reasoning": "one", "refusal": None, "annotations": [1]}, {**USER, "name": "Ann"}]
    for kwargs, end in ((None, ""), ({"enable_thinking": False}, "<think></think>")):
        asked = ChatRequest(model="p", messages=turns, chat_template_kwargs=kwargs)
        text = tok.decode(Server._chat_ids(server, asked))
        assert "<think>one</think>yo<|im_end|>" in text and text.endswith(f"assistant\n{end}")
    asked.chat_template_kwargs = {"thinking_budget": 9}
    with pytest.raises(
        Refused,
        match=r"^chat_template_kwargs\.thinking_budget: the chat template does not use this variable$",
    ):
        Server._chat_ids(server, asked)


class Disconnected(OSError):
    """Raised if the client has closed the connection."""


@pytest.mark.parametrize("messages", [0, 2])
def test_a_client_that_disconnects_after_some_messages_cancels_its_rows(messages):

    async def closed():
        taken = []
        server = SimpleNamespace(
            tokenizer=tokenizer(),
            sampling=Sampling(8, ()),
            serve=SimpleNamespace(timeout_s=0.1),
            batcher=SimpleNamespace(submit=taken.extend),
        )
        request = ChatRequest(model="p", messages=[{"role": "user", "content": "Hi"}], n=3, stream=True)
        answer = Answer(server, request, [1, 2], Served("models:/p/1", "role"))
        server.batcher.submit(answer.rows)
        left = iter(range(messages))

        async def send(message):
            if next(left, None) is None:
                raise Disconnected

        with pytest.raises((ClientDisconnect, Disconnected)):
            await Stream(answer, {})({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)
        return taken

    rows = asyncio.run(closed())
    assert len(rows) == 3 and all(row.cancelled for row in rows)


def test_log_probs_have_the_text_and_the_bytes_of_each_token():
    spoken = tokenizer()
    ids = spoken("Peru is big", add_special_tokens=False).input_ids
    request = ChatRequest(model="p", messages=[{}], logprobs=True, top_logprobs=2)
    answer = SimpleNamespace(server=SimpleNamespace(tokenizer=spoken), request=request)
    tokens = [Token(token, -0.5, [(1, -0.5), (2, -0.7)], False) for token in ids]
    content = Answer._logprobs(answer, tokens)["content"]
    assert "".join(one["token"] for one in content) == "Peru is big"
    assert all(bytes(one["bytes"]).decode() == one["token"] for one in content)
    assert [len(one["top_logprobs"]) for one in content] == [2] * len(ids)


TEXTS = ("The capital of Peru is Lima.", "Ünïcode \U0001f600 漢字, and\n\n  spaces ", "")


def streamed(text, *stops):
    """Returns (streamed parts of the text, full text, whether a stop string ended the text)."""
    writer, shown = Text(tokenizer(), list(stops)), []
    for token in tokenizer()(text, add_special_tokens=False).input_ids:
        shown.append(writer.add(token))
        if writer.stopped:
            break
    shown.append(writer.close())
    return shown, writer.text, writer.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_form_the_text_and_contain_only_complete_characters(text):
    shown, whole, stopped = streamed(text)
    assert "".join(shown) == whole == text and not stopped
    assert not any("\ufffd" in piece for piece in shown)
    assert len(text) < 10 or sum(map(bool, shown)) > 3, "the text is streamed"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("Peru",), "The capital of "),
        (("is Lima", "Peru is"), "The capital of "),
        (("T",), ""),
        (("Lima.x",), TEXTS[0]),
        (("ita", "tital"), "The cap"),
    ],
)
def test_a_stop_text_ends_the_text_and_is_not_shown(stops, expected):
    shown, whole, stopped = streamed(TEXTS[0], *stops)
    assert "".join(shown) == whole == expected
    assert stopped == (expected != TEXTS[0])
