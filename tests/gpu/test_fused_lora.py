"""Does the fused LoRA layer run under autocast, as exactly as peft's, and with fewer kernels in less time?"""

import time

import gpu_models
import pytest
import torch
from peft.tuners.lora.layer import Linear

from pipeline.models import lora


def unfused(shared):
    for layer in shared.base.modules():
        if type(layer) is lora.FusedLinear:
            layer.__class__ = Linear


@pytest.mark.parametrize("backward", [False, True])
def test_fused_beside_peft(device, backward):
    shared, found, ids = gpu_models.shared(layers=4), {}, torch.randint(4, 1000, (4, 512), device=device)
    parameters = shared.parameters_of("policy")
    for name in ("fused", "peft"):
        if name == "peft":
            unfused(shared)

        def step():
            with torch.set_grad_enabled(backward):
                hidden = shared.hidden("policy", ids)
            return torch.autograd.grad(hidden.float().pow(2).mean(), parameters) if backward else (hidden,)

        results = step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
        kernels = sum(event.count for event in profile.key_averages())
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / 5
        found[name] = (torch.cat([r.float().flatten() for r in results]), kernels, seconds)
        assert all(r.dtype == torch.float32 for r in results) or not backward
    (ours, kernels, seconds), (pefts, pefts_kernels, pefts_seconds) = found["fused"], found["peft"]
    apart = ((ours - pefts).norm() / pefts.norm()).item()
    print(
        f"\n{apart=:.2g}; kernels {kernels} and {pefts_kernels}; seconds {seconds:.4f} and {pefts_seconds:.4f}"
    )
    assert apart < 3e-2 and kernels < pefts_kernels
