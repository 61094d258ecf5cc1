"""Tests that a pretended GPU raises CUDA's errors, runs the CUDA code paths, and finds ten bugs that a CPU hides."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import toy_ppo as toy
from running import ROOT

os.environ["PRETEND"] = "1"  # tools.gpu chooses its sizes and device at import
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes

from pipeline.models import precision
from pipeline.models.adapters import SharedBase
from pipeline.system.rng import rng_state, set_rng_state
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.graphs import Steps
from pipeline.writing.rows import Sampling
from tools.gpu import experiments, models, pretend
from tools.gpu.record import Record, markdown

del os.environ["PRETEND"]

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpus():
    with pretend.cuda():
        yield


# ------------------------------------------------------------------------------------------ what CUDA raises


def _captured(work):
    """Returns a graph that captures the operations of `work`."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    return graph


def _freed_before_replay():
    tensors = [torch.ones(3, device=GPU)]
    graph = _captured(lambda: tensors[0] + 1)
    tensors.clear()
    graph.replay()


def _on_gpu():
    return torch.arange(6.0, device=GPU).view(2, 3)


ERRORS = {  # errors that no fault in FAULTS causes
    "an index of another GPU": (lambda: _on_gpu()[torch.tensor([0], device="cuda:1")], "indices should be either"),
    "an index of a GPU into a tensor of the CPU": (lambda: torch.ones(3)[torch.tensor([0], device=GPU)], "indices should"),
    "numpy": (lambda: _on_gpu().numpy(), "can't convert cuda:0 device type tensor to numpy"),
    "pinned memory of a GPU": (lambda: _on_gpu().pin_memory(), "only dense CPU tensors can be pinned"),
    "a GPU that does not exist": (lambda: torch.zeros(1, device="cuda:2"), "invalid device ordinal"),
    "a tensor that is too large": (lambda: torch.empty(1 << 40, device=GPU), "CUDA out of memory. Tried to allocate 4096"),
    "a generator of the CPU": (lambda: torch.rand(2, device=GPU, generator=torch.Generator()), "found 'cpu'"),
    "a random state of the CPU": (lambda: torch.cuda.set_rng_state(torch.get_rng_state()), "RNG state is wrong size"),
    "a list read in a graph": (lambda: _captured(lambda: _on_gpu().tolist()), "stream is capturing"),
    "a copy from the CPU in a graph": (lambda: _captured(lambda: torch.ones(2).to(GPU)), "stream is capturing"),
    "a graph of the default stream": (lambda: torch.cuda.CUDAGraph().capture_begin(), "non-default stream"),
    "a replay on memory that is free": (_freed_before_replay, "illegal memory access"),
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS)
def test_wrong_code_gets_cudas_error(what):
    work, error = ERRORS[what]
    with pytest.raises((RuntimeError, TypeError), match=error):
        work()


# ------------------------------------------------------------------------------------------ what CUDA does


def test_modules_move_and_keep_their_parameters():
    layer = nn.Linear(3, 2)
    weight = layer.weight
    layer.to(GPU)
    assert layer.weight is weight and weight.device == GPU and isinstance(weight, nn.Parameter)
    layer(_on_gpu()).sum().backward()
    assert weight.grad.device == GPU
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].device == GPU
    layer.cpu()
    assert layer.weight is weight and type(weight) is nn.Parameter and weight.grad.device.type == "cpu"
    assert layer(torch.ones(1, 3)).shape == (1, 2)


def test_each_gpu_has_its_own_random_numbers():
    torch.manual_seed(0)
    state = torch.cuda.get_rng_state()
    first, of_cpu = torch.rand(3, device=GPU), torch.rand(3)
    others = torch.rand(3, device="cuda:1")
    # Both GPUs have the same seed and have drawn the same number of values.
    assert torch.equal(others, first.to("cuda:1"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=GPU), first)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), of_cpu)
    generator = torch.Generator(GPU).manual_seed(5)
    assert generator.device == GPU and torch.rand(2, device=GPU, generator=generator).device == GPU


def test_memory_counts_live_storages():
    before, mib = torch.cuda.memory_allocated(), 2**20
    x = torch.zeros(mib, device=GPU)
    part = x[5:]
    assert torch.cuda.memory_allocated() - before == 4 * mib
    del x
    assert torch.cuda.memory_allocated() - before == 4 * mib
    del part
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= 4 * mib
    assert torch.cuda.memory_reserved() >= 4 * mib
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == before


def test_it_counts_operations_that_make_the_host_wait():
    x = _on_gpu()
    pretend.host_reads.clear()
    pinned = torch.ones(3).pin_memory()
    assert pinned.is_pinned() and pinned.to(GPU, non_blocking=True).device == GPU and not pretend.host_reads
    x.sum().item(), x.tolist(), x.cpu(), x[x > 1], torch.tensor([1], device=GPU), x.nonzero()
    assert pretend.host_reads == {
        **{"item": 1, "tolist": 1, "copy to the host": 1, "index by a mask": 1},
        **{"copy from the host": 1, "nonzero": 1},
    }


def test_a_replay_uses_the_current_values_of_its_tensors():
    x, total = torch.ones(3, device=GPU), torch.zeros(3, device=GPU)
    results = []

    def work():
        results.append((x * 2).exp())
        total.add_(x)

    graph = _captured(work)
    assert results[0].isnan().all() and not total.any()  # the capture of a CUDA graph computes nothing
    x.fill_(2.0)
    graph.replay()
    graph.replay()
    assert results[0].tolist() == pytest.approx([54.598] * 3, rel=1e-4) and total.tolist() == [4.0] * 3


def _rank(rank, folder):
    """Runs in each of two NCCL ranks. Each rank has its own GPU."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/group", rank=rank, world_size=2)
    x, parts = torch.full((3,), rank + 1.0, device="cuda"), [None, None]
    dist.all_reduce(x)
    dist.all_gather_object(parts, rank)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))
    found = [x.tolist(), str(x.device), parts, dist.get_backend()]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def test_two_ranks_of_nccl(tmp_path):
    start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found == [[[3.0] * 3, f"cuda:{rank}", [0, 1], "nccl"] for rank in (0, 1)]


# ------------------------------------------------------------------------------------------ the pipeline


def tiny(**settings):
    """Returns a PPO trainer with four roles on the pretended GPU."""
    settings = {"total_episodes": 16, "batch_size": 4, "num_ppo_epochs": 1, "num_mini_batches": 1, **settings}
    shared = toy.shared_base(critic=settings.pop("critic", True)).to(GPU)
    return toy.trainer(shared, **settings)


def test_every_generate_replays_its_steps_with_equal_results():
    shared, prompts = toy.shared_base(spread=0.1).to(GPU), [[5, 6, 7, 8], [9, 4]]

    def written(decoder):
        before = pretend.machine.replays
        completions = decoder.generate("policy", prompts, range(2), Sampling(12, (), seed=3))
        return pretend.machine.replays - before, completions

    expected, decoder = written(SlotDecoder(shared, graphs=False))[1], SlotDecoder(shared)
    for _ in range(3):
        replays, completions = written(decoder)
        assert replays >= 8
        for one, other in zip(completions, expected, strict=True):
            assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


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


@pytest.mark.parametrize(
    ("holds", "error", "outcome"),
    [([True], "", "passed"), ([True, False], "", "FAILED"), ([True], "x", "FAILED"), ([], "", "FAILED")],
)
def test_an_experiment_passes_if_all_its_checks_hold(holds, error, outcome):
    record = Record("one", error=error)
    for each in holds:
        record.check("a | b", 0.12345, each)
    assert record.outcome == outcome
    assert f"| one | {outcome} |" in markdown({"device": "GPU"}, [record])
