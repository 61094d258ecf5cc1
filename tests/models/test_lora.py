"""Tests that the fused LoRA layer computes peft's results and gradients, and calls peft's own forward in unsupported cases."""

import copy

import peft
import pytest
import torch
import toy_ppo as toy
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Linear
from torch import nn

from pipeline.models import lora
from pipeline.models.lora import fuse_lora_layers

IN, OUT = 24, 40


def layers(bias=False, dtype=torch.float32, **lora):
    """Returns peft's LoRA layer and its fused copy, which share a frozen nn.Linear. The LoRA matrix B is not 0."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=bias, dtype=dtype)).requires_grad_(False)
    config = {"r": 4, "lora_alpha": 12, "target_modules": ["0"], **lora}
    LoraModel(model, peft.LoraConfig(**config), "one")
    with torch.no_grad():
        model[0].lora_B["one"].weight.normal_()
        for name in ("lora_A", "lora_B"):  # adapters are in fp32 for any dtype of the base, as in SharedBase
            getattr(model[0], name).float()
    other = copy.deepcopy(model)
    fuse_lora_layers(other)
    return model[0], other[0]


def results(layer, x):
    """Returns the layer's output y, and the gradients of x, A and B for a fixed gradient of y."""
    x = x.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(4)
    # The gradient has the same values in every dtype.
    y.backward(torch.randn(y.shape).to(torch.bfloat16).to(y.dtype))
    adapter = [layer.lora_A["one"].weight, layer.lora_B["one"].weight]
    return [y.detach(), x.grad, *(p.grad for p in adapter)]


def fused_calls(monkeypatch):
    """Returns a list that receives an entry for each call of the fused product."""
    calls, own = [], lora._product
    monkeypatch.setattr(lora, "_product", lambda *terms: (calls.append(1), own(*terms))[1])
    return calls


@pytest.mark.parametrize(
    ("shape", "bias", "lora"), [((2, 5, IN), True, {}), ((7, IN), False, {"use_rslora": True})]
)
def test_outputs_and_gradients_equal_those_of_peft(shape, bias, lora, monkeypatch):
    own, fused = (layer.double() for layer in layers(bias, **lora))
    calls = fused_calls(monkeypatch)
    x = torch.randn(shape, dtype=torch.float64)
    for theirs, ours in zip(results(own, x), results(fused, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_the_fused_layer_is_as_exact_as_peft(dtype, monkeypatch):
    own, fused = layers(dtype=dtype)
    calls = fused_calls(monkeypatch)
    x = torch.randn(64, IN).to(torch.bfloat16).to(dtype)
    for layer in (own, fused):  # rounds the weights to bf16, so that autocast rounds only results
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    exact = results(copy.deepcopy(own).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = results(own, x), results(fused, x)
    assert len(calls) == 1
    assert (
        [t.dtype for t in ours] == [t.dtype for t in theirs] == [torch.bfloat16, dtype] + 2 * [torch.float32]
    )
    for name, right, peft_s, fused_s in zip(("y", "x", "A", "B"), exact, theirs, ours, strict=True):
        apart = [(t.double() - right).norm() / right.norm() for t in (peft_s, fused_s)]
        assert apart[1] < 6e-3 and apart[1] < 1.5 * apart[0] + 1e-3, name


@pytest.mark.parametrize("case", ["half", "dora", "disabled", "merged", "bare", "two", "learning", "dropout"])
def test_other_cases_use_pefts_own_forward(case, monkeypatch):
    own, fused = layers(
        dtype=torch.bfloat16 if case == "half" else torch.float32,
        use_dora=case == "dora",
        lora_bias=case == "bare",
        lora_dropout=0.5 * (case == "dropout"),
    )
    for layer in (own, fused):
        if case == "disabled":
            layer._disable_adapters = True
        if case == "merged":
            layer.merge()
        if case == "learning":  # peft's own forward can compute a gradient of the base weight W
            layer.get_base_layer().weight.requires_grad_(True)
        if case == "two":
            torch.manual_seed(5)
            config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["0"])
            layer.update_layer("two", r=2, lora_alpha=2, config=config)
            layer._active_adapter = ["one", "two"]
    calls = fused_calls(monkeypatch)
    x = torch.randn(3, IN).to(torch.bfloat16 if case == "half" else torch.float32)
    outputs = []
    for layer in (fused, own):
        torch.manual_seed(6)  # so that both layers draw the same dropout mask
        outputs.append(layer(x))
    assert torch.equal(*outputs)
    assert not calls


def test_every_role_of_a_shared_base_runs_fused(monkeypatch):
    shared = toy.shared_base("llama")
    layers = sum(isinstance(m, Linear) for m in shared.base.modules())
    calls = fused_calls(monkeypatch)
    for count, role in enumerate(shared.roles, start=1):
        shared.hidden(role, torch.tensor([[5, 6, 7]]))
        assert len(calls) == count * layers > 0, role
    shared.hidden(None, torch.tensor([[5, 6, 7]]))  # the base without an adapter has no LoRA layer to fuse
    assert len(calls) == len(shared.roles) * layers
