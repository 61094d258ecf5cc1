"""SharedBase: roles on one base, log-probs, scores, files in peft's format, gradients under checkpointing."""

import importlib.util
import json
from types import SimpleNamespace

import peft
import pytest
import torch
import toy_ppo as toy
import transformers
from safetensors.torch import load_file, save_file

from pipeline.errors import InputError
from pipeline.models.adapters import SharedBase
from pipeline.models.base import load_base


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_checkpointing_gives_the_same_gradients_even_if_another_role_runs_in_between(kind, role):
    shared = toy.shared_base(kind, spread=0.1)
    ids, starts, _, mask = toy.batch()

    def output(name):
        return (
            shared.logprobs(name, ids, starts, mask)[0].sum()
            if name == "policy"
            else toy.values(shared, name, ids).square().sum()
        )

    expected = torch.autograd.grad(output(role), shared.parameters_of(role))
    shared.enable_gradient_checkpointing()
    alone = torch.autograd.grad(output(role), shared.parameters_of(role))
    loss = output(role)
    other = output("critic" if role == "policy" else "policy")  # both forwards, then one backward: the trap
    both = torch.autograd.grad(loss + other, shared.parameters_of(role))
    for a, b, c in zip(expected, alone, both, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert shared.base.training  # it was on, or this test proves nothing
    with torch.no_grad():
        output(role)
    assert not shared.base.training


def test_average_moves_the_reference_a_part_of_the_way():
    shared = toy.shared_base(spread=0.3)
    before = [p.clone() for p in shared.parameters_of("reference")]
    shared.average("reference", "policy", 0.75)
    for old, now, policy in zip(
        before, shared.parameters_of("reference"), shared.parameters_of("policy"), strict=True
    ):
        torch.testing.assert_close(now, 0.75 * old + 0.25 * policy)
    assert not any(p.requires_grad for p in shared.parameters_of("reference"))


def test_every_dropout_is_off_in_train_mode_too():
    torch.manual_seed(0)
    shared = SharedBase(toy.base("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5))
    shared.add("policy", lora={**toy.LORA, "lora_dropout": 0.5}, trainable=True)
    shared.train()
    shared.base.train()
    ids, *_ = toy.batch()
    with shared.use("policy"):
        assert torch.equal(shared.base(input_ids=ids).logits, shared.base(input_ids=ids).logits)


# ---------------------------------------------------------------------------------------------- files


@pytest.fixture
def folder_of_base(tmp_path):
    def save(kind):
        toy.base(kind).save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return save


@pytest.mark.parametrize("kind", toy.KINDS)
def test_a_reward_adapter_trained_by_peft_gives_the_same_scores_here(kind, folder_of_base, tmp_path):
    where = folder_of_base(kind)
    torch.manual_seed(1)
    scorer = transformers.AutoModelForSequenceClassification.from_pretrained(where, num_labels=1)
    scorer = peft.get_peft_model(
        scorer, peft.LoraConfig(task_type="SEQ_CLS", modules_to_save=["score"], **toy.LORA)
    )
    for _, parameter in scorer.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    scorer.eval().save_pretrained(tmp_path / "rm")
    ids, *_ = toy.batch()
    mask = torch.arange(12) < torch.tensor([12, 9, 4]).unsqueeze(-1)
    ids = ids.where(mask, 0)
    expected = scorer(input_ids=ids, attention_mask=mask.long()).logits[:, 0]

    shared = SharedBase(transformers.AutoModelForCausalLM.from_pretrained(where))
    shared.add("policy", lora=toy.LORA, trainable=True)
    shared.add("reward", folder=tmp_path / "rm")
    ours = [
        shared.score("reward", row[: row_mask.sum()])
        for row, row_mask in zip(ids.tolist(), mask, strict=True)
    ]
    assert ours == pytest.approx(expected.tolist(), abs=1e-5)

    shared.save("reward", tmp_path / "again")  # and back, by both of peft's ways
    auto = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "again", num_labels=1
    ).eval()
    torch.testing.assert_close(
        auto(input_ids=ids, attention_mask=mask.long()).logits[:, 0], expected, rtol=1e-5, atol=1e-5
    )
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(where, num_labels=1)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "again").eval()
    torch.testing.assert_close(
        loaded(input_ids=ids, attention_mask=mask.long()).logits[:, 0], expected, rtol=1e-5, atol=1e-5
    )
    assert (
        load_file(tmp_path / "again" / "adapter_model.safetensors").keys()
        == load_file(tmp_path / "rm" / "adapter_model.safetensors").keys()
    )


@pytest.mark.parametrize("kind", toy.KINDS)
def test_a_policy_adapter_goes_to_peft_and_comes_back(kind, folder_of_base, tmp_path):
    where = folder_of_base(kind)
    shared = SharedBase(transformers.AutoModelForCausalLM.from_pretrained(where))
    shared.add("policy", lora=toy.LORA, trainable=True)
    for parameter in shared.parameters_of("policy"):
        parameter.data += 0.2 * torch.randn_like(parameter)
    ids, starts, counts, mask = toy.batch()
    shared.save("policy", tmp_path / "policy")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    ours = shared.logprobs("policy", ids, starts, mask)[0]
    assert ours[1, :7].tolist() == pytest.approx(toy.plain_logprobs(model, ids, starts, counts)[1], abs=1e-4)
    shared.add("reference", folder=tmp_path / "policy")
    assert torch.equal(ours, shared.logprobs("reference", ids, starts, mask)[0])
    assert not any(p.requires_grad for p in shared.parameters_of("reference"))


@pytest.mark.parametrize(
    "extra", [dict(use_rslora=True), dict(use_dora=True), dict(lora_bias=True), dict(r=1, lora_alpha=3)]
)
def test_kinds_of_lora_survive_save_copy_and_load(extra, tmp_path):
    shared = SharedBase(toy.base())
    shared.add("policy", lora={**toy.LORA, **extra}, trainable=True)
    for parameter in shared.parameters_of("policy"):
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids, starts, _, mask = toy.batch()
    ours = shared.logprobs("policy", ids, starts, mask)[0]
    shared.save("policy", tmp_path)
    shared.add("copied", copy_of="policy")
    shared.add("loaded", folder=tmp_path)
    loaded = peft.PeftModel.from_pretrained(toy.base(), tmp_path).eval()
    again = SharedBase(toy.base())
    again.add("x", folder=tmp_path)
    for other in (
        shared.logprobs("copied", ids, starts, mask)[0],
        shared.logprobs("loaded", ids, starts, mask)[0],
    ):
        assert torch.equal(ours, other)
    assert torch.equal(ours, again.logprobs("x", ids, starts, mask)[0])
    assert ours[1, :7].tolist() == pytest.approx(
        toy.plain_logprobs(loaded, ids, starts, mask.sum(-1))[1], abs=1e-4
    )


def test_two_frozen_roles_of_one_folder_are_one_adapter(tmp_path):
    shared = toy.shared_base()
    shared.save("reward", tmp_path)
    before = sum(p.numel() for p in shared.parameters())
    shared.add("judge", folder=tmp_path)
    shared.add("judge2", folder=tmp_path)
    added = sum(p.numel() for p in shared.parameters()) - before
    assert added == sum(p.numel() for p in shared.parameters_of("judge"))
    assert shared.parameters_of("judge2")[0] is shared.parameters_of("judge")[0]
    shared.add("student", folder=tmp_path, trainable=True)
    assert shared.parameters_of("student")[0] is not shared.parameters_of("judge")[0]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("extra", [{}, {"lora_bias": True}, {"target_modules": ["q_proj"]}], ids=str)
def test_rows_of_one_batch_have_adapters_of_their_own(extra, autocast):
    """By the fused layers, and by peft's own forward where an adapter is of another kind."""
    shared = toy.shared_base(spread=0.2)
    shared.autocast = autocast
    shared.add("other", lora={"r": 2, "target_modules": "all-linear", **extra})
    for parameter in shared.parameters_of("other"):
        parameter.data += 0.2 * torch.randn_like(parameter)
    roles = ["policy", None, "other", "policy", "other"]
    ids = torch.tensor([[5 + i, 9, 30, 7 + i] for i in range(len(roles))])
    with torch.no_grad():
        alone = torch.cat([shared.hidden(role, ids[i : i + 1]) for i, role in enumerate(roles)])
        with shared.use_each(roles):
            together = shared.body(input_ids=ids, use_cache=False).last_hidden_state
        again = shared.hidden("policy", ids[:1])
    if autocast is None:
        assert torch.allclose(together, alone, atol=1e-5)
    else:  # both are rounded, in another order
        shared.autocast = None
        with torch.no_grad():
            exact = torch.cat([shared.hidden(role, ids[i : i + 1]) for i, role in enumerate(roles)])
        shared.autocast = autocast
        assert (together - exact).norm() <= 2 * (alone - exact).norm() < 0.1 * exact.norm()
    assert (alone[0] - alone[1]).abs().max() > 0.05 and (alone[2] - alone[1]).abs().max() > 0.05
    assert torch.equal(again, alone[:1]), "afterwards one role is in use, as before"


def test_a_role_that_is_removed_takes_its_adapter_along_unless_another_has_it(tmp_path):
    shared = toy.shared_base(spread=0.2)
    shared.save("policy", tmp_path)
    ids = torch.tensor([[5, 9, 30, 7]])
    size = sum(p.numel() for p in shared.base.parameters())
    shared.add("one", folder=tmp_path)
    shared.add("two", folder=tmp_path)
    with torch.no_grad():
        expected = shared.hidden("one", ids)
        shared.remove("one")
        assert torch.equal(shared.hidden("two", ids), expected)
        shared.remove("two")
        assert sum(p.numel() for p in shared.base.parameters()) == size
        assert torch.equal(shared.hidden("policy", ids), expected)
        shared.add("one", folder=tmp_path)
        assert torch.equal(shared.hidden("one", ids), expected)
    with shared.use("one"), pytest.raises(ValueError, match="in use"):
        shared.remove("one")
    with pytest.raises(KeyError):
        shared.hidden("two", ids)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    shared = toy.shared_base()
    shared.save("critic", tmp_path / "critic")
    other = SharedBase(toy.base(intermediate_size=64))
    for _ in range(2):  # nothing of the role stays, so it can be added again
        with pytest.raises(InputError, match=r"tensors differ, for example .* and this base takes"):
            other.add("x", folder=tmp_path / "critic")
    with pytest.raises(InputError, match="adapter_config"):
        shared.add("y", folder=tmp_path)
    tensors = load_file(tmp_path / "critic" / "adapter_model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if "score" not in k},
        tmp_path / "critic" / "adapter_model.safetensors",
    )
    with pytest.raises(InputError, match="scalar head"):
        shared.load("critic", tmp_path / "critic")


def test_pickled_adapters_are_not_read(tmp_path):
    shared = toy.shared_base()
    shared.save("policy", tmp_path)
    torch.save(load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match="safetensors only"):
        shared.add("x", folder=tmp_path)


def test_a_head_that_changes_its_logits_in_an_unknown_way_is_refused():
    model = toy.base()
    forward = model.forward

    def shifted(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = shifted
    with pytest.raises(InputError, match="after the lm head"):
        SharedBase(model)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_an_nf4_base_learns_and_shares(tmp_path):
    toy.base(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    model = load_base(
        SimpleNamespace(
            name_or_path=str(tmp_path / "base"), revision=None, dtype="float32", load_in_4bit=True,
            attn_implementation=None, trust_remote_code=False, allow_pickle=False,
        )
    )  # fmt: skip
    shared = SharedBase(model)
    shared.add("policy", lora=toy.LORA, trainable=True)
    shared.add("critic", lora=toy.LORA, head=True, trainable=True)
    ids, starts, _, mask = toy.batch()
    before = shared.logprobs("policy", ids, starts, mask)[0]
    shared.enable_gradient_checkpointing()
    optimizer = torch.optim.SGD([*shared.parameters_of("policy"), *shared.parameters_of("critic")], 0.05)
    packed = {n: p.clone() for n, p in shared.named_parameters() if p.dtype == torch.uint8}
    for _ in range(2):
        (-shared.logprobs("policy", ids, starts, mask)[0].sum()).backward()
        (toy.values(shared, "critic", ids) - 1).square().sum().backward()
        optimizer.step()
    assert packed and all(torch.equal(p, packed[n]) for n, p in shared.named_parameters() if n in packed)
    after = shared.logprobs("policy", ids, starts, mask)[0]
    assert after.sum() > before.sum()
    shared.save("critic", tmp_path / "critic")
    shared.add("reward", folder=tmp_path / "critic")
    assert torch.equal(toy.values(shared, "reward", ids), toy.values(shared, "critic", ids))
    assert json.loads((tmp_path / "critic" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
