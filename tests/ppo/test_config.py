"""PPOConfig: what it refuses, and that settings of TRL's PPOConfig come through."""

import math

import pytest

from pipeline.ppo.config import PPOConfig
from pipeline.ppo.settings import SettingError


@pytest.mark.parametrize(
    ("key", "value", "expected", "more"),
    [
        ("batch_size", 0, "above 0", {}),
        ("batch_size", "16", "a whole number", {}),
        ("temperature", 0.0, "above 0", {}),
        ("lam", 1.5, "between 0 and 1", {}),
        ("kl_coef", math.nan, "a number", {}),
        ("bf16", 1, "true or false", {}),
        ("kl_estimator", "k4", "'k1', 'k2', 'k3' or 'abs'", {}),
        (
            "advantage_estimator",
            "group",
            "gae, rloo, grpo, remax, reinforce_plus_plus or python:MODULE:FUNCTION",
            {},
        ),
        ("num_generations", 1, "2 or more", dict(advantage_estimator="rloo")),
        ("batch_size", 10, "multiple of num_generations", dict(num_generations=4)),
        ("kl_estimator", "k1", "kl_in: loss", dict(kl_in="loss")),
        ("min_new_tokens", 60, "less than response_length", {}),
        ("dual_clip", 0.5, "above 1", {}),
        ("num_mini_batches", 100, "at most batch_size", {}),
        ("critic_warmup_steps", 2, "without a critic", dict(advantage_estimator="reinforce_plus_plus")),
        ("importance_sampling_level", "sequence", "'token' with advantage_estimator gae", {}),
        ("loss_aggregation", "mean", "'token', 'sequence', 'constant' or null", {}),
        ("bootstrap_truncated", True, "only one of", dict(missing_eos_penalty=1.0)),
    ],
)
def test_a_wrong_setting_names_key_value_and_what_is_expected(key, value, expected, more):
    with pytest.raises(SettingError) as caught:
        PPOConfig(**{key: value, **more})
    assert caught.value.key == key
    assert f"found {value!r}, expected" in caught.value.message and expected in caught.value.message


def test_settings_of_trl_come_through():
    trl = dict(
        num_ppo_epochs=4, num_mini_batches=1, kl_coef=0.05, kl_estimator="k3", cliprange=0.2, vf_coef=0.1, cliprange_value=0.2,
        gamma=1, lam=0.95, whiten_rewards=False, total_episodes=10000, response_length=53, temperature=0.7, missing_eos_penalty=1.0,
        local_rollout_forward_batch_size=64, learning_rate=3e-6, seed=1, bf16=False, gradient_checkpointing=True,
    )  # fmt: skip
    assert vars(PPOConfig(**trl)).items() >= trl.items()
    assert (
        PPOConfig(**trl).total_updates(5) == 157
        and PPOConfig(batch_size=8, num_train_epochs=2).total_updates(10) == 3
    )
