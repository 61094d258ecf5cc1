"""Tests that a pretended GPU runs the CUDA code paths, and finds ten bugs that a CPU hides."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile

import pytest
import toy_ppo as toy
from running import ROOT

os.environ["PRETEND"] = "1"  # tools.gpu chooses its sizes and device at import
import torch

from pipeline.models import precision
from pipeline.models.adapters import SharedBase
from pipeline.system.rng import rng_state, set_rng_state
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.graphs import Steps
from pipeline.writing.rows import Sampling
from tools.gpu import experiments, models, pretend

del os.environ["PRETEND"]

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpus():
    with pretend.cuda():
        yield


def tiny(**settings):
    """Returns a PPO trainer with four roles on the pretended GPU."""
    settings = {"total_episodes": 16, "batch_size": 4, "num_ppo_epochs": 1, "num_mini_batches": 1, **settings}
    shared = toy.shared_base(critic=settings.pop("critic", True)).to(GPU)
    return toy.trainer(shared, **settings)


PROMPTS = [[5, 6, 7, 8], [9, 4]]


def written(decoder):
    """Returns the number of replays and the completions of PROMPTS."""
    before = pretend.machine.replays
    completions = decoder.generate("policy", PROMPTS, range(2), Sampling(12, (), seed=3))
    return pretend.machine.replays - before, completions


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_every_generate_replays_its_steps_with_equal_results(kind):
    shared = toy.shared_base(kind, critic=False, spread=0.1).to(GPU)
    expected, decoder = written(SlotDecoder(shared, graphs=False))[1], SlotDecoder(shared)
    for _ in range(3):
        replays, completions = written(decoder)
        assert replays >= 8
        for one, other in zip(completions, expected, strict=True):
            assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_after_a_replay_with_wrong_states_no_step_is_replayed(monkeypatch, capsys):
    replay = torch.cuda.CUDAGraph.replay

    def wrong(graph):
        replay(graph)
        for result in graph.results.values():
            if (tensor := result()) is not None and tensor.is_floating_point():
                tensor.add_(1.0)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", wrong)
    shared = toy.shared_base(critic=False, spread=0.1).to(GPU)
    expected, decoder = written(SlotDecoder(shared, graphs=False))[1], SlotDecoder(shared)
    replays, completions = written(decoder)
    assert [one.tokens for one in completions] == [one.tokens for one in expected]
    assert replays == 1 and not decoder.graphs.works
    assert "without CUDA graphs: a replayed step returns other hidden states" in capsys.readouterr().out


def test_updates_leave_no_memory_allocated():
    """Updates must free GPU memory without Python's garbage collector, because it does not run when a GPU is full."""
    trainer, allocated = tiny(), []
    trainer.run_update()
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            trainer.run_update()
            allocated.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert max(allocated) - min(allocated) < 10_000, allocated


def updates(trainer):
    for _ in range(2):
        trainer.run_update()


def head_left_on_the_cpu(trainer, monkeypatch):
    trainer.shared.heads["critic"].to("cpu")


def index_on_another_gpu(trainer, monkeypatch):
    states = SharedBase.states

    def moved(shared, role, batch):
        return states(shared, role, dataclasses.replace(batch, indices=batch.indices.to("cuda:1")))

    monkeypatch.setattr(SharedBase, "states", moved)


def fp32_weight_in_a_bf16_product(trainer, monkeypatch):
    trainer.shared.autocast, product = torch.bfloat16, precision.mm_fp32
    monkeypatch.setattr(precision, "mm_fp32", lambda a, b: product(a, b.float()))


def host_read_in_a_captured_step(trainer, monkeypatch):
    decoder = trainer.sampler.decoder
    plain = decoder.graphs.step

    def reads(rows, seen):
        assert int(decoder.cache.lengths[0]) < 10_000
        return plain(rows, seen)

    monkeypatch.setattr(decoder.graphs, "step", reads)


def pool_without_a_graph(trainer, monkeypatch):
    def forget(self):
        self.key = self.replay = self.graph = None

    monkeypatch.setattr(Steps, "forget", forget)


def mask_made_on_the_host(trainer, monkeypatch):
    plain = SlotDecoder._bias
    monkeypatch.setattr(SlotDecoder, "_bias", lambda self, mask: plain(self, mask).cpu())


def random_state_that_is_not_restored(trainer, monkeypatch):
    state = rng_state()
    expected = torch.rand(5, device=GPU)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    set_rng_state(state)
    return "" if torch.equal(torch.rand(5, device=GPU), expected) else "other random numbers"


def reference_on_another_gpu(trainer, monkeypatch):
    for parameter in trainer.shared.parameters_of("reference"):
        parameter.data = parameter.data.to("cuda:1")


def checkpoint_on_the_cpu(trainer, monkeypatch):
    def fill(self, role, tensors):
        for key, parameter in self._named(role).items():
            parameter.data = tensors[key]

    trainer.run_update()
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(folder)
        monkeypatch.setattr(SharedBase, "fill", fill)
        trainer.restore(folder)


def optimizer_state_on_the_cpu(trainer, monkeypatch):
    trainer.run_update()
    for state in trainer.optimizer.state.values():
        state.update({key: value.cpu() for key, value in state.items()})


def nothing(trainer, monkeypatch):
    """Plants no fault. Without a fault, the trainer must raise no error and print no message."""


FAULTS = {
    head_left_on_the_cpu: "two devices, cuda:0 and cpu",
    index_on_another_gpu: "two devices, cuda:0 and cuda:1",
    fp32_weight_in_a_bf16_product: "expected mat1 and mat2 to have the same dtype",
    host_read_in_a_captured_step: "a step cannot be recorded (RuntimeError: CUDA error: operation not permitted",
    pool_without_a_graph: "a step cannot be recorded (RuntimeError: it->second->use_count > 0",
    mask_made_on_the_host: "two devices, cuda:0 and cpu",
    random_state_that_is_not_restored: "other random numbers",
    reference_on_another_gpu: "two devices, cuda:0 and cuda:1",
    checkpoint_on_the_cpu: "two devices",
    optimizer_state_on_the_cpu: "two devices, cuda:0 and cpu",
    nothing: "",
}


QUICK = (fp32_weight_in_a_bf16_product, host_read_in_a_captured_step, checkpoint_on_the_cpu, nothing)


@pytest.mark.parametrize(
    "plant",
    [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK), id=one.__name__) for one in FAULTS],
)
def test_a_fault_is_found(plant, monkeypatch, capsys):
    """On a pretended GPU, each fault causes an error or a message. On a CPU, none of these faults causes an error."""
    trainer, said = tiny(), ""
    try:
        said = plant(trainer, monkeypatch) or ""
        updates(trainer)
    except RuntimeError as error:
        said += str(error)
    said += "".join(line for line in capsys.readouterr().out.splitlines() if "without CUDA graphs" in line)
    assert (FAULTS[plant] in said) if FAULTS[plant] else not said


# ------------------------------------------------------------------------------------------ experiments


@pytest.mark.slow
def test_every_experiment_passes_on_a_pretended_gpu(tmp_path):
    command = ["make", "gpu", "PRETEND=1", f"PYTHON={sys.executable}", f"ARGS=--out {tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert results["machine"]["device"].startswith("pretended")
    found = {one["name"]: one for one in results["experiments"]}
    skipped = {name for name, one in found.items() if one["outcome"] == "skipped"}
    assert len(found) > 20 and skipped <= {"with-ray-and-trl", "with-vllm"}
    update = next(row for row in found["ppo-bf16"]["rows"] if row.get("during") == "update 1")
    assert 0 < update["host_reads"] < 1000 and update["by"]["item"]
    assert found["graphs-bf16"]["rows"][-1]["replays"] > 0
    assert "| ppo-70b-nf4 | passed |" in (tmp_path / "gpu.md").read_text()


def test_an_error_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tools.gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(models, "PRETEND", False)
    with pytest.raises(SystemExit) as ended:
        experiments.main()
    assert ended.value.code == 2 and "set PRETEND=1" in capsys.readouterr().err
