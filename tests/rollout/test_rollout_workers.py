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
def ahead(embedded_ray, storage):
    """Runs a job whose only rollout worker samples one update ahead of the trainer, without failures."""
    return run(storage, "rollout-ahead", *AHEAD, "rollout.num_workers=1")


def test_the_trainer_samples_itself_after_its_rollout_worker_has_died(
    embedded_ray, storage, monkeypatch, capfd
):
    """Compares the run with a run without rollout workers."""
    alone = run(storage, "rollout-none", *PPO)
    touched(monkeypatch, "ppo", 2, storage / "rollout-died-once", rollout_workers_killed)
    settings = [*PPO, "rollout.num_workers=1", "rollout.worker_wait_timeout_s=0"]
    result = run(storage, "rollout-died", *settings)
    assert_equal(storage, alone, result)
    said = capfd.readouterr().out
    assert "starting rollout workers: 1" in said
    assert "no rollout worker is available: this trainer samples chunk" in said


@pytest.mark.slow
def test_a_dying_and_a_hanging_worker_change_no_bit(ahead, storage, monkeypatch, capfd):
    happens = a_rollout_worker_killed_and_one_stopped
    touched(monkeypatch, "ppo", 2, storage / "rollout-hurt-once", happens)
    result = run(storage, "rollout-hurt", *AHEAD, "rollout.num_workers=2", "rollout.chunk_timeout_s=3")
    assert_equal(storage, ahead, result)
    # The KL is nonzero, because the previous policy version sampled the completions.
    assert ahead["metrics"]["rollout/sampler_kl"] != 0
    said = capfd.readouterr().out
    assert "has not answered for 3 s" in said and said.count("another worker takes its place") >= 2


@pytest.mark.slow
def test_a_killed_trainer_requests_the_chunks_in_flight_again(ahead, storage, monkeypatch):
    touched(monkeypatch, "ppo", 3, storage / "rollout-trainer-once", killed)
    result = run(storage, "rollout-trainer", *AHEAD, "rollout.num_workers=2", "run.max_failures=1")
    assert_equal(storage, ahead, result)


@pytest.mark.slow
def test_two_trainers_and_two_rollout_workers(embedded_ray, storage):
    two = [
        "scaling.num_workers=2",
        "scaling.resources_per_worker={CPU: 1}",
        "trainer.local_rollout_forward_batch_size=2",
    ]
    expected = run(storage, "rollout-two", *PPO, *two)
    assert_equal(storage, expected, run(storage, "rollout-two-two", *PPO, *two, "rollout.num_workers=1"))
