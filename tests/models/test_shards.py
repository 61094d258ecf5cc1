"""Tests that a base sharded over two processes computes the same results as the full base, and no rank loads the full base."""

import gc
import threading

import pytest
import torch
import toy_ppo as toy
from forked import in_processes
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from pipeline.errors import InputError
from pipeline.job import Model
from pipeline.models import fsdp_sync
from pipeline.models.adapters import SharedBase
from pipeline.models.base import load_base
from pipeline.models.shards import load_shards
from pipeline.scoring.rewards import AdapterReward

ODD = dict(vocab_size=toy.VOCAB + 1)  # an odd number of rows, which two ranks cannot split equally
RUNS = [
    dict(critic="adapter", critic_warmup_steps=1, bootstrap_truncated=True, per_device_train_batch_size=1),
    dict(critic="head", num_generations=2, max_tokens_per_micro_batch=40, gradient_checkpointing=True),
]


def job_model(folder):
    return Model(str(folder), dtype="float32")


def with_roles(base, critic="adapter"):
    torch.manual_seed(1)
    shared = SharedBase(base)
    if fsdp_sync.current:
        fsdp_sync.current.shared = shared
    shared.add("policy", lora=toy.LORA, trainable=True)
    shared.add("reward", lora={**toy.LORA, "r": 3}, head=True)
    # The critic's first layer has no adapter, so the critic's backward pass covers fewer layers than the policy's.
    only_last = dict(lora=dict(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1]), head=True)
    shared.add("critic", **(dict(head_on="policy") if critic == "head" else only_last), trainable=True)
    for role in shared.roles:
        for parameter in shared.parameters_of(role):
            parameter.data.normal_(std=0.1)
    return shared


def computed(base):
    """Returns the policy's log-probs, the critic's values, and the gradients of both roles."""
    shared = with_roles(base)
    ids, starts, _, mask = toy.batch()
    logprobs = shared.logprobs("policy", ids, starts, mask)[0]
    logprobs.sum().backward()
    values = shared.head("critic", shared.hidden("critic", ids))
    values.square().sum().backward()
    gradients = [p.grad for role in ("policy", "critic") for p in shared.parameters_of(role)]
    return [logprobs.detach(), values.detach(), *gradients]


def trained(base, **changes):
    """Returns weights and metrics after two PPO updates in which the ranks run different numbers of forward passes."""
    shared = with_roles(base, changes["critic"])
    trainer = toy.trainer(
        shared,
        [AdapterReward(shared, "reward")],
        total_episodes=28,
        batch_size=14,
        check_reference=False,
        **changes,
    )
    trainer.train()
    kept = [{k: v for k, v in each.items() if not toy.MEASURED.search(k)} for each in trainer.history]
    return toy.weights(shared), kept


def alone(base, rank, checkpointing):
    """Returns hidden states, after each rank has run forward passes that the other rank did not run."""
    shared = with_roles(base)
    if checkpointing:
        shared.enable_gradient_checkpointing()
    ids = torch.arange(8).view(2, 4)
    if rank == 0:
        with torch.no_grad():
            shared.hidden("policy", ids), shared.hidden(None, ids)
    else:
        shared.hidden("critic", ids).sum().backward()
    fsdp_sync.catch_up()
    return shared.hidden("policy", ids).detach()


def worker(rank, folder, runs):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    model = job_model(folder)
    wholes = [trained(load_base(model), **changes) for changes in runs]
    base = load_shards(model)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in base.parameters())
    found = (
        computed(base),
        [alone(load_shards(model), rank, checkpointing) for checkpointing in (False, True)],
    )
    shards = [trained(load_shards(model), **changes) for changes in runs]
    scorer = load_shards(model, toy.Tokenizer())
    torch.manual_seed(3 + rank)
    head = scorer.score.weight
    torch.save((found, held, wholes, shards, head), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "runs", [RUNS[:1], pytest.param(RUNS[1:], marks=pytest.mark.slow)], ids=["adapter", "head"]
)
def test_a_base_in_shards_computes_the_same_as_the_full_base(runs, tmp_path):
    whole = toy.base(**ODD)
    whole.save_pretrained(tmp_path)
    size, lm_head = sum(p.numel() for p in whole.parameters()), whole.lm_head.weight.numel()
    in_processes(worker, tmp_path, runs)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    expected = computed(load_base(job_model(tmp_path)))
    same = with_roles(load_base(job_model(tmp_path))).hidden("policy", torch.arange(8).view(2, 4))
    for (found, hiddens), held, wholes, shards, head in parts:
        assert held < 0.55 * (size - lm_head) + lm_head
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(torch.equal(hidden, same) for hidden in hiddens)
        for (a, history), (b, expected_history) in zip(shards, wholes, strict=True):
            assert torch.equal(a, b) and history == expected_history
        assert torch.equal(head, parts[0][-1]) and head.std() > 0
    assert sum(held for _, held, *_ in parts) == size + lm_head


@pytest.fixture(scope="module")
def one_rank():
    """Starts a process group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    fsdp_sync.current = None
    torch.distributed.destroy_process_group()


def stored(base, folder, **options):
    base.save_pretrained(folder, **options)
    return load_file(folder / "model.safetensors") if (folder / "model.safetensors").exists() else {}


def in_several_files(folder):
    stored(toy.base(), folder, max_shard_size="20KB")


def tied(folder):
    stored(toy.base(tie_word_embeddings=True), folder)


def tied_but_with_a_stored_head(folder):
    tensors = stored(toy.base(tie_word_embeddings=True), folder)
    tensors["lm_head.weight"] = torch.randn(toy.VOCAB, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("write", [in_several_files, tied, tied_but_with_a_stored_head])
def test_shards_and_transformers_read_the_same_weights(write, tmp_path, one_rank):
    write(tmp_path)
    ids = torch.arange(8).view(2, 4)
    with torch.no_grad():
        whole, shards = (load(job_model(tmp_path))(input_ids=ids).logits for load in (load_base, load_shards))
    assert torch.equal(whole, shards)


def test_a_base_that_cannot_be_sharded_is_an_error(tmp_path, one_rank):
    tensors = stored(toy.base(), tmp_path)
    save_file(
        {name.removeprefix("model."): t for name, t in tensors.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputError, match=r"lack \d+ tensors, for example .*renames.*model\.fsdp=false"):
        load_shards(job_model(tmp_path))
    toy.base("gemma").save_pretrained(tmp_path / "gemma")
    with pytest.raises(InputError, match=r"has buffers that no file contains.*model\.fsdp=false"):
        load_shards(job_model(tmp_path / "gemma"))
    toy.base("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(InputError, match=r"has no `layers`.*model\.fsdp=false"):
        load_shards(job_model(tmp_path / "gpt2"))


def private_bytes():
    """Returns this process's private memory in bytes. Mapped weight files are not counted, because the system can drop them."""
    with open("/proc/self/smaps_rollup") as file:
        (size,) = (line.split()[1] for line in file if line.startswith("Private_Dirty:"))
    return int(size) * 1024


def peak_of(load):
    """Returns the peak growth of private memory, in bytes, while a base is loaded and a role is trained for one step."""
    held, done = [private_bytes()], threading.Event()

    def watch():
        while not done.wait(0.03):
            held.append(private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    shared = with_roles(load())
    ids, starts, _, mask = toy.batch()
    shared.logprobs("policy", ids, starts, mask)[0].sum().backward()
    done.set()
    thread.join()
    return max(held) - held[0]


def weighed(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    peak_of(lambda: load_base(job_model(folder / "small")))  # loads the libraries
    whole = peak_of(lambda: load_base(job_model(folder)))
    gc.collect()
    sharded = peak_of(lambda: load_shards(job_model(folder)))
    torch.save((sharded, whole), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_no_rank_ever_loads_the_full_base(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # makes malloc return freed memory to the system
    deep = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=142)
    base = toy.base(**deep)
    size = sum(p.numel() * 4 for p in base.parameters())
    # The files have another dtype than the loaded base, so that no weights stay in mapped files, which are not counted.
    base.bfloat16().save_pretrained(tmp_path, max_shard_size="25MB")
    toy.base().save_pretrained(tmp_path / "small")
    del base
    in_processes(weighed, tmp_path)
    for rank in (0, 1):
        sharded, whole = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        print(
            f"base {size / 2**20:.0f} MiB; rank {rank}: {sharded / 2**20:.0f} in shards, {whole / 2**20:.0f} whole"
        )
        assert size > 390 * 2**20 and whole > size and sharded <= whole - 0.45 * size
