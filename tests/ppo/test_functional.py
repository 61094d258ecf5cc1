"""Compares functional.py with numbers computed by hand, and losses with plain loops on random ragged batches.

pipeline/ppo/selfcheck and estimators.py define token rewards, whitening and GAE. The self-checks of every run and
test_estimators.py test PPO against these definitions.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ppo import functional as F

NAN = math.nan
CASES = settings(max_examples=60, deadline=None)
shapes = dict(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    time=st.integers(1, 7),
    density=st.sampled_from([0.0, 0.4, 0.8, 1.0]),
)


def t(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def ragged(seed, rows, time, density, count, scale=1.0):
    """Returns a mask with gaps and empty rows, and `count` arrays with NaN and inf where the mask is 0."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, time)) < density
    arrays = [rng.normal(size=(rows, time)) * scale for _ in range(count)]
    for i, x in enumerate(arrays):
        x[~mask] = (NAN, math.inf, -math.inf)[i % 3]
    return mask, arrays


def mean_of(mask):
    """Returns `weights` and `actions` for a loss that averages over the actions of a mask."""
    actions = max(float(mask.sum()), 1.0)
    return F.loss_weights(mask, "token", actions, len(mask), 1), actions


def tensors(arrays):
    return [torch.tensor(x, dtype=torch.float32) for x in arrays]


# --------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("name", "above", "below"),
    [
        ("k1", 0.5, -0.5),
        ("k2", 0.125, 0.125),
        ("k3", math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5),
        ("abs", 0.5, 0.5),
    ],
)
def test_kl_estimators_by_hand(name, above, below):
    p, q = t([-1.0]), t([-1.5])
    assert F.kl_estimate(p, q, name).item() == pytest.approx(above, rel=1e-6)
    assert F.kl_estimate(q, p, name).item() == pytest.approx(below, rel=1e-6)


K3_FAR = math.expm1(F.LOG_RATIO_LIMIT) - F.LOG_RATIO_LIMIT


@pytest.mark.parametrize(
    ("name", "distance", "value", "gradient"),
    [
        ("k1", 29.0, 29, 1),
        ("k1", -29.0, -29, 1),
        ("abs", -29.0, 29, -1),
        ("k2", -29.0, 29**2 / 2, -29),
        ("k3", 29.0, 28, 1),
        ("k3", -29.0, K3_FAR, 0),
    ],
)
def test_only_what_goes_through_exp_is_clamped_far_from_the_reference(name, distance, value, gradient):
    """A token's KL at a log-ratio of 29 nats is not clamped, so that its gradient pulls the policy back to the reference."""
    policy = torch.tensor([distance], requires_grad=True)
    kl = F.kl_estimate(policy, torch.zeros(1), name)
    assert kl.item() == pytest.approx(value)
    assert torch.autograd.grad(kl.sum(), policy)[0].item() == gradient


def test_the_upper_clip_range_can_differ_from_the_lower():
    new, mask = torch.log(t([1.25, 1.25, 0.7, 0.7])), t([1, 1, 1, 1])
    advantages = t([1.0, -1.0, 1.0, -1.0])
    loss, stats = F.policy_loss(new, torch.zeros(1, 4), advantages, mask, *mean_of(mask), 0.2, 0.1)
    assert loss.item() == pytest.approx((-1.1 + 1.25 - 0.7 + 0.8) / 4)
    assert stats["clipfrac"].item() == 0.5
    higher, _ = F.policy_loss(new, torch.zeros(1, 4), advantages, mask, *mean_of(mask), 0.2, 0.3)
    assert higher.item() == pytest.approx((-1.25 + 1.25 - 0.7 + 0.8) / 4)


def test_a_sequences_ratio_is_the_geometric_mean_of_its_tokens():
    """Checks equations 5 to 7 of GSPO, and GSPO's gradient (equation 10)."""
    new = t([0.3, -0.1, NAN], [0.5, 0.5, 0.5]).requires_grad_()
    old, mask = t([0.0, 0.0, 1.0], [0.0, 0.0, 0.0]), t([1, 1, 0], [1, 1, 1])
    advantages = t([2.0, 2.0, NAN], [3.0, 3.0, 3.0])
    weights = F.loss_weights(mask, "sequence", 5, 2, 3)
    level = dict(importance_sampling_level="sequence")
    loss, stats = F.policy_loss(new, old, advantages, mask, weights, 5, 0.2, **level)
    s = math.exp(0.1)  # the ratio of the second row, exp(0.5), is clipped to 1.2
    assert loss.item() == pytest.approx(-(2 * s + 3 * 1.2) / 2)
    assert stats["clipfrac"].item() == pytest.approx(3 / 5)
    (gradient,) = torch.autograd.grad(loss, new)
    assert gradient.flatten().tolist() == pytest.approx([-2 * s / 2 / 2] * 2 + [0] * 4, abs=1e-6)


# ---------------------------------------------------------------------------- against loops, at random


@CASES
@given(**shapes, scale=st.sampled_from([0.1, 3.0, 1e4]), dual=st.sampled_from([None, 2.0]))
def test_policy_loss_equals_a_loop_and_is_finite_at_any_ratio(seed, rows, time, density, scale, dual):
    mask, (new, old, advantages) = ragged(seed, rows, time, density, 3)
    new = new * scale  # log-ratios up to tens of thousands
    total, sums, actions = 0.0, dict(ratio=0.0, approxkl=0.0, clipfrac=0.0), max(mask.sum(), 1)
    for b, i in zip(*np.nonzero(mask), strict=True):
        log_ratio, a = new[b, i] - old[b, i], advantages[b, i]
        ratio = math.exp(min(max(log_ratio, -20), 20))
        clipped = -a * min(max(ratio, 0.8), 1.2)
        loss = max(-a * ratio, clipped)
        total += min(loss, -dual * a) if dual and a < 0 else loss
        sums["ratio"] += ratio
        sums["approxkl"] += log_ratio**2 / 2
        sums["clipfrac"] += clipped > -a * ratio
    a, b, c = tensors([new, old, advantages])
    a.requires_grad_()
    on = torch.tensor(mask)
    ours, stats = F.policy_loss(a, b, c, on, *mean_of(on), 0.2, dual_clip=dual)
    assert ours.item() == pytest.approx(total / actions, rel=2e-3, abs=1e-4)
    for name, value in sums.items():
        assert stats[name].item() == pytest.approx(value / actions, rel=2e-3, abs=1e-4)
    ours.backward()
    assert torch.isfinite(a.grad).all() and (a.grad[~torch.tensor(mask)] == 0).all()


@CASES
@given(**shapes, clip=st.sampled_from([0.2, None]))
def test_value_loss_equals_a_loop(seed, rows, time, density, clip):
    mask, (values, old, returns) = ragged(seed, rows, time, density, 3)
    total, clipped = 0.0, 0
    for b, i in zip(*np.nonzero(mask), strict=True):
        bounded = values[b, i] if clip is None else np.clip(values[b, i], old[b, i] - clip, old[b, i] + clip)
        errors = (values[b, i] - returns[b, i]) ** 2, (bounded - returns[b, i]) ** 2
        total += 0.5 * max(errors)
        clipped += errors[1] > errors[0]
    a, b, c = tensors([values, old, returns])
    a.requires_grad_()
    ours, stats = F.value_loss(a, b, c, torch.tensor(mask), max(mask.sum(), 1), clip)
    assert stats["clipfrac"].item() == pytest.approx(clipped / max(mask.sum(), 1))
    assert ours.item() == pytest.approx(total / max(mask.sum(), 1), rel=1e-4, abs=1e-6)
    ours.backward()
    assert torch.isfinite(a.grad).all() and (a.grad[~torch.tensor(mask)] == 0).all()
