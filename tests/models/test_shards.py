"""A base in shards over two gloo processes computes what the whole one does, and no rank holds it whole."""

import socket

import pytest
import torch
import torch.multiprocessing as mp
import toy_ppo as toy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from pipeline.errors import InputError
from pipeline.models.adapters import SharedBase
from pipeline.models.shards import load_shards

ODD = dict(vocab_size=toy.VOCAB + 1)  # rows that two ranks cannot share equally


def results(base):
    """Log-probs, values and both roles' gradients, on adapters that have moved."""
    torch.manual_seed(1)
    shared = SharedBase(base)
    shared.add("policy", lora=toy.LORA, trainable=True)
    shared.add("critic", lora=toy.LORA, head=True, trainable=True)
    for role in shared.roles:
        for parameter in shared.parameters_of(role):
            parameter.data.normal_(std=0.1)
    ids, starts, _, mask = toy.batch()
    logprobs, values = shared.logprobs("policy", ids, starts, mask)[0], shared.values("critic", ids)
    (logprobs.sum() + values.square().sum()).backward()
    gradients = [p.grad for role in shared.roles for p in shared.parameters_of(role)]
    return [logprobs.detach(), values.detach(), *gradients]


def worker(rank, port, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    base = load_shards(toy.config(**ODD), folder, init_device_mesh("cpu", (2,)), torch.float32)
    found = results(base)
    held = [p.to_local().numel() for p in base.parameters() if isinstance(p, DTensor)]
    torch.save((found, sum(held)), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_shards_compute_what_the_whole_computes(tmp_path):
    whole = toy.base(**ODD)
    whole.save_pretrained(tmp_path)
    size = sum(p.numel() for p in whole.parameters())
    expected = results(whole)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, (port, tmp_path), nprocs=2)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert sum(held for _, held in parts) == size and max(held for _, held in parts) < 0.55 * size
    for found, _ in parts:
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_tied_lm_head_is_refused(tmp_path):
    with pytest.raises(InputError, match="one weight as embedding and lm head"):
        load_shards(toy.config(tie_word_embeddings=True), tmp_path, None, torch.float32)
