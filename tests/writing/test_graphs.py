"""Tests that decoding with replayed CUDA graphs gives the same completions as decoding without CUDA graphs."""

from unittest.mock import MagicMock

import pytest
import torch
import toy_ppo as toy

from pipeline.writing import decoder, graphs
from pipeline.writing.rows import Sampling


def made(kind="llama", look=4, steps=None):
    one = decoder.SlotDecoder(toy.shared_base(kind, critic=False, spread=0.1), look=look, graphs=bool(steps))
    if steps:
        one.graphs = steps(one._forward, one._take_back)
    return one


def written(decoder, rows=slice(None)):
    prompts = [row["input_ids"] for row in toy.prompts(12)][rows]
    return decoder.generate("policy", prompts, range(len(prompts)), Sampling(12, (2, 3, 4, 5, 6, 7), seed=7))


def tokens(completions):
    return [one.tokens for one in completions]


class Replayed(graphs.Steps):
    """Simulates CUDA graphs. A replay runs the step again, and writes the result into the output tensor of the recorded step."""

    recorded = replays = 0
    wrong = 0.0  # simulated error that each replay adds to the result of a step

    def _capture(self, step):
        output = torch.full((1, 1), float("nan"))
        self.recorded += 1

        def replay():
            self.replays += 1
            hidden = step() + self.wrong
            output.resize_(hidden.shape).copy_(hidden)

        return replay, output


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("llama", slice(None)),  # rows of different lengths
        ("gemma2", slice(0, None, 5)),  # rows of one length
        pytest.param("gpt2", slice(None), marks=pytest.mark.slow),
        pytest.param("gemma2", slice(None), marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_sample_the_same_tokens(kind, rows):
    plain = written(made(kind), rows)
    # some completions ended earlier than others
    assert len({len(one.tokens) for one in plain}) > 1 or kind != "llama"
    for look in (4, 9, 100):
        one = made(kind, look, Replayed)
        replayed, steps = written(one, rows), one.graphs
        assert tokens(replayed) == tokens(plain)
        for ours, other in zip(replayed, plain, strict=True):
            assert ours.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        if look >= 9:
            assert steps.recorded and steps.replays >= graphs.FEWEST_REPLAYS * steps.recorded


def test_after_a_replay_with_wrong_states_no_step_is_replayed(capsys):
    one = made(look=9, steps=Replayed)
    one.graphs.wrong = 1.0
    assert tokens(written(one)) == tokens(written(made(look=9)))
    assert one.graphs.replays == 1 and not one.graphs.works
    assert "without CUDA graphs: a replayed step returns other hidden states" in capsys.readouterr().out


def test_a_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch, capsys):
    for name in ("CUDAGraph", "Stream", "current_stream", "graph_pool_handle", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    torch.cuda.CUDAGraph().capture_begin.side_effect = RuntimeError("operation not permitted\nCUDA error")
    one = made(look=9, steps=graphs.Steps)
    assert tokens(written(one)) == tokens(written(made())) == tokens(written(one))
    said = capsys.readouterr().out
    assert not one.graphs.works and said.count("without CUDA graphs") == 1
    assert "(RuntimeError: operation not permitted CUDA error)" in said
