"""The fused LoRA layer: peft's numbers and gradients, less memory, and peft itself wherever it does not apply."""

import copy
from contextlib import contextmanager, nullcontext

import peft
import pytest
import torch
import toy_ppo as toy
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Linear
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.inference import decoder
from pipeline.models import lora
from pipeline.models.lora import FusedLinear, fuse
from pipeline.ppo import trainer as ppo_trainer

IN, OUT = 24, 40


def layers(bias=False, dtype=torch.float32, **lora):
    """(peft's layer, its fused copy) around one frozen nn.Linear, with a B that is not 0."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(IN, OUT, bias=bias, dtype=dtype)).requires_grad_(False)
    config = {"r": 4, "lora_alpha": 12, "target_modules": ["0"], **lora}
    LoraModel(model, peft.LoraConfig(**config), "one")
    with torch.no_grad():
        model[0].lora_B["one"].weight.normal_()
        for name in ("lora_A", "lora_B"):  # adapters are fp32 on any base, as in SharedBase
            getattr(model[0], name).float()
    other = copy.deepcopy(model)
    fuse(other)
    return model[0], other[0]


def results(layer, x):
    """y and the gradients of x, A and B for a fixed gradient of y."""
    x = x.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(4)
    y.backward(torch.randn(y.shape).to(torch.bfloat16).to(y.dtype))  # the same numbers in every dtype
    adapter = [layer.lora_A["one"].weight, layer.lora_B["one"].weight]
    return [y.detach(), x.grad, *(p.grad for p in adapter)]


def taken(monkeypatch):
    """How often the fused product ran."""
    calls, own = [], lora._product
    monkeypatch.setattr(lora, "_product", lambda *terms: (calls.append(1), own(*terms))[1])
    return calls


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"r": 1}])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, IN), (7, IN), (1, 1, IN)])
def test_numbers_and_gradients_are_pefts(shape, bias, lora, monkeypatch):
    own, fused = (layer.double() for layer in layers(bias, **lora))
    calls = taken(monkeypatch)
    x = torch.randn(shape, dtype=torch.float64)
    for theirs, ours in zip(results(own, x), results(fused, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_it_is_as_exact_as_peft(dtype, bias, monkeypatch):
    own, fused = layers(bias, dtype=dtype)
    calls = taken(monkeypatch)
    x = torch.randn(64, IN).to(torch.bfloat16).to(dtype)
    for layer in (own, fused):  # weights that bf16 holds: what is left is the rounding of results
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradients_the_bits_are_the_same_and_autograd_is_not_called(dtype, monkeypatch):
    _, fused = layers(dtype=dtype)
    x = torch.randn(2, 5, IN)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        expected = fused(x)
        monkeypatch.setattr(lora._Product, "apply", None)
        with torch.no_grad():
            assert torch.equal(fused(x), expected)


def test_gradcheck_and_only_the_gradients_that_are_asked_for():
    _, fused = layers(dtype=torch.float64)
    fused.double()
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fused, x)
    for parameter in fused.parameters():
        parameter.requires_grad_(False)
    # a frozen role: the gradient goes through, and A and B get none
    (grad,) = torch.autograd.grad(fused(x).sum(), x)
    assert grad.abs().sum() > 0
    fused.lora_A["one"].weight.requires_grad_(True)
    fused(x.detach()).sum().backward()  # the first layer: its input has no gradient
    assert fused.lora_A["one"].weight.grad.abs().sum() > 0
    assert fused.get_base_layer().weight.grad is None and fused.lora_B["one"].weight.grad is None


def test_no_more_is_kept_for_backward_than_by_peft():
    def kept(layer):
        weights, sizes = {p.data_ptr() for p in layer.parameters()}, {}

        def note(tensor):
            if tensor.data_ptr() not in weights:
                sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        x = torch.randn(50, IN, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            layer(x).sum()
        return sum(sizes.values())

    own, fused = layers()
    assert kept(fused) == kept(own) == 50 * IN + 50 * 4  # x and x A'


@pytest.mark.parametrize("case", ["half", "dora", "disabled", "merged", "bare", "two", "learning", "dropout"])
def test_everything_else_is_pefts_own_forward(case, monkeypatch):
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
        if case == "learning":  # peft's forward gives W its gradient
            layer.get_base_layer().weight.requires_grad_(True)
        if case == "two":
            torch.manual_seed(5)
            config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["0"])
            layer.update_layer("two", r=2, lora_alpha=2, config=config)
            layer._active_adapter = ["one", "two"]
    calls = taken(monkeypatch)
    x = torch.randn(3, IN).to(torch.bfloat16 if case == "half" else torch.float32)
    outputs = []
    for layer in (fused, own):
        torch.manual_seed(6)  # of the dropout
        outputs.append(layer(x))
    assert torch.equal(*outputs)
    assert not calls


def test_fuse_keeps_modules_names_and_parameters_and_leaves_other_kinds_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4), Conv1D(4, 4))
    LoraModel(model, peft.LoraConfig(r=2, target_modules=["0", "1", "3"], fan_in_fan_out=True), "one")
    before = {name: id(p) for name, p in model.named_parameters()}
    fuse(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert type(model[0]) is FusedLinear and isinstance(model[0], Linear)
    assert type(model[1]).__name__ == "Embedding" and type(model[2]) is nn.Linear
    assert type(model[3]) is Linear  # GPT-2's, whose weight lies the other way round


def test_every_role_of_a_shared_base_runs_fused(monkeypatch):
    shared = toy.shared_base("llama")
    layers = sum(isinstance(m, Linear) for m in shared.base.modules())
    calls = taken(monkeypatch)
    for count, role in enumerate(shared.roles, start=1):
        shared.hidden(role, torch.tensor([[5, 6, 7]]))
        assert len(calls) == count * layers > 0, role
    shared.hidden(None, torch.tensor([[5, 6, 7]]))  # the bare base: no adapter, nothing to fuse
    assert len(calls) == len(shared.roles) * layers


def test_adapters_are_cast_once_and_the_numbers_stay(monkeypatch):
    casts = []
    plain = lora._cast
    monkeypatch.setattr(lora, "_cast", lambda weight, dtype: casts.append(plain(weight, dtype)) or casts[-1])
    shared = toy.shared_base(spread=0.1)
    shared.autocast = torch.bfloat16
    ids = torch.arange(4, 16).view(2, 6)

    def gradients():
        for parameter in shared.parameters_of("policy"):
            parameter.grad = None
        for _ in range(2):
            shared.hidden("policy", ids).square().sum().backward()
        return [parameter.grad for parameter in shared.parameters_of("policy")]

    expected, every_time = gradients(), len({each.data_ptr() for each in casts})
    casts.clear()
    with lora.cast_once():
        found = gradients()
    once = {each.data_ptr() for each in casts}
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(once) == len(found) and len(casts) == every_time > 3 * len(once)
    for parameter in shared.parameters_of("policy"):  # an optimizer step
        parameter.data += 0.1
    with lora.cast_once():
        assert not torch.equal(gradients()[0], expected[0])


def test_ppo_casts_once_for_each_rollout_and_step(monkeypatch):
    def run(cast_once):
        for module in (ppo_trainer, decoder):
            monkeypatch.setattr(module, "cast_once", cast_once)
        trainer = toy.trainer(bf16=True, total_episodes=32)
        trainer.train()
        return toy.weights(trainer)

    @contextmanager
    def noted():
        with lora.cast_once():
            yield
            kept.append(len(lora._kept))

    kept = []
    assert torch.equal(run(noted), run(nullcontext))
    # Two updates: a rollout of the policy; two epochs of two minibatches, for policy and critic.
    adapters = 2 * 7 * 2
    assert kept == [adapters, *[2 * adapters] * 4] * 2
