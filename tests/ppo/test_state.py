"""A PPO run saved and restored ends as if it had never stopped."""

import json

import pytest
import torch
import toy_ppo as toy


def test_a_restored_run_ends_with_the_same_numbers(tmp_path):
    changes = dict(
        total_episodes=96, kl_controller="adaptive", kl_target=0.5, kl_horizon=100, normalize_values=True,
        sync_ref_model=True, ref_model_sync_steps=1, lr_scheduler_type="cosine", warmup_steps=2, learning_rate=5e-3,
    )  # fmt: skip

    def noisy(completion_ids):  # draws from the global generators, as a user's reward may
        return [s + 0.1 * torch.rand(1).item() for s in toy.low(completion_ids)]

    class Cut(Exception):
        pass

    def cut(metrics, step, total):
        if step == 3:
            raise Cut

    torch.manual_seed(5)
    whole = toy.trainer(reward=noisy, **changes)
    torch.manual_seed(9)
    whole.train()
    first = toy.trainer(reward=noisy, on_update=cut, **changes)
    torch.manual_seed(9)
    with pytest.raises(Cut):
        first.train()
    assert first.update == 3
    first.save(tmp_path)
    second = toy.trainer(toy.shared_base(), reward=noisy, **changes)
    for parameter in second.shared.parameters_of("policy") + second.shared.parameters_of("reference"):
        parameter.data += 1.0  # all of it comes from the folder
    torch.manual_seed(1234)
    second.restore(tmp_path)
    second.train()
    roles = ["policy", "critic", "reference"]
    assert torch.equal(toy.weights(whole, roles), toy.weights(second, roles))
    timeless = [
        [{k: v for k, v in m.items() if not toy.MEASURED.search(k)} for m in t.history]
        for t in (whole, second)
    ]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 6
    assert (
        not list(tmp_path.rglob("*.pkl"))
        and json.loads((tmp_path / "ppo_state.json").read_text())["update"] == 3
    )


def test_kl_controller_counts_nats_a_completion_and_is_in_the_checkpoint(tmp_path):
    changes = dict(
        kl_controller="adaptive", kl_target=0.1, kl_horizon=100, kl_coef=0.1, check_reference=False
    )
    trainer = toy.trainer(toy.shared_base(spread=0.2), **changes)
    episodes = toy.first_episodes(toy.trainer(toy.shared_base(spread=0.2), **changes))
    metrics = trainer.run_update()
    kl = (episodes.old_logprobs - episodes.ref_logprobs).sum(-1).mean().item()
    # a mean over tokens would be below
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-4) and kl > 1
    assert metrics["objective/kl_coef"] == 0.1 and trainer.kl_coef == pytest.approx(
        0.1 * (1 + 0.2 * 16 / 100)
    )
    trainer.save(tmp_path)
    again = toy.trainer(**changes)
    again.restore(tmp_path)
    assert again.kl_coef == trainer.kl_coef
    below = toy.trainer(toy.shared_base(spread=0.2), **{**changes, "kl_target": 1000.0})
    below.run_update()
    assert below.kl_coef < 0.1
