"""Is a rollout's cache one allocation a layer, and how much memory does a GPU lose to holes between blocks?"""

import gpu_models
import pytest
import torch

from pipeline.ppo.rollout import Sampling, TransformersEngine


@pytest.mark.parametrize("rounds", [3])
def test_what_is_reserved_stays_near_what_is_used(device, rounds):
    """Run it a second time with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    shared = gpu_models.shared(layers=4)
    engine = TransformersEngine(shared, rows=64)
    ends = tuple(range(2, 130))  # rows leave at all times
    for seed in range(rounds):
        lengths = torch.randint(50, 500, (64,), generator=torch.Generator().manual_seed(seed)).tolist()
        prompts = [torch.randint(200, 1000, (n,)).tolist() for n in lengths]
        engine.generate(prompts, range(64), Sampling(300, ends, seed=seed))
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    print(f"\npeak {peak / 2**30:.2f} GiB, reserved {reserved / 2**30:.2f} GiB, retries {retries}")
    assert reserved < 1.5 * peak and retries == 0
