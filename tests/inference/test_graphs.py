"""Steps of one shape that are replayed: the completions are those of steps that run kernel by kernel."""

import contextlib

import pytest
import torch
import toy_ppo as toy

from pipeline.inference import decoder, graphs
from pipeline.inference.rows import Sampling


def made(kind="llama", look=4, record=None):
    one = decoder.SlotDecoder(toy.shared_base(kind, critic=False, spread=0.1), look=look, graphs=bool(record))
    if record:
        one.graphs.record = record
    return one


def written(decoder, rows=slice(None)):
    prompts = [row["input_ids"] for row in toy.prompts(12)][rows]
    return decoder.generate("policy", prompts, range(len(prompts)), Sampling(12, (2, 3, 4, 5, 6, 7), seed=7))


class Replayed(graphs.Recorder):
    """What a CUDA graph does, without one: a replay runs the step and leaves its result where the recording's was."""

    def __init__(self, wrong=0.0):
        super().__init__()
        self.recorded = self.replays = 0
        self.wrong = wrong  # added to what a replay writes

    def _capture(self, step):
        output = torch.full((1, 1), float("nan"))
        self.recorded += 1

        def replay():
            self.replays += 1
            hidden = step() + self.wrong
            output.resize_(hidden.shape).copy_(hidden)

        return replay, output


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("rows", [slice(None), slice(0, None, 5)], ids=["padded", "of one length"])
def test_replayed_steps_sample_what_other_steps_sample(kind, rows):
    plain = written(made(kind), rows)
    assert len({len(one.tokens) for one in plain}) > 1 or kind in ("gemma2", "gpt2"), "no row left the batch"
    for look in (1, 4, 9, 100):
        record = Replayed()
        replayed = written(made(kind, look, record), rows)
        assert [one.tokens for one in replayed] == [one.tokens for one in plain]
        for one, other in zip(replayed, plain, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        if look >= 9:
            assert record.recorded and record.replays >= graphs.FEWEST_REPLAYS * record.recorded


def test_a_replay_that_gives_other_states_is_noticed_at_once(capsys):
    record = Replayed(wrong=1.0)
    one = made(look=9, record=record)
    assert [x.tokens for x in written(one)] == [x.tokens for x in written(made(look=9))]
    assert record.replays == 1 and not one.graphs.works
    assert "without CUDA graphs: a replayed step gives other hidden states" in capsys.readouterr().out


def test_a_step_that_cannot_be_recorded_runs_as_before(capsys):
    class Fails(graphs.Recorder):
        def _capture(self, step):
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA error")

    one = made(look=9, record=Fails())
    completions = written(one)
    assert [x.tokens for x in completions] == [x.tokens for x in written(made())]
    assert not one.graphs.works and [x.tokens for x in written(one)] == [x.tokens for x in completions]
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
