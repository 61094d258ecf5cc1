"""Tests real runs with rollout workers: results depend neither on the number of workers nor on their failures."""

import pytest
from dying import (
    a_rollout_worker_killed_and_one_stopped,
    killed,
    rollout_workers_killed,
)
from resumed import assert_equal, touched
from running import stage

PPO = [
    "policy=base", "reward=python:pipeline.demo:gold", "judge=null", "data.eval=null", "mlflow.registered_model=null",
    "trainer.total_episodes=40", "trainer.batch_size=8", "trainer.response_length=8", "trainer.local_rollout_forward_batch_size=4",
    "trainer.save_steps=2", "trainer.normalize_rewards=false",
]  # fmt: skip
AHEAD = [*PPO, "rollout.staleness=1"]


def run(storage, name, *overrides):
    return stage("ppo", storage, name, *overrides)


@pytest.fixture(scope="module")
def alone(embedded_ray, storage):
    """Runs a job without rollout workers."""
    return run(storage, "rollout-none", *PPO)


@pytest.fixture(scope="module")
def ahead(embedded_ray, storage):
    """Runs a job whose only rollout worker samples one update ahead of the trainer, without failures."""
    return run(storage, "rollout-ahead", *AHEAD, "rollout.num_workers=1")


# tests/ppo/test_rollouts.py compares runs with and without a rollout worker in less time, with tiny models.
@pytest.mark.slow
def test_one_rollout_worker_gives_the_same_bits_as_none(alone, storage, capfd):
    result = run(storage, "rollout-one", *PPO, "rollout.num_workers=1")
    assert_equal(storage, alone, result)
    assert result["metrics"]["rollout/workers"] == 1 and result["metrics"]["rollout/wait_seconds"] > 0
    assert "starting rollout workers: 1" in capfd.readouterr().out


def test_a_dying_and_a_hanging_worker_change_no_bit(ahead, storage, monkeypatch, capfd):
    happens = a_rollout_worker_killed_and_one_stopped
    touched(monkeypatch, "ppo", 2, storage / "rollout-hurt-once", happens)
    result = run(storage, "rollout-hurt", *AHEAD, "rollout.num_workers=2", "rollout.chunk_timeout_s=3")
    assert_equal(storage, ahead, result)
    # The KL is nonzero, because the previous policy version sampled the completions.
    assert ahead["metrics"]["rollout/sampler_kl"] != 0
    said = capfd.readouterr().out
    assert "has not answered for 3 s" in said and said.count("another worker takes its place") >= 2
    assert result["metrics"]["rollout/sampler_kl"] != 0


@pytest.mark.slow
def test_a_killed_trainer_requests_the_chunks_in_flight_again(ahead, storage, monkeypatch):
    touched(monkeypatch, "ppo", 3, storage / "rollout-trainer-once", killed)
    result = run(storage, "rollout-trainer", *AHEAD, "rollout.num_workers=2", "run.max_failures=1")
    assert_equal(storage, ahead, result)


@pytest.mark.slow
def test_the_trainer_samples_itself_after_all_rollout_workers_have_died(ahead, storage, monkeypatch, capfd):
    touched(monkeypatch, "ppo", 2, storage / "rollout-nobody-once", rollout_workers_killed)
    result = run(
        storage, "rollout-nobody", *AHEAD, "rollout.num_workers=1", "rollout.worker_wait_timeout_s=0"
    )
    assert_equal(storage, ahead, result)
    assert "no rollout worker is available: this trainer samples chunk" in capfd.readouterr().out


@pytest.mark.slow
def test_two_trainers_and_two_rollout_workers(embedded_ray, storage):
    two = [
        "scaling.num_workers=2",
        "scaling.resources_per_worker={CPU: 1}",
        "trainer.local_rollout_forward_batch_size=2",
    ]
    expected = run(storage, "rollout-two", *PPO, *two)
    assert_equal(storage, expected, run(storage, "rollout-two-two", *PPO, *two, "rollout.num_workers=1"))


# tests/test_bad_input.py tests this message for runs without rollout workers.
@pytest.mark.slow
def test_the_error_of_a_reward_in_a_rollout_worker_names_the_function(embedded_ray, storage, capfd):
    broken = [*PPO, "reward=python:bad_rewards:raises", "rollout.num_workers=1"]
    stage("ppo", storage, "rollout-bad-reward", *broken, status=1)
    said = capfd.readouterr()
    assert "reward 'reward' (bad_rewards:raises) raised" in said.out + said.err
