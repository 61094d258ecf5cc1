"""How many completions are decoded at once, from the memory that is free, and that a resumed run keeps the number."""

import json
import math

import pytest
import torch
import toy_ppo as toy

from pipeline.ppo import decode_memory
from pipeline.ppo.engine import room_for

MIB = 2**20


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma"])
def test_the_bytes_of_a_token_are_those_of_the_real_cache(kind):
    shared = toy.shared_base(kind, critic=False)
    cache = room_for(shared, 2, 5)
    shared.body(input_ids=torch.ones(2, 5, dtype=torch.long), past_key_values=cache, use_cache=True)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert decode_memory.kv_bytes(shared.base.config, 4) * 10 == real


def test_rows_are_as_many_as_half_of_the_free_memory_holds(monkeypatch):
    shared = toy.shared_base(critic=False)
    row = decode_memory.kv_bytes(shared.base.config, 4) * 100 + 20 * toy.VOCAB
    for free, rows in ((20 * row, 10), (21 * row, 10), (1e12, 64), (math.inf, 64), (0.0, 1)):
        monkeypatch.setattr(decode_memory, "free_bytes", lambda device, free=free: free)
        assert decode_memory.decoding_rows(shared, 64, 100)[0] == rows


def written(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_limit_of_a_container_counts_and_its_cached_files_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(decode_memory, "CGROUP", tmp_path)
    unlimited = decode_memory.free_of_node()
    assert MIB < unlimited < math.inf or not decode_memory.Path("/proc/meminfo").exists()
    stat = f"anon {3 * MIB}\ninactive_file {2 * MIB}\n"
    written(tmp_path, memory__max="max\n", memory__current=f"{5 * MIB}\n", memory__stat=stat)
    assert decode_memory.free_of_node() > 6 * MIB
    written(tmp_path, memory__max=f"{8 * MIB}\n")
    assert decode_memory.free_of_node() == 5 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert decode_memory.free_bytes(torch.device("cpu")) == 2.5 * MIB
    files = dict(memory__limit_in_bytes=str(4 * MIB), memory__usage_in_bytes=str(MIB), memory__stat=stat)
    written(tmp_path / "memory", **files)
    assert decode_memory.free_of_node() == 5 * MIB
    written(tmp_path / "memory", memory__usage_in_bytes=str(3 * MIB))
    assert decode_memory.free_of_node() == 3 * MIB


def test_a_resumed_run_decodes_as_many_rows_as_before(tmp_path, monkeypatch, capsys):
    def free(rows):
        row = decode_memory.kv_bytes(toy.config(), 4) * (7 + 8) + 20 * toy.VOCAB
        monkeypatch.setattr(decode_memory, "free_bytes", lambda device: 2.0 * rows * row)

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
        row = decode_memory.kv_bytes(toy.config(), 4) * (7 + 8) + 20 * toy.VOCAB
        monkeypatch.setattr(decode_memory, "free_bytes", lambda device: 2.0 * rows * row)
        trainer = toy.trainer()
        return trainer.rollout().chunks, trainer.sampler.rows

    (large, most), (small, fewer) = chunks(100), chunks(5)
    assert large == small and (most, fewer) == (16, 5)
