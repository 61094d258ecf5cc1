"""Experiments for one GPU, with torch, transformers, peft and bitsandbytes alone: `pytest tests/gpu -s`. Skipped without CUDA."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device():
    """The first GPU, with its peak of memory reset."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.device("cuda", 0)
