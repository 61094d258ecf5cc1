"""How a CPU multiplies fp32 matrices: by the base's hidden size and what the processor rounds."""

import pytest
import torch
import torch.nn.functional as F

from pipeline.models import matmul
from pipeline.models.matmul import HIGHEST, MEDIUM

AMD, AMX = 9e-7, 2.7e-3  # errors of "medium"; AMX rounds to bf16


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("hidden_size", "error", "expected", "says"),
    [
        (768, AMD, MEDIUM, 'precision "medium", by oneDNN (error 9.0e-07 here)'),
        (511, AMD, HIGHEST, "hidden size 511, below 512"),
        (768, AMX, HIGHEST, "error of 2.7e-03 here, above 1e-05"),
        (768, float("nan"), HIGHEST, "error of nan"),
    ],
)
def test_the_precision_of_a_process(hidden_size, error, expected, says, monkeypatch):
    monkeypatch.setattr(matmul, "medium_error", lambda: error)
    assert says in matmul.configure(hidden_size, "cpu")
    assert torch.get_float32_matmul_precision() == expected


def test_a_process_on_a_gpu_keeps_its_precision(monkeypatch):
    monkeypatch.setattr(matmul, "medium_error", None)
    assert 'precision "highest", on a GPU without TF32' in matmul.configure(4096, "cuda")
    torch.set_float32_matmul_precision("high")
    assert 'precision "high", on a GPU with TF32 or less' in matmul.configure(4096, "cuda")


def test_products_rounded_to_bf16_are_far_above_the_limit_and_measuring_changes_no_setting():
    torch.manual_seed(0)
    a, b = torch.randn(64, 256), torch.randn(256, 96)
    assert matmul._error(a, b) < matmul.MAX_ERROR / 5
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul._error(a, b) > matmul.MAX_ERROR * 10
    before = torch.get_float32_matmul_precision()
    assert matmul.medium_error() == matmul.medium_error() > 0
    assert torch.get_float32_matmul_precision() == before


class PrecisionOfBackward(torch.autograd.Function):
    """Records the precision at which the gradients before and after attention are computed."""

    seen: list[str] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        PrecisionOfBackward.seen.append(torch.get_float32_matmul_precision())
        return grad


@pytest.mark.parametrize("mask", ["none", "causal", "bool"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_attention_is_that_of_highest_and_all_else_stays_medium(mask, checkpointed, monkeypatch):
    monkeypatch.setattr(matmul, "medium_error", lambda: AMD)
    arguments = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.ones(26, 26, dtype=torch.bool).tril()},
    }[mask]
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4, 26, 32, requires_grad=True) for _ in range(3)]

    def block(q, k, v):
        q, k, v = (PrecisionOfBackward.apply(x) for x in (q, k, v))
        return PrecisionOfBackward.apply(F.scaled_dot_product_attention(q, k, v, **arguments))

    def computed():
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False)
        else:
            out = block(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    expected = computed()
    matmul.configure(768, "cpu")
    PrecisionOfBackward.seen.clear()
    found = computed()
    assert all(map(torch.equal, found, expected))
    assert PrecisionOfBackward.seen == [MEDIUM] * 4
    assert torch.get_float32_matmul_precision() == MEDIUM
    with torch.no_grad():
        assert torch.equal(F.scaled_dot_product_attention(*inputs, **arguments), expected[0])
