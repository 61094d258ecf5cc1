"""Tests the queue, the delivered tokens and the errors of continuous batching. tests/writing tests the decoder."""

import queue
import threading
from concurrent.futures import Future

import pytest
import torch
from toy_models import shared_base

from pipeline.errors import SelfCheckFailed
from pipeline.serving.batching import Batcher, ServedRow, Token
from pipeline.serving.protocol import Refused
from pipeline.writing import decoder as decoders
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Sampling

EOS = (2,)
SECONDS = 60


@pytest.fixture(scope="module")
def shared():
    torch.manual_seed(0)
    base = shared_base()
    for role in ("one", "two"):
        base.add(role, lora={"r": 4, "target_modules": "all-linear"})
        for parameter in base.parameters_of(role):
            parameter.data += 0.05 * torch.randn_like(parameter)
    return base


@pytest.fixture
def batcher(shared):
    made = []

    def make(rows=8, queue=100, **options):
        made.append(Batcher(SlotDecoder(shared, rows, look=1), queue, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Client:
    """Collects the tokens and errors that the batcher delivers for the test's rows."""

    def __init__(self):
        self.delivered, self.ended = {}, queue.SimpleQueue()

    def row(self, name, prompt, role=None, most=12, number=0, top=None, **settings):
        self.delivered[name] = []

        def deliver(token):
            self.delivered[name].append(token)
            if isinstance(token, BaseException) or token.last:
                self.ended.put(name)

        sampling = Sampling(most, **{"eos": EOS, **settings})
        return ServedRow(prompt, number, sampling, role, top, deliver=deliver)

    def wait(self, count):
        for _ in range(count):
            self.ended.get(timeout=SECONDS)

    def ids(self, name):
        return [token.id for token in self.delivered[name]]


def keep_busy(writer):
    """Blocks the batcher's thread until an item is put into the queue that this function returns."""
    busy, held = threading.Event(), queue.SimpleQueue()
    writer.run(lambda: (busy.set(), held.get(timeout=SECONDS)))
    assert busy.wait(SECONDS)
    return held


def test_the_queue_is_limited_and_a_request_enters_completely_or_not_at_all(batcher):
    client, writer = Client(), batcher(rows=1, queue=3)
    held = keep_busy(writer)
    submitted = [client.row(name, [5]) for name in "abc"]
    writer.submit(submitted)
    for row in submitted[1:]:  # canceled rows take no space in the queue
        row.cancelled = True
    with pytest.raises(Refused, match="the queue is full"):
        writer.submit([client.row(name, [6]) for name in "def"])
    writer.submit([client.row("g", [7])])
    held.put(None)
    client.wait(2)
    assert [name for name in client.delivered if client.delivered[name]] == ["a", "g"]


def test_rows_and_calls_get_an_error_if_the_batcher_has_ended(batcher):
    client, writer = Client(), batcher(rows=1)
    held = keep_busy(writer)

    def fail(rows):
        disconnected.cancel()
        writer.calls += [(lambda: None, future) for future in (disconnected, call)]
        raise RuntimeError("the engine is dead")

    def reset():
        raise RuntimeError("it cannot continue")

    disconnected, call, writer.decoder.join, writer.decoder.reset = Future(), Future(), fail, reset
    writer.submit([client.row("written", [5]), client.row("waiting", [6])])
    held.put(None)
    client.wait(2)
    writer.thread.join(SECONDS)
    writer.submit([client.row("late", [7])])
    client.wait(1)
    assert {name: str(tokens[0]) for name, tokens in client.delivered.items()} == {
        "written": "the engine is dead",
        "waiting": "the batcher has ended",
        "late": "the batcher has ended",
    }
    for future in (call, writer.run(lambda: None)):
        with pytest.raises(RuntimeError, match="the batcher has ended"):
            future.result(SECONDS)
    assert not writer.alive


def test_a_batcher_ends_if_a_new_version_has_changed_the_base(batcher):
    """With a changed base, all later completions would be wrong, so the batcher ends, and Ray Serve restarts the replica."""

    def add():
        raise SelfCheckFailed("adding an adapter changed the base")

    client, writer = Client(), batcher(rows=1)
    held = keep_busy(writer)
    adding = writer.run(add)
    writer.submit([client.row("written", [6], most=10_000, eos=()), client.row("waiting", [7])])
    held.put(None)
    with pytest.raises(SelfCheckFailed):
        adding.result(SECONDS)
    client.wait(2)
    writer.thread.join(SECONDS)
    assert isinstance(client.delivered["written"][-1], SelfCheckFailed) and not writer.alive
    assert [str(error) for error in client.delivered["waiting"]] == ["the batcher has ended"]


def test_a_call_whose_client_disconnected_is_skipped(batcher):
    writer = batcher(rows=1)
    held = keep_busy(writer)
    disconnected, call = writer.run(lambda: 1), writer.run(lambda: 2)
    disconnected.cancel()
    held.put(None)
    assert call.result(SECONDS) == 2 and writer.alive


def test_canceling_a_row_keeps_the_others(shared, batcher):
    client, writer = Client(), batcher()
    kept = client.row("kept", [5, 6, 7], "one", most=30, temperature=0.0)
    gone = client.row("gone", [8, 9], "two", most=10_000, temperature=0.0)
    deliver_token = gone.deliver

    def deliver(token):
        deliver_token(token)
        gone.cancelled = len(client.delivered["gone"]) == 4

    gone.deliver = deliver
    writer.submit([gone, kept])
    client.wait(1)
    assert (
        len(client.delivered["gone"]) == 4
        and writer.run(lambda: len(writer.decoder.rows)).result(SECONDS) == 0
    )
    [expected] = SlotDecoder(shared).generate("one", [[5, 6, 7]], [0], Sampling(30, EOS, temperature=0.0))
    assert client.ids("kept") == expected.tokens


def test_an_error_goes_to_its_rows_and_the_next_rows_are_decoded(batcher, monkeypatch):
    client, writer = Client(), batcher()
    monkeypatch.setattr(
        decoders, "draw_tokens", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
    )
    writer.submit([client.row("lost", [5, 6])])
    client.wait(1)
    assert [str(error) for error in client.delivered["lost"]] == ["out of memory"]
    monkeypatch.undo()
    writer.submit([client.row("written", [5, 6])])
    client.wait(1)
    assert all(isinstance(token, Token) for token in client.delivered["written"]) and writer.alive


def test_a_limited_number_of_prompt_tokens_joins_at_once(shared, batcher, monkeypatch):
    joined, join = [], SlotDecoder.join
    monkeypatch.setattr(SlotDecoder, "join", lambda self, rows: joined.append(len(rows)) or join(self, rows))
    client, writer = Client(), batcher(prompt_tokens=20)
    held = keep_busy(writer)
    writer.submit([client.row(i, [300 + i] * 9) for i in range(3)] + [client.row("long", [7] * 40)])
    held.put(None)
    client.wait(4)
    assert joined == [2, 1, 1]
