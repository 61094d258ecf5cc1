"""A PPO run saved and restored ends as if it had never stopped."""

import json
import random

import numpy as np
import pytest
import torch
import toy_ppo as toy

from pipeline.ppo.rng import rng_state, set_rng_state


@pytest.fixture
def two_threads():
    """No sum may depend on which of them comes first."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("critic", "dtype"),
    [
        ("adapter", "float32"),
        ("head", "float32"),
        pytest.param("head", "bfloat16", marks=pytest.mark.slow),  # slow on a CPU without bf16
    ],
)
def test_a_restored_run_ends_with_the_same_numbers(critic, dtype, tmp_path, two_threads):
    changes = dict(
        critic=critic,
        num_generations=4 if critic == "head" else 1,
        bf16=dtype == "bfloat16",
        total_episodes=96, kl_controller="adaptive", kl_target=0.5, kl_horizon=100, normalize_values=True,
        sync_ref_model=True, ref_model_sync_steps=1, lr_scheduler_type="cosine", warmup_steps=2, learning_rate=5e-3,
        critic_warmup_steps=1,
    )  # fmt: skip

    def trainer(noise):
        made = toy.trainer(toy.shared_base(critic=critic, dtype=dtype), reward=toy.noisy, **changes)
        torch.manual_seed(noise)
        return made

    whole = trainer(9)
    whole.train()
    first = trainer(9)
    first.on_update = lambda metrics, update, total: update == 3
    first.train()
    first.save(tmp_path)
    second = trainer(1234)
    for parameter in [p for r in ("policy", "critic", "reference") for p in second.shared.parameters_of(r)]:
        parameter.data += 1.0  # all of it comes from the folder
    second.restore(tmp_path)
    second.train()
    roles = ["policy", "critic", "reference"]
    assert torch.equal(toy.weights(whole, roles), toy.weights(second, roles))
    assert toy.unmeasured(whole.history) == toy.unmeasured(second.history) and len(whole.history) == 6
    assert json.loads((tmp_path / "ppo_state.json").read_text())["update"] == 3


def test_kl_controller_counts_nats_a_completion():
    changes = dict(kl_controller="adaptive", kl_horizon=100, kl_coef=0.1, check_reference=False)
    above = toy.trainer(toy.shared_base(spread=0.2), kl_target=0.1, **changes)
    episodes = toy.first_episodes(toy.trainer(toy.shared_base(spread=0.2), **changes))
    metrics = above.run_update()
    kl = (episodes.old_logprobs - episodes.ref_logprobs).sum(-1).mean().item()
    # a mean over tokens would be below
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-4) and kl > 1
    assert metrics["objective/kl_coef"] == 0.1
    assert above.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 16 / 100))
    below = toy.trainer(toy.shared_base(spread=0.2), kl_target=1000.0, **changes)
    below.run_update()
    assert below.kl_coef < 0.1


@pytest.mark.parametrize(("gpu_before", "gpu_now"), [(True, True), (True, False), (False, True)])
def test_random_states_continue_with_a_gpu_or_without_one(gpu_before, gpu_now, tmp_path, monkeypatch):
    """A process saves and restores the generator of its own GPU alone; the others are other workers'."""
    restored = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_before)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.arange(3))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: restored.append(state.tolist()))
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = random.random(), np.random.randn(), torch.rand(3).tolist()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu_now)
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (random.random(), np.random.randn(), torch.rand(3).tolist()) == expected
    assert restored == ([[0, 1, 2]] if gpu_before and gpu_now else [])
