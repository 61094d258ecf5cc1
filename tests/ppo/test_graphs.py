"""Decoding in windows of fixed shape: the completions are those of the plain loop, with recorded steps or without."""

import contextlib

import pytest
import torch
import toy_ppo as toy

from pipeline.ppo import graphs
from pipeline.ppo.engine import Sampling, TransformersEngine

ENDS = Sampling(12, (2, 3, 4, 5, 6, 7), seed=7)


def engine(kind="llama", steps=4, windows=True, record=None, monkeypatch=None):
    if monkeypatch:
        monkeypatch.setattr("pipeline.ppo.engine.STEPS_PER_GRAPH", steps)
    made = TransformersEngine(toy.shared_base(kind, critic=False, spread=0.1))
    made.windows, made.recorder = windows, record
    return made


def of(engine, rows=slice(None)):
    prompts = [row["input_ids"] for row in toy.prompts(12)][rows]
    return engine.generate(prompts, range(len(prompts)), ENDS)


class Replayed(graphs.Recorder):
    """What a CUDA graph does, without one: a replay runs the step and leaves its result where the recording's was."""

    def __init__(self):
        super().__init__()
        self.recorded = self.replays = 0

    def _capture(self, step):
        output = torch.full((self.rows, 32), float("nan"))
        self.recorded += 1

        def replay():
            self.replays += 1
            output.copy_(step())

        return replay, output

    def __call__(self, step):
        self.rows = len(step.__self__.token)
        return super().__call__(step)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gemma2"]
)  # the last has sliding windows, and no windows here
@pytest.mark.parametrize("rows", [slice(None), slice(0, None, 5)], ids=["padded", "of one length"])
def test_windows_sample_what_the_plain_loop_samples(kind, rows, monkeypatch):
    plain = of(engine(kind, windows=False), rows)
    assert len({len(one.tokens) for one in plain}) > 1 or kind == "gemma2", "no row left the batch"
    for steps in (1, 4, 9, 100):
        record = Replayed()
        windows = of(engine(kind, steps, record=record, monkeypatch=monkeypatch), rows)
        assert [one.tokens for one in windows] == [one.tokens for one in plain]
        apart = [
            a - b
            for x, y in zip(windows, plain, strict=True)
            for a, b in zip(x.logprobs, y.logprobs, strict=True)
        ]
        assert max(map(abs, apart)) < 1e-4
        if kind in ("llama", "qwen3") and steps >= 9:
            assert record.recorded and record.replays >= graphs.FEWEST_REPLAYS * record.recorded


def test_a_step_that_cannot_be_recorded_runs_as_before(monkeypatch, capsys):
    class Fails(graphs.Recorder):
        def _capture(self, step):
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA error")

    made = engine(steps=9, record=Fails(), monkeypatch=monkeypatch)
    completions = of(made)
    assert [one.tokens for one in completions] == [one.tokens for one in of(engine(windows=False))]
    assert not made.recorder.works and [one.tokens for one in of(made)] == [one.tokens for one in completions]
    said = capsys.readouterr().out
    assert said.count("without CUDA graphs") == 1 and "not permitted" in said and "CUDA error" not in said


class FakeGraph:
    """A CUDAGraph whose recording fails again at its end, as CUDA's does after a step that cannot be recorded."""

    def capture_begin(self, **options):
        pass

    def capture_end(self):
        raise RuntimeError("capture_end: the recording was invalidated")

    def replay(self):
        pass


@pytest.fixture
def fake_cuda(monkeypatch):
    """Streams and graphs without a GPU; the list of streams that were made."""
    streams = []

    class Stream:
        def __init__(self):
            streams.append(self)

        def wait_stream(self, other):
            pass

    for name, value in {
        "CUDAGraph": FakeGraph,
        "Stream": Stream,
        "current_stream": lambda: Stream.__new__(Stream),
        "graph_pool_handle": lambda: "pool",
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return streams


def test_all_steps_are_recorded_on_one_stream(fake_cuda, monkeypatch):
    """cuBLAS keeps a workspace for each stream that it has seen."""
    monkeypatch.setattr(FakeGraph, "capture_end", lambda self: None)
    recorder = graphs.Recorder()
    for _ in range(3):
        recorder(lambda: torch.zeros(1))
    assert recorder.works and len(fake_cuda) == 1


def test_a_failed_recording_says_what_failed_first(fake_cuda, capsys):
    def step():
        raise RuntimeError("operation not permitted when stream is capturing")

    assert graphs.Recorder()(step) is None
    said = capsys.readouterr().out
    assert "(operation not permitted when stream is capturing)" in said and "capture_end" not in said
