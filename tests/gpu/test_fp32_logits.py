"""Are logits, log-probs and their gradients those of fp32 sums, through torch.mm's fp32 output?"""

import gpu_models
import torch
from torch import nn

from pipeline.models.precision import linear_fp32, mm_fp32


def test_products_are_not_rounded(device):
    a = torch.randn(300, 4096, device=device).bfloat16()
    b = torch.randn(32000, 4096, device=device).bfloat16().t()
    exact, ours, torchs = a.double() @ b.double(), mm_fp32(a, b), (a @ b).float()
    assert ours.dtype == torch.float32
    apart = [(x - exact).pow(2).mean().sqrt().item() for x in (ours, torchs)]
    print(f"\nrms error of logits: {apart[0]:.2g}, in bf16 {apart[1]:.2g}")
    assert apart[0] < 1e-3 < apart[1]


def test_gradients(device):
    head = nn.Linear(512, 1000, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(7, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = linear_fp32(x, head, torch.bfloat16)
    assert y.dtype == torch.float32
    (grad,) = torch.autograd.grad(y.logsumexp(-1).sum(), x)
    exact = y.double().softmax(-1) @ head.weight.double()
    assert ((grad - exact).norm() / exact.norm()) < 1e-2


def test_sampler_and_trainer_agree(device):
    """log-probs of one rollout, by the decoding steps and by the training forward; what is left is the body's bf16."""
    from pipeline.ppo.rollout import Sampling, TransformersEngine

    shared = gpu_models.shared(layers=4)
    prompts = [torch.randint(4, 1000, (20,)).tolist() for _ in range(16)]
    completions = TransformersEngine(shared).generate(prompts, range(16), Sampling(64, (2,), seed=1))
    apart = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion.tokens], device=device)
        mask = torch.ones(1, len(completion.tokens), dtype=torch.bool, device=device)
        with torch.no_grad():
            again = shared.logprobs("policy", ids, torch.tensor([len(prompt)], device=device), mask)[0][0]
        apart += (again.cpu() - torch.tensor(completion.logprobs)).tolist()
    rms = torch.tensor(apart).pow(2).mean().sqrt().item()
    print(f"\nsampler against trainer: rms {rms:.4f} nats, largest {max(map(abs, apart)):.4f}")
    assert rms < 0.02
