"""Tests SharedBase: roles on one base, log-probs, scores, files in peft's format, and gradients under checkpointing."""

import peft
import pytest
import torch
import toy_ppo as toy
import transformers
from safetensors.torch import load_file

from pipeline.errors import InputError
from pipeline.models.adapters import SharedBase

QUICK = ("llama", "gpt2", "gemma2")
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in toy.KINDS]


def test_average_moves_the_reference_towards_the_policy():
    shared = toy.shared_base(spread=0.3)
    before = [p.clone() for p in shared.parameters_of("reference")]
    shared.average("reference", "policy", 0.75)
    now, policy = shared.parameters_of("reference"), shared.parameters_of("policy")
    for a, b, c in zip(before, now, policy, strict=True):
        torch.testing.assert_close(b, 0.75 * a + 0.25 * c)


def test_every_dropout_is_off_even_in_train_mode():
    torch.manual_seed(0)
    shared = SharedBase(toy.base("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5))
    shared.add("policy", lora={**toy.LORA, "lora_dropout": 0.5}, trainable=True)
    shared.train()
    shared.base.train()
    ids, *_ = toy.batch()
    with shared.use("policy"):
        assert torch.equal(shared.base(input_ids=ids).logits, shared.base(input_ids=ids).logits)


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_adapter_trained_by_peft_gives_the_same_scores_here(kind, tmp_path):
    where = str(tmp_path / kind)
    toy.base(kind).save_pretrained(where)
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
    ours = [shared.score("reward", row[:count]) for row, count in zip(ids.tolist(), (12, 9, 4), strict=True)]
    assert ours == pytest.approx(expected.tolist(), abs=1e-5)

    shared.save("reward", tmp_path / "again")
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "again", num_labels=1)
    scores = model.eval()(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    names = [set(load_file(tmp_path / name / "adapter_model.safetensors")) for name in ("again", "rm")]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        *[pytest.param(kind, {}, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in toy.KINDS],
        ("llama", dict(use_dora=True, use_rslora=True)),
    ],
)
def test_a_policy_adapter_stays_the_same_when_it_is_saved_copied_and_loaded_here_or_by_peft(
    kind, extra, tmp_path
):
    shared = SharedBase(toy.base(kind))
    shared.add("policy", lora={**toy.LORA, **extra}, trainable=True)
    for parameter in shared.parameters_of("policy"):
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids, starts, counts, mask = toy.batch()
    ours = shared.logprobs("policy", ids, starts, mask)[0]
    shared.save("policy", tmp_path)
    shared.add("copied", copy_of="policy")
    shared.add("loaded", folder=tmp_path)
    again = SharedBase(toy.base(kind))
    again.add("loaded", folder=tmp_path)
    for other, role in ((shared, "copied"), (shared, "loaded"), (again, "loaded")):
        assert torch.equal(ours, other.logprobs(role, ids, starts, mask)[0])
        assert not any(p.requires_grad for p in other.parameters_of(role))
    peft_s = peft.PeftModel.from_pretrained(toy.base(kind), tmp_path).eval()
    expected = toy.plain_logprobs(peft_s, ids, starts, counts)[1]
    assert ours[1, :7].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("extra", [{"lora_bias": True}, {"target_modules": ["q_proj"]}], ids=str)
def test_rows_of_one_batch_can_use_different_adapters(extra, autocast):
    """The fused layers compute plain LoRA. Other LoRA, such as LoRA with a bias, is computed by peft's own forward."""
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
    else:  # under autocast, rounding differs between a batch with several roles and one with a single role
        shared.autocast = None
        with torch.no_grad():
            exact = torch.cat([shared.hidden(role, ids[i : i + 1]) for i, role in enumerate(roles)])
        shared.autocast = autocast
        assert (together - exact).norm() <= 2 * (alone - exact).norm() < 0.1 * exact.norm()
    assert (alone[0] - alone[1]).abs().max() > 0.05 and (alone[2] - alone[1]).abs().max() > 0.05
    assert torch.equal(again, alone[:1])  # after the `with` block, the model uses a single role again


def test_a_removed_role_leaves_the_other_roles_as_they_were(tmp_path):
    shared = toy.shared_base(spread=0.2)
    shared.save("reward", tmp_path)
    ids, before = torch.tensor([[5, 9, 30, 7]]), sum(p.numel() for p in shared.parameters())
    with torch.no_grad():
        expected = shared.hidden("reward", ids)
        shared.add("one", folder=tmp_path)
        shared.add("two", folder=tmp_path, trainable=True)
        shared.remove("one")
        assert torch.equal(shared.hidden("two", ids), expected)
        assert all(p.requires_grad for p in shared.parameters_of("two"))
        shared.remove("two")
        assert torch.equal(shared.hidden("reward", ids), expected)
    assert sum(p.numel() for p in shared.parameters()) == before


def test_a_base_that_changes_its_logits_in_an_unknown_way_is_rejected():
    model = toy.base()
    forward = model.forward

    def shifted(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = shifted
    with pytest.raises(InputError, match="after the lm head"):
        SharedBase(model)
