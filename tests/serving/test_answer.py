"""A stream whose client goes away leaves no row behind, whenever that is."""

import asyncio
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect
from toy_models import tokenizer

from pipeline.inference.rows import Sampling
from pipeline.serving.answer import Answer, Mailbox, Stream
from pipeline.serving.models import Served
from pipeline.serving.protocol import ChatRequest


class Gone(OSError):
    """The client has closed its connection."""


@pytest.mark.parametrize("messages", range(4), ids=lambda n: f"after {n} messages")
def test_a_client_that_closes_cancels_its_rows_from_the_first_message_on(messages):
    """The first message is the status, then comes the role of each of the choices."""

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
