"""Tests that a resumed PPO run ends like an uninterrupted run, and that each AdamW of `trainer.optim` equals torch's."""

import json
import random

import numpy as np
import pytest
import torch
import toy_ppo as toy

from pipeline.ppo.config import PPOConfig
from pipeline.ppo.optimizer import make_adamw
from pipeline.system.rng import rng_state, set_rng_state


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("critic", "dtype", "threads"),
    [
        ("adapter", "float32", 1),
        # tests/run/test_resume.py also kills and resumes a job with a head
        pytest.param("head", "float32", 2, marks=pytest.mark.slow),
        pytest.param("head", "bfloat16", 2, marks=pytest.mark.slow),  # slow on CPUs without bf16 instructions
    ],
    indirect=["threads"],
)
def test_a_restored_run_ends_with_the_same_numbers(critic, dtype, threads, tmp_path):
    """Uses two threads, because sums must not depend on which thread finishes first."""
    changes = dict(
        critic=critic,
        num_generations=4 if critic == "head" else 1,
        bf16=dtype == "bfloat16",
        total_episodes=48, kl_controller="adaptive", kl_target=0.5, kl_horizon=100, normalize_values=True,
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
    first.train(lambda metrics, update, total: update == 1)
    first.save(tmp_path)
    second = trainer(1234)
    for parameter in [p for r in ("policy", "critic", "reference") for p in second.shared.parameters_of(r)]:
        # so that equal weights at the end prove that `restore` read them from the checkpoint
        parameter.data += 1.0
    second.restore(tmp_path)
    second.train()
    roles = ["policy", "critic", "reference"]
    assert torch.equal(toy.weights(whole, roles), toy.weights(second, roles))
    assert toy.unmeasured(whole.history) == toy.unmeasured(second.history) and len(whole.history) == 3
    assert json.loads((tmp_path / "ppo_state.json").read_text())["update"] == 1


def test_kl_controller_counts_nats_a_completion():
    changes = dict(kl_controller="adaptive", kl_horizon=100, kl_coef=0.1, check_reference=False)
    above = toy.trainer(toy.shared_base(spread=0.2), kl_target=0.1, **changes)
    episodes = toy.first_episodes(toy.trainer(toy.shared_base(spread=0.2), **changes))
    metrics = above.run_update()
    kl = (episodes.old_logprobs - episodes.ref_logprobs).sum(-1).mean().item()
    # the KL is a sum over tokens; the mean over tokens would be below kl_target
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-4) and kl > 1
    assert metrics["objective/kl_coef"] == 0.1
    assert above.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 16 / 100))
    below = toy.trainer(toy.shared_base(spread=0.2), kl_target=1000.0, **changes)
    below.run_update()
    assert below.kl_coef < 0.1


@pytest.mark.parametrize(("gpu_before", "gpu_now"), [(True, True), (True, False), (False, True)])
def test_random_states_continue_with_a_gpu_or_without_one(gpu_before, gpu_now, tmp_path, monkeypatch):
    """A process saves and restores only the generator of its own GPU, because other GPUs belong to other workers."""
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


def wide():
    """Returns a base whose adapter tensors have at least 4096 elements, because bitsandbytes keeps smaller moments in fp32."""
    shared = toy.SharedBase(toy.base())
    shared.add("policy", lora={**toy.LORA, "r": 128}, trainable=True)
    return shared


def trained(kind, updates=2):
    trainer = toy.trainer(
        wide(), optim=kind, advantage_estimator="rloo", num_generations=2, check_reference=False
    )
    for _ in range(updates):
        trainer.run_update()
    return trainer


@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw_32bit"])
def test_moments_in_bytes_and_in_paged_memory_are_restored(kind, tmp_path):
    trainer = trained(kind)
    states = [state for state in trainer.optimizer.state.values() if state]
    eight = any(
        value.dtype == torch.uint8 for state in states for value in state.values() if torch.is_tensor(value)
    )
    assert eight == ("8bit" in kind)
    trainer.save(tmp_path)
    trainer.run_update()
    again = trained(kind, updates=0)
    again.restore(tmp_path)
    again.run_update()
    assert torch.equal(toy.weights(again, ["policy"]), toy.weights(trainer, ["policy"]))


@pytest.mark.parametrize("kind", ["adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit"])
def test_steps_of_every_kind_equal_torchs(kind):
    moved = []
    for name in ("adamw_torch", kind):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(64, 128))
        args = PPOConfig(optim=name, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3, weight_decay=0.1)
        before, optimizer = parameter.detach().clone(), make_adamw(args, [([parameter], 0.01)])
        for _ in range(3):
            parameter.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
            optimizer.step()
        moved.append(parameter.detach() - before)
    assert (moved[1] - moved[0]).norm() < 0.05 * moved[0].norm()
