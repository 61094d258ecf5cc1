"""Rows decoded at the same time follow from the free memory, and a resumed run keeps their number; vLLM's share of a GPU."""

import json
import math

import pytest
import torch
import toy_ppo as toy

from pipeline.inference import memory
from pipeline.inference.memory import GIB, LARGEST, memory_share

MIB = 2**20


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma"])
def test_the_bytes_of_a_token_are_those_of_the_real_cache(kind):
    shared = toy.shared_base(kind, critic=False)
    real = toy.cache_bytes(shared, rows=2, tokens=5)
    assert memory.kv_bytes(shared.base.config, 4) * 10 == real


def test_rows_are_as_many_as_half_of_the_free_memory_holds(monkeypatch):
    shared = toy.shared_base(critic=False)
    row = memory.kv_bytes(shared.base.config, 4) * 100 + 20 * toy.VOCAB
    for free, rows in ((20 * row, 10), (21 * row, 10), (1e12, 64), (math.inf, 64), (0.0, 1)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        assert memory.decoding_rows(shared, 64, 100)[0] == rows


def written(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_limit_of_a_container_counts_and_its_cached_files_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    unlimited = memory.free_of_node()
    assert MIB < unlimited < math.inf or not memory.Path("/proc/meminfo").exists()
    stat = f"anon {3 * MIB}\ninactive_file {2 * MIB}\n"
    written(tmp_path, memory__max="max\n", memory__current=f"{5 * MIB}\n", memory__stat=stat)
    assert memory.free_of_node() > 6 * MIB
    written(tmp_path, memory__max=f"{8 * MIB}\n")
    assert memory.free_of_node() == 5 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.free_bytes(torch.device("cpu")) == 2.5 * MIB
    files = dict(memory__limit_in_bytes=str(4 * MIB), memory__usage_in_bytes=str(MIB), memory__stat=stat)
    written(tmp_path / "memory", **files)
    assert memory.free_of_node() == 5 * MIB
    written(tmp_path / "memory", memory__usage_in_bytes=str(3 * MIB))
    assert memory.free_of_node() == 3 * MIB


def test_a_resumed_run_decodes_as_many_rows_as_before(tmp_path, monkeypatch, capsys):
    def free(rows):
        row = memory.kv_bytes(toy.config(), 4) * (7 + 8) + 20 * toy.VOCAB
        monkeypatch.setattr(memory, "free_bytes", lambda device: 2.0 * rows * row)

    free(100)
    assert toy.trainer().sampler.rows == 16  # the whole update
    assert toy.trainer(local_rollout_forward_batch_size=4).sampler.rows == 4
    assert "at once" not in capsys.readouterr().out
    free(5)
    first = toy.trainer()
    assert first.sampler.rows == 5
    assert "decoding 5 of a chunk's 16 completions at once" in capsys.readouterr().out
    first.save(tmp_path)
    free(9)
    second = toy.trainer()
    second.restore(tmp_path)
    assert second.sampler.rows == 5
    free(4)
    smaller = toy.trainer()
    smaller.restore(tmp_path)
    assert smaller.sampler.rows == 4  # instead of running out of memory
    free(9)
    explicit = toy.trainer(local_rollout_forward_batch_size=3)
    explicit.restore(tmp_path)
    assert explicit.sampler.rows == 3
    state = json.loads((tmp_path / "ppo_state.json").read_text())
    assert state["decoding"] == {"workers": 1, "rows": 5}
    (tmp_path / "ppo_state.json").write_text(json.dumps(state | {"decoding": {"workers": 2, "rows": 5}}))
    elastic = toy.trainer()
    elastic.restore(tmp_path)  # another share of the completions
    assert elastic.sampler.rows == 9


def test_chunks_do_not_follow_memory(monkeypatch):
    """Else a smaller GPU would give a reward that draws other numbers, and its rollout workers other work."""

    def chunks(rows):
        row = memory.kv_bytes(toy.config(), 4) * (7 + 8) + 20 * toy.VOCAB
        monkeypatch.setattr(memory, "free_bytes", lambda device: 2.0 * rows * row)
        trainer = toy.trainer()
        return trainer.rollout().chunks, trainer.sampler.rows

    (large, most), (small, fewer) = chunks(100), chunks(5)
    assert large == small and (most, fewer) == (16, 5)


# Llama 3 8B in bf16: 15 GiB, and 128 KiB of keys and values a token.
BASE_BYTES, KV_BYTES = 15 * GIB, 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("total", "rows", "length", "share"),
    [
        (79 * GIB, 64, 1024, 0.33),  # 15 + 8 + 3 GiB
        (139 * GIB, 64, 1024, 0.19),
        (79 * GIB, 512, 1024, 0.64),  # no more than 256 rows at once
        (22 * GIB, 64, 1024, LARGEST),
    ],
)
def test_vllms_share_of_a_gpu_holds_base_and_cache(total, rows, length, share):
    assert memory_share(total, BASE_BYTES, KV_BYTES, rows, length) == share
