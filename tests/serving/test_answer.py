"""Tests the text of a streamed completion. If the client of a stream disconnects at any time, its rows are canceled."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect
from tokenizers import Tokenizer, decoders, models, normalizers
from toy_data import BOT, THINKING, USER, encoder
from toy_models import tokenizer
from transformers import PreTrainedTokenizerFast

from pipeline.serving.answer import Answer, Mailbox, Stream, Text, bytes_of, name_of
from pipeline.serving.app import Server
from pipeline.serving.batching import Token
from pipeline.serving.models import Served
from pipeline.serving.protocol import ChatRequest, Refused
from pipeline.writing.rows import Sampling


def test_a_request_has_a_prompt_with_thoughts_and_variables_of_the_template():
    server = SimpleNamespace(encoder=encoder("generate", template=THINKING))
    tok = server.encoder.tokenizer
    turns = [USER, {**BOT, "reasoning": "one", "refusal": None, "annotations": [1]}, {**USER, "name": "Ann"}]
    for kwargs, end in ((None, ""), ({"enable_thinking": False}, "<think></think>")):
        asked = ChatRequest(model="p", messages=turns, chat_template_kwargs=kwargs)
        text = tok.decode(Server._prompt(server, asked))
        assert "<think>one</think>yo<|im_end|>" in text and text.endswith(f"assistant\n{end}")
    asked.chat_template_kwargs = {"thinking_budget": 9}
    with pytest.raises(
        Refused, match=r"^chat_template_kwargs\.thinking_budget: the chat template does not read it$"
    ):
        Server._prompt(server, asked)


class Gone(OSError):
    """The client has closed its connection."""


@pytest.mark.parametrize("messages", range(4), ids=lambda n: f"after {n} messages")
def test_a_client_that_closes_cancels_its_rows_from_the_first_message_on(messages):
    """The first message is the status. Next comes the role of each choice."""

    async def closed():
        taken = []
        server = SimpleNamespace(
            tokenizer=tokenizer(),
            sampling=Sampling(8, ()),
            serve=SimpleNamespace(timeout_s=0.1),
            batcher=SimpleNamespace(submit=taken.extend),
            mailbox=Mailbox(),
        )
        asked = ChatRequest(model="p", messages=[{"role": "user", "content": "Hi"}], n=3, stream=True)
        answer = Answer(server, asked, [1, 2], Served("models:/p/1", "role"))
        server.batcher.submit(answer.rows)
        left = iter(range(messages))

        async def send(message):
            if next(left, None) is None:
                raise Gone

        with pytest.raises((ClientDisconnect, Gone)):
            await Stream(answer, {})({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)
        return taken

    rows = asyncio.run(closed())
    assert len(rows) == 3 and all(row.cancelled for row in rows)


def sentencepiece():
    """Returns a vocabulary like SentencePiece's: words with their space, and single bytes for all other characters."""
    words = ["<unk>", "▁", "▁Peru", "Lima", "▁is", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in words], 0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("make", [tokenizer, sentencepiece])
def test_log_probs_have_the_bytes_of_tokens_and_offsets_in_the_text(make):
    spoken, text = make(), "Peru is \U0001f600 漢c"
    ids = spoken(text, add_special_tokens=False).input_ids
    written = [bytes_of(spoken, token) for token in ids]
    space = (
        "" if make is tokenizer else " "
    )  # SentencePiece encodes the space, but its decoder removes it at the start
    assert b"".join(written).decode() == space + text
    server = SimpleNamespace(tokenizer=spoken)
    asked = ChatRequest(model="p", messages=[{}], logprobs=True, top_logprobs=2)
    tops = [(1, -0.5), (2, -0.7)]
    tokens = [Token(token, -0.5, tops, False) for token in ids]
    content = Answer._logprobs(SimpleNamespace(server=server, asked=asked), tokens)["content"]
    assert [bytes(one["bytes"]) for one in content] == written
    assert [len(one["top_logprobs"]) for one in content] == [2] * len(ids)
    parts = [one["token"] for one in content if one["token"].startswith("bytes:")]
    assert len(parts) > 3 and "bytes:\\xf0" in parts[0] and "\ufffd" not in str(content)


def test_tokens_without_text_have_names():
    end = tokenizer().eos_token_id
    assert name_of(bytes_of(tokenizer(), end)) == tokenizer().decode([end])
    assert bytes_of(tokenizer(), 10**6) == b""  # an id that only pads the vocabulary


TEXTS = ("The capital of Peru is Lima.", "Ünïcode \U0001f600 漢字, and\n\n  spaces ", "a" * 50, "")


def streamed(text, *stops):
    """Returns (pieces that were shown, full text, whether a stop text ended it)."""
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
    assert len(text) < 10 or sum(map(bool, shown)) > 3, "it is shown while it is written"


def test_special_tokens_are_not_part_of_the_text():
    writer = Text(tokenizer(), [])
    ids = tokenizer()("Lima", add_special_tokens=False).input_ids
    for token in [*ids, tokenizer().eos_token_id]:
        writer.add(token)
    writer.close()
    assert writer.text == "Lima"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("Peru",), "The capital of "),
        (("is Lima", "Peru is"), "The capital of "),
        (("of P",), "The capital "),
        (("T",), ""),
        (("Chile",), TEXTS[0]),
        (("Lima.x",), TEXTS[0]),
        (("ita", "tital"), "The cap"),
    ],
)
def test_a_stop_text_ends_the_text_and_is_not_shown(stops, expected):
    shown, whole, stopped = streamed(TEXTS[0], *stops)
    assert "".join(shown) == whole == expected
    assert stopped == (expected != TEXTS[0])
