"""Continuous batching: a completion is the engine's own, whoever is written beside it, joins or leaves."""

import queue
import random
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from toy_models import shared_base

from pipeline.errors import InputError
from pipeline.ppo.engine import Sampling, TransformersEngine, sample
from pipeline.serving import transformers_batcher
from pipeline.serving.batching import QueueFull, Row, Token
from pipeline.serving.transformers_batcher import TransformersBatcher, draw

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

    def make(**changes):
        made.append(
            TransformersBatcher(
                shared, **{"rows": 8, "positions": 1 << 16, "queue": 100, "eos": EOS, **changes}
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


class Client:
    """Collects what rows are told."""

    def __init__(self):
        self.told, self.ended = {}, queue.SimpleQueue()

    def row(self, name, prompt, role=None, most=12, **settings):
        self.told[name] = []

        def deliver(token):
            self.told[name].append(token)
            if isinstance(token, BaseException) or token.last:
                self.ended.put(name)

        return Row(prompt, role, deliver, most, **settings)

    def wait(self, count):
        for _ in range(count):
            self.ended.get(timeout=SECONDS)

    def ids(self, name):
        return [token.id for token in self.told[name]]


def prompts(count, seed=1):
    dice = random.Random(seed)
    return [[dice.randrange(5, 200) for _ in range(dice.randrange(1, 60))] for _ in range(count)]


def test_rows_of_several_policies_that_come_and_go_are_the_engines_own(shared, batcher):
    given, client, writer = prompts(30), Client(), batcher()
    settings = [{"temperature": (0.0, 1.0, 0.7)[i % 3], "seed": 5, "number": i, "top": 0} for i in range(30)]
    roles = [(None, "one", "two")[i // 3 % 3] for i in range(30)]
    for i, prompt in enumerate(
        given
    ):  # in twos and threes, so that most of them join rows that are being written
        writer.submit([client.row(i, prompt, roles[i], most=6 + i % 9, **settings[i])])
    client.wait(30)
    for i, prompt in enumerate(given):
        how = Sampling(6 + i % 9, EOS, temperature=settings[i]["temperature"], seed=5)
        [expected] = TransformersEngine(shared, roles[i]).generate([prompt], [i], how)
        assert client.ids(i) == expected.tokens, i
        if settings[i]["temperature"] in (0.0, 1.0):  # the sampler's are of its temperature
            assert [t.logprob for t in client.told[i]] == pytest.approx(expected.logprobs, abs=1e-3)
    assert len({tuple(client.ids(i)) for i in range(30)}) > 20
    assert writer.cache.counts == [] and writer.rows == []


def test_what_waits_is_limited_and_a_request_is_taken_whole_or_not(batcher):
    client, writer = Client(), batcher(rows=1, queue=3)
    busy, held = threading.Event(), queue.SimpleQueue()
    writer.run(lambda: (busy.set(), held.get(timeout=SECONDS)))
    assert busy.wait(SECONDS)  # what comes now waits
    writer.submit([client.row("a", [5]), client.row("b", [6])])
    with pytest.raises(QueueFull):
        writer.submit([client.row("c", [7]), client.row("d", [8])])
    writer.submit([client.row("e", [9])])
    held.put(None)
    client.wait(3)
    assert not client.told["c"] and not client.told["d"] and all(client.told[name] for name in "abe")


def test_rows_that_nobody_waits_for_take_no_place_in_the_queue(batcher):
    client, writer = Client(), batcher(rows=1, queue=3)
    busy, held = threading.Event(), queue.SimpleQueue()
    writer.run(lambda: (busy.set(), held.get(timeout=SECONDS)))
    assert busy.wait(SECONDS)
    gone = [client.row(name, [5]) for name in "abc"]
    writer.submit(gone)
    for row in gone[1:]:  # behind one that is still wanted
        row.cancelled = True
    writer.submit([client.row("d", [6]), client.row("e", [7])])
    held.put(None)
    client.wait(3)
    assert not client.told["b"] and not client.told["c"] and all(client.told[name] for name in "ade")


def test_nothing_waits_for_a_batcher_that_has_ended(batcher):
    """As after an error of vLLM's process: what waits, and what comes later, is told so."""
    client, writer = Client(), batcher(rows=1)
    busy, held = threading.Event(), queue.SimpleQueue()
    writer.run(lambda: (busy.set(), held.get(timeout=SECONDS)))
    assert busy.wait(SECONDS)

    def fail(joining):
        if not joining:
            return
        writer.asked.append((lambda: None, asked))
        raise RuntimeError("the engine is dead")

    def reset():
        writer.closed = True

    asked, writer._turn, writer._reset = Future(), fail, reset
    writer.submit([client.row("written", [5]), client.row("waiting", [6])])
    held.put(None)
    client.wait(2)
    writer.thread.join(SECONDS)
    writer.submit([client.row("late", [7])])
    client.wait(1)
    assert {name: str(told[0]) for name, told in client.told.items()} == {
        "written": "the engine is dead",
        "waiting": "the batcher has ended",
        "late": "the batcher has ended",
    }
    for future in (asked, writer.run(lambda: None)):
        with pytest.raises(RuntimeError, match="the batcher has ended"):
            future.result(SECONDS)
    assert not writer.alive


def test_the_cache_stays_within_its_positions(batcher):
    client, writer = Client(), batcher(rows=8, positions=4 * 64)
    largest = 0
    seen = writer._step

    def step():
        nonlocal largest
        largest = max(largest, writer.cache.slots * writer.cache.positions)
        seen()

    writer._step = step
    for i in range(20):
        writer.submit([client.row(i, [5 + i] * (3 + i), most=20)])
    writer.submit([client.row("long", [9] * 90, most=40)])  # more than fits beside others, not more than fits
    client.wait(21)
    assert 0 < largest <= 4 * 64
    assert len(client.told["long"]) == 40 or client.told["long"][-1].id in EOS


def test_a_row_that_is_cancelled_leaves_and_the_others_stay(shared, batcher):
    client, writer = Client(), batcher()
    kept = client.row("kept", [5, 6, 7], "one", most=30, temperature=0.0)
    gone = client.row("gone", [8, 9], "two", most=10_000, temperature=0.0)
    told = gone.deliver

    def deliver(token):
        told(token)
        gone.cancelled = len(client.told["gone"]) == 4

    gone.deliver = deliver
    writer.submit([gone, kept])
    client.wait(1)
    assert len(client.told["gone"]) == 4 and writer.run(lambda: len(writer.rows)).result(SECONDS) == 0
    [expected] = TransformersEngine(shared, "one").generate(
        [[5, 6, 7]], [0], Sampling(30, EOS, temperature=0.0)
    )
    assert client.ids("kept") == expected.tokens


def test_an_error_is_told_to_its_rows_and_the_next_ones_are_written(batcher, monkeypatch):
    client, writer = Client(), batcher()
    monkeypatch.setattr(
        transformers_batcher, "draw", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
    )
    writer.submit([client.row("lost", [5, 6])])
    client.wait(1)
    assert [str(told) for told in client.told["lost"]] == ["out of memory"]
    monkeypatch.undo()
    writer.submit([client.row("written", [5, 6])])
    client.wait(1)
    assert all(isinstance(token, Token) for token in client.told["written"]) and writer.alive


def test_no_end_before_the_least_number_of_tokens(batcher):
    client, writer = Client(), batcher(min_new_tokens=5, eos=tuple(range(5, 800)))
    writer.submit([client.row("row", [300, 301], temperature=0.0)])
    client.wait(1)
    assert len(client.told["row"]) >= 6 and all(
        token.id not in range(5, 800) for token in client.told["row"][:5]
    )


def test_the_most_likely_tokens_are_reported(shared, batcher):
    client, writer = Client(), batcher()
    writer.submit([client.row("row", [300, 301], temperature=0.0, top=3), client.row("other", [300])])
    client.wait(2)
    for token in client.told["row"]:
        assert len(token.top) == 3 and token.top[0] == (token.id, pytest.approx(token.logprob))
    assert all(token.top == [] for token in client.told["other"])


def test_drawing_keeps_the_most_likely_tokens_that_top_p_asks_for():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(1000, -1)
    noise = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    ones = torch.ones(1000)

    def shares(top_p):
        drawn = draw(logits, noise, ones, ones * top_p)
        return [(drawn == i).sum().item() / 1000 for i in range(4)]

    assert shares(1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.002)
    assert shares(0.7) == pytest.approx([0.625, 0.375, 0, 0], abs=0.002)
    assert shares(0.1) == [1, 0, 0, 0]
    assert draw(logits, noise, ones * 0.7, ones).tolist() == sample(logits, noise, 0.7)[0].tolist()


def test_a_base_that_cannot_be_batched_so_is_refused(shared, monkeypatch):
    monkeypatch.setattr(shared.base.config, "sliding_window", 4, raising=False)
    monkeypatch.setattr(shared.base.config, "layer_types", ["sliding_attention"] * 4, raising=False)
    with pytest.raises(
        InputError, match=r"requests cannot be batched on it \(some layers have a cache of another kind\)"
    ):
        TransformersBatcher(shared, 8, 1 << 16, 100, EOS)


def test_a_slot_that_is_read_wrongly_is_noticed_before_anybody_asks(shared, monkeypatch):
    monkeypatch.setattr(
        transformers_batcher.SlotCache,
        "leave",
        lambda self, rows: self._set(self.counts[: -len(rows)]) or list(range(len(self.counts))),
    )
    broken = transformers_batcher.SlotCache.step
    monkeypatch.setattr(
        transformers_batcher.SlotCache,
        "step",
        lambda self: broken(self) or self._set([n - (i == 0) for i, n in enumerate(self.counts)]),
    )
    with pytest.raises(InputError, match="differ from those of a whole forward"):
        TransformersBatcher(shared, 8, 1 << 16, 100, EOS)


def test_random_numbers_are_those_of_seed_and_number(batcher):
    client, writer = Client(), batcher()
    for name, settings in {"a": {}, "again": {}, "b": {"number": 1}, "c": {"seed": 1}}.items():
        writer.submit([client.row(name, [300, 301], most=20, **settings)])
    client.wait(4)
    assert client.ids("a") == client.ids("again")
    assert len({tuple(client.ids(name)) for name in "abc"}) == 3
    assert np.isfinite([t.logprob for t in client.told["a"]]).all()
