"""Tests half-precision products with fp32 results, and the log-probs computed from them."""

import pytest
import torch
import toy_ppo as toy
from torch import nn

from pipeline.models.adapters import SharedBase
from pipeline.models.precision import linear_fp32

# {name: (dtype of the base, autocast)}
PRECISIONS = {
    "bf16 base": (torch.bfloat16, None),
    "bf16 base, autocast": (torch.bfloat16, torch.bfloat16),
    "fp32 base, autocast": (torch.float32, torch.bfloat16),
    "fp16 base": (torch.float16, None),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("weight", "dtype"), [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
)
def test_the_gradient_of_a_frozen_layer_is_exact(weight, dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(16, 40, bias=bias, dtype=weight).requires_grad_(False)
    x = torch.randn(2, 3, 16, requires_grad=True)
    y = linear_fp32(x, layer, dtype)
    assert y.dtype == torch.float32 and y.shape == (2, 3, 40)
    out = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, out)
    assert grad.dtype == torch.float32
    tolerance = 1e-5 if weight == torch.float32 else 3e-2
    torch.testing.assert_close(grad, out @ layer.weight.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("precision", "kind"), [*((one, "llama") for one in PRECISIONS), ("bf16 base", "gemma2")]
)
def test_logprobs_and_entropies_are_fp32_on_any_base(precision, kind):
    dtype, autocast = PRECISIONS[precision]
    shared = SharedBase(toy.base(kind, initializer_range=1.0).to(dtype), autocast=autocast)
    shared.add("policy", lora=toy.LORA, trainable=True)
    ids, starts, _, mask = toy.batch()
    rows, steps = mask.nonzero(as_tuple=True)
    with torch.no_grad():
        hidden = shared.hidden("policy", ids)[rows, starts[rows] + steps - 1]
        exact = hidden.double() @ shared.base.get_output_embeddings().weight.double().t()
        if kind == "gemma2":
            exact = 5.0 * torch.tanh(exact / 5.0)
        assert exact.std() > 2  # the logits are large enough to show rounding
        logprobs, entropy = shared.logprobs("policy", ids, starts, mask, entropy=True)
    exact = exact.log_softmax(-1)
    expected = exact.gather(-1, ids[rows, starts[rows] + steps].unsqueeze(-1)).squeeze(-1)
    assert (logprobs[rows, steps] - expected).pow(2).mean().sqrt() < 1e-4
    assert (entropy[rows, steps] + (exact.exp() * exact).sum(-1)).abs().max() < 1e-3
