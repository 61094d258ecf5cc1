"""Tests rollout workers in real runs: results do not depend on their number or their failures."""

from pathlib import Path

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
    """Runs a job whose trainer samples itself."""
    return run(storage, "rollout-none", *PPO)


@pytest.fixture(scope="module")
def ahead(embedded_ray, storage):
    """Runs a job one update ahead, with one undisturbed rollout worker."""
    return run(storage, "rollout-ahead", *AHEAD, "rollout.num_workers=1")


# tests/ppo/test_rollouts.py tests this on a toy.
@pytest.mark.slow
def test_a_rollout_worker_gives_the_bits_of_none(alone, storage, capfd):
    result = run(storage, "rollout-one", *PPO, "rollout.num_workers=1")
    assert_equal(storage, alone, result)
    assert result["metrics"]["rollout/bytes"] > 0 and result["metrics"]["rollout/wait_seconds"] > 0
    assert "starting rollout workers: 1" in capfd.readouterr().out


def test_one_update_ahead_two_workers_of_which_one_dies_and_one_hangs_change_no_bit(
    ahead, storage, monkeypatch, capfd
):
    happens = a_rollout_worker_killed_and_one_stopped
    touched(monkeypatch, "ppo", 2, storage / "rollout-hurt-once", happens)
    result = run(storage, "rollout-hurt", *AHEAD, "rollout.num_workers=2", "rollout.chunk_timeout_s=3")
    assert_equal(storage, ahead, result)
    assert ahead["metrics"]["rollout/sampler_kl"] != 0  # the previous version sampled
    said = capfd.readouterr().out
    assert "has not answered for 3 s" in said and said.count("another worker takes its place") >= 2
    assert result["metrics"]["rollout/sampler_kl"] != 0


@pytest.mark.slow
def test_one_update_ahead_is_another_run(ahead, alone):
    one, other = (Path(r["adapter"], "adapter_model.safetensors").read_bytes() for r in (ahead, alone))
    assert one != other


@pytest.mark.slow
def test_a_trainer_that_is_killed_asks_again_for_what_was_in_flight(ahead, storage, monkeypatch):
    touched(monkeypatch, "ppo", 3, storage / "rollout-trainer-once", killed)
    result = run(storage, "rollout-trainer", *AHEAD, "rollout.num_workers=2", "run.max_failures=1")
    assert_equal(storage, ahead, result)


@pytest.mark.slow
def test_without_rollout_workers_the_trainer_samples_itself(ahead, storage, monkeypatch, capfd):
    touched(monkeypatch, "ppo", 2, storage / "rollout-nobody-once", rollout_workers_killed)
    result = run(
        storage, "rollout-nobody", *AHEAD, "rollout.num_workers=1", "rollout.worker_wait_timeout_s=0"
    )
    assert_equal(storage, ahead, result)
    assert "no rollout worker is there: this trainer samples chunk" in capfd.readouterr().out


@pytest.mark.slow
def test_two_trainers_and_two_rollout_workers(embedded_ray, storage):
    two = [
        "scaling.num_workers=2",
        "scaling.resources_per_worker={CPU: 1}",
        "trainer.local_rollout_forward_batch_size=2",
    ]
    expected = run(storage, "rollout-two", *PPO, *two)
    assert_equal(storage, expected, run(storage, "rollout-two-two", *PPO, *two, "rollout.num_workers=1"))


# tests/test_bad_input.py tests the trainer's message itself.
@pytest.mark.slow
def test_a_reward_that_fails_in_a_rollout_worker_says_what_it_says_in_the_trainer(
    embedded_ray, storage, capfd
):
    broken = [*PPO, "reward=python:bad_rewards:raises", "rollout.num_workers=1"]
    stage("ppo", storage, "rollout-bad-reward", *broken, status=1)
    said = capfd.readouterr()
    assert "reward 'reward' (bad_rewards:raises) raised" in said.out + said.err
