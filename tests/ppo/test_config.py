"""Tests the job sections `trainer` and `rollout` of PPO: invalid values, and defaults that depend on other keys."""

import pytest

from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.job.rollout import RolloutConfig
from pipeline.job.rules import find_warnings
from pipeline.ppo.config import PPOConfig

pytestmark = pytest.mark.usefixtures("in_root")
WRONG = [  # key, value, expected value, other settings
    ("trainer.batch_size", "10", "a multiple of num_generations", ["trainer.num_generations=4"]),
    ("trainer.temperature", "0", "between 0.01 and 100", []),
    ("trainer.kl_estimator", "k1", "'k2' or 'k3' with kl_in: loss", ["trainer.kl_in=loss"]),
    (
        "trainer.advantage_estimator",
        "gea",
        "gae, rloo, grpo, remax, reinforce_plus_plus, none or python:",
        [],
    ),
    ("trainer.num_generations", "1", "2 or more", ["trainer.advantage_estimator=rloo"]),
    ("trainer.min_new_tokens", "1000", "less than response_length", []),
    ("trainer.num_mini_batches", "100", "at most batch_size", []),
    ("trainer.critic_warmup_steps", "2", "off if there is no critic", ["trainer.advantage_estimator=remax"]),
    ("trainer.critic_learning_rate", "0", "above 1e-7", ["trainer.lr_scheduler_type=polynomial"]),
    ("trainer.critic_learning_rate", "0", "above 0 if trainer.critic is head", ["trainer.critic=head"]),
    ("trainer.vf_coef", "0", "above 0 if trainer.critic is head", ["trainer.critic=head"]),
    ("trainer.importance_sampling_level", "sequence", "'token' with advantage_estimator gae", []),
    ("trainer.bootstrap_truncated", "true", "only one of", ["trainer.missing_eos_penalty=1"]),
    ("rollout.staleness", "1", "0 without rollout workers", []),
    ("rollout.vllm_kwargs", "{model: x}", "no arguments that the sampler sets", ["rollout.engine=vllm"]),
    ("rollout.vllm_kwargs", "{seed: 1}", "null without rollout.engine=vllm", []),
    ("rollout.tensor_parallel_size", "2", "1 unless rollout workers", []),
]


@pytest.mark.parametrize(("key", "value", "expected", "others"), WRONG)
def test_a_wrong_setting_names_key_value_and_what_is_expected(key, value, expected, others):
    with pytest.raises(InputError) as caught:
        load_job("jobs/demo/ppo.yaml", [*others, f"{key}={value}"])
    assert caught.value.key == key
    assert caught.value.message.startswith("found") and expected in caught.value.message


def test_the_learning_rate_of_an_absent_critic_is_not_checked():
    alone = dict(advantage_estimator="remax", lr_scheduler_type="polynomial", critic="head")
    assert PPOConfig(**alone, critic_learning_rate=0.0, vf_coef=0.0).critic_learning_rate == 0


def test_the_last_update_is_a_full_one():
    assert PPOConfig(total_episodes=10000).total_updates(5) == 157
    assert PPOConfig(batch_size=8, num_train_epochs=2).total_updates(10) == 3


@pytest.mark.parametrize(
    ("rollout", "corrects"),
    [
        (dict(num_workers=3, staleness=1), None),
        (dict(engine="vllm"), "token"),
        (dict(engine="vllm", correction="none"), None),
        (dict(correction="sequence"), "sequence"),
    ],
)
def test_the_default_correction(rollout, corrects):
    assert RolloutConfig(**rollout).corrects == corrects


IDLE = "2 of 3 workers will be idle, because completions are sampled in chunks of 64"


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        (["rollout.num_workers=3"], True),
        (["rollout.num_workers=2", "rollout.staleness=2"], False),
        (["rollout.num_workers=3", "trainer.local_rollout_forward_batch_size=21"], False),
    ],
)
def test_a_warning_names_rollout_workers_that_would_be_idle(overrides, idle):
    job = load_job("jobs/demo/ppo.yaml", overrides, "ppo")
    assert (IDLE in "\n".join(find_warnings(job))) == idle
