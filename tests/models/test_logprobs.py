"""Tests the values and gradients of log-probs and entropies that are computed in chunks."""

import pytest
import torch
import toy_ppo as toy


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_logprobs_and_entropies_equal_those_of_the_models_logits(kind):
    shared = toy.shared_base(kind, spread=0.2)
    ids, starts, counts, mask = toy.batch()
    ours, entropy = shared.logprobs("policy", ids, starts, mask, temperature=0.7, entropy=True)
    with torch.no_grad(), shared.use("policy"):
        expected = toy.plain_logprobs(shared.base, ids, starts, counts, 0.7)
        first = (shared.base(input_ids=ids[:1, :3]).logits[0, -1].float() / 0.7).log_softmax(-1)
    for row, values, n in zip(ours, expected, counts, strict=True):
        assert row[:n].tolist() == pytest.approx(values, abs=1e-5)
        assert (row[n:] == 0).all()
    assert entropy[0, 0].item() == pytest.approx(-(first.exp() * first).sum().item(), rel=1e-5)
    bare, _ = shared.logprobs(None, ids, starts, mask)
    with torch.no_grad(), shared.use(None):
        assert bare[0, :6].tolist() == pytest.approx(
            toy.plain_logprobs(shared.base, ids, starts, counts)[0], abs=1e-5
        )
    assert (bare - shared.logprobs("policy", ids, starts, mask)[0]).abs().max() > 0.1


def test_gradients_of_chunks_equal_the_gradients_of_all_logits(monkeypatch):
    # Splits the logits into five chunks.
    monkeypatch.setattr("pipeline.models.logprobs.LOGIT_CHUNK", {"cpu": 3 * toy.VOCAB})
    shared = toy.shared_base(spread=0.1)
    ids, starts, _, mask = toy.batch()
    weight, of_entropy = torch.randn(mask.shape), torch.randn(mask.shape)
    parameters = shared.parameters_of("policy")
    logprobs, h = shared.logprobs("policy", ids, starts, mask, 0.8, entropy=True)
    ours = torch.autograd.grad((logprobs * weight).sum() + (h * of_entropy).sum(), parameters)
    with shared.use("policy"):
        full = (shared.base(input_ids=ids).logits.float() / 0.8).log_softmax(-1)
    rows, steps = mask.nonzero(as_tuple=True)
    at = full[rows, starts[rows] + steps - 1]
    loss = (
        at.gather(-1, ids[rows, starts[rows] + steps].unsqueeze(-1)).squeeze(-1) * weight[rows, steps]
    ).sum()
    loss = loss - ((at.exp() * at).sum(-1) * of_entropy[rows, steps]).sum()
    expected = torch.autograd.grad(loss, parameters)
    ours, expected = (torch.cat([g.flatten() for g in side]) for side in (ours, expected))
    assert (ours - expected).norm() / expected.norm() < 1e-6


def test_barred_tokens_have_no_probability_in_the_first_steps_and_entropies_are_finite():
    shared = toy.shared_base(spread=0.1)
    ids, starts, _, mask = toy.batch()
    barring = dict(barred=(2, 3), barred_steps=2)
    free = shared.logprobs("policy", ids, starts, mask)[0]
    barred, h = shared.logprobs("policy", ids, starts, mask, **barring, entropy=True)
    assert (barred[1, :2] > free[1, :2]).all() and torch.equal(barred[:, 2:], free[:, 2:])
    assert torch.equal(barred, shared.logprobs("policy", ids, starts, mask, **barring)[0])
    h.sum().backward()
    assert h[mask].gt(0).all() and all(p.grad.isfinite().all() for p in shared.parameters_of("policy"))
    ids[0, 3] = 2
    assert shared.logprobs("policy", ids, starts, mask, **barring)[0][0, 0] == float("-inf")
