"""vLLM's share of a GPU, from what it will hold."""

import pytest

from pipeline.ppo.vllm_memory import GIB, LARGEST, WORKSPACE, memory_needed, memory_share

# Llama 3 8B in bf16: 15 GiB, and 128 KiB of keys and values a token.
BASE, KV = 15 * GIB, 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("total", "rows", "length", "share"),
    [
        (79 * GIB, 64, 1024, 0.33),  # 15 + 8 + 3 GiB
        (139 * GIB, 64, 1024, 0.19),
        (79 * GIB, 512, 1024, 0.64),  # no more than 256 rows at once
        (22 * GIB, 64, 1024, LARGEST),
    ],
)
def test_the_share_holds_base_and_cache(total, rows, length, share):
    assert memory_share(total, BASE, KV, rows, length) == share
    assert share == LARGEST or share * total >= memory_needed(BASE, KV, rows, length) > BASE + WORKSPACE
