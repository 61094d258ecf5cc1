"""Tests how many rows are decoded at once with the free memory, and which fraction of a GPU's memory vLLM gets."""

import json
import math

import pytest
import torch
import toy_ppo as toy

from pipeline.writing import memory
from pipeline.writing.memory import GIB, memory_share

MIB = 2**20


def test_rows_fill_half_of_the_free_memory(monkeypatch):
    shared = toy.shared_base(critic=False)
    row = memory.kv_bytes(shared.base.config, 4) * 100 + 20 * toy.VOCAB
    for free, rows in ((20 * row, 10), (21 * row, 10), (1e12, 64), (math.inf, 64), (0.0, 1)):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        assert memory.decoding_rows(shared, 64, 100)[0] == rows


def test_free_memory_is_limited_by_the_container_but_not_by_cached_files(tmp_path, monkeypatch):
    def free_of_node(folder=tmp_path, **files):
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("memory_", "memory.", 1)).write_text(text)
        return memory.free_of_node()

    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    unlimited = free_of_node()
    assert MIB < unlimited < math.inf or not memory.Path("/proc/meminfo").exists()
    stat = f"anon {3 * MIB}\ninactive_file {2 * MIB}\n"
    assert free_of_node(memory_max="max\n", memory_current=f"{5 * MIB}\n", memory_stat=stat) > 6 * MIB
    assert free_of_node(memory_max=f"{8 * MIB}\n") == 5 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.free_bytes(torch.device("cpu")) == 2.5 * MIB
    files = dict(memory_limit_in_bytes=str(4 * MIB), memory_usage_in_bytes=str(3 * MIB), memory_stat=stat)
    assert free_of_node(tmp_path / "memory", **files) == 3 * MIB  # cgroup version 1


def free_rows(monkeypatch, rows):
    """Sets the free memory so that the KV cache of `rows` rows of a toy trainer fits."""
    row = memory.kv_bytes(toy.config(), 4) * (7 + 8) + 20 * toy.VOCAB
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2.0 * rows * row)


def test_a_resumed_run_decodes_as_many_rows_as_before(tmp_path, monkeypatch, capsys):
    def resumed(free, **changes):
        free_rows(monkeypatch, free)
        trainer = toy.trainer(**changes)
        trainer.restore(tmp_path)
        return trainer.sampler.rows

    free_rows(monkeypatch, 100)
    assert toy.trainer().sampler.rows == 16
    assert toy.trainer(local_rollout_forward_batch_size=4).sampler.rows == 4
    assert "at once" not in capsys.readouterr().out
    free_rows(monkeypatch, 5)
    first = toy.trainer()
    assert first.sampler.rows == 5
    assert "decoding 5 of a chunk's 16 completions at once" in capsys.readouterr().out
    first.save(tmp_path)
    assert resumed(9) == 5
    assert resumed(4) == 4  # memory now suffices for only 4 rows
    assert resumed(9, local_rollout_forward_batch_size=3) == 3
    state = json.loads((tmp_path / "ppo_state.json").read_text())
    assert state["decoding"] == {"workers": 1, "rows": 5}
    (tmp_path / "ppo_state.json").write_text(json.dumps(state | {"decoding": {"workers": 2, "rows": 5}}))
    assert resumed(9) == 9  # after a change of the number of workers, the recorded number of rows is not used


# Llama 3 8B in bf16 takes 15 GiB, and each token 128 KiB for keys and values.
BASE_BYTES, KV_BYTES = 15 * GIB, 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("total", "free", "rows", "length", "share"),
    [
        (79, 60, 64, 1024, 0.33),  # 15 + 8 + 3 GiB
        (139, 120, 64, 1024, 0.19),
        (79, 60, 512, 1024, 0.64),  # the KV cache has space for only 256 rows
        (79, 40, 512, 1024, 0.48),  # vLLM may use at most 95 % of the free memory
    ],
)
def test_vllm_gets_memory_for_base_and_cache_or_most_of_the_free_memory(total, free, rows, length, share):
    assert memory_share(total * GIB, free * GIB, BASE_BYTES, KV_BYTES, rows, length) == share
