"""Tests full runs of PPOTrainer with tiny models: all options learn, and the number of workers changes no result."""

import math

import numpy as np
import pytest
import torch
import toy_ppo as toy
from forked import in_processes

from pipeline.writing import memory

GROUP = dict(num_generations=4)
LOSS_KL = dict(kl_in="loss", kl_estimator="k3")
# Together, these runs use every option that changes what PPO learns from. `make test` runs the first two of these runs.
VARIANTS = {
    "gae": dict(whiten_rewards=True, normalize_values=True, bootstrap_truncated=True, gamma=0.99, lam=1.0),
    "head": dict(critic="head", kl_controller="adaptive", kl_target=0.5, kl_horizon=100, **GROUP),
    "rloo": dict(advantage_estimator="rloo", kl_estimator="k2", missing_eos_penalty=0.1, reward_clip=1.0, **GROUP),
    "dapo": dict(
        advantage_estimator="grpo", loss_aggregation="token", cliprange_high=0.28, mask_truncated_completions=True, **GROUP
    ),
    "dr_grpo": dict(
        advantage_estimator="grpo", scale_rewards=False, loss_aggregation="constant", learning_rate=3e-2, **LOSS_KL, **GROUP
    ),
    "gspo": dict(
        advantage_estimator="grpo", importance_sampling_level="sequence", cliprange=0.05, cliprange_high=0.08, **GROUP
    ),
    "remax": dict(advantage_estimator="remax", kl_estimator="abs"),
    "reinforce_plus_plus": dict(
        advantage_estimator="reinforce_plus_plus", sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.1
    ),
    "careful": dict(dual_clip=3.0, entropy_coef=0.01, target_kl=0.05, critic_warmup_steps=2, cliprange_value=None),
    "low_precision": dict(bf16=True, gradient_checkpointing=True, max_tokens_per_micro_batch=100),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i > 1)) for i, name in enumerate(VARIANTS)]
)
def test_every_option_learns(name):
    settings = dict(
        total_episodes=32 * 14, batch_size=32, learning_rate=1.5e-2, per_device_train_batch_size=32
    )
    trainer = toy.trainer(**{**settings, **VARIANTS[name]})
    prompts = trainer.prompts.rows
    greedy = toy.greedy_score(trainer, prompts)
    history = trainer.train()
    means = [metrics["rewards/low/mean"] for metrics in history]
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1 and len(history) == 14
    assert toy.greedy_score(trainer, prompts) > greedy
    assert all(math.isfinite(value) for metrics in history for value in metrics.values())
    assert trainer.skipped_steps == 0


def test_evaluations_are_logged_and_do_not_change_training():
    """The trainer evaluates every `eval_steps` updates, for any `logging_steps`, but not after the last update."""
    evaluated_at, rewards, learned = [], {}, []

    def evaluate():
        evaluated_at.append(trainer.update)
        return {"eval_reward": 10.0 * trainer.update + 0 * torch.rand(1).item()}  # draws a random number

    def on_update(metrics, step, total):
        rewards[step] = metrics.get("eval_reward")

    for function in (None, evaluate):
        trainer = toy.trainer(reward=toy.noisy, total_episodes=16 * 6, eval_steps=2, logging_steps=3)
        torch.manual_seed(9)
        history = trainer.train(on_update, function)
        learned.append(toy.weights(trainer))
    assert torch.equal(*learned)
    assert evaluated_at == [2, 4]
    assert rewards == {1: None, 2: 20.0, 3: None, 4: 40.0, 5: None, 6: None}
    assert [m["episode"] / 16 for m in history] == [2, 3, 4, 6]
    assert [m["eval_reward"] for m in history if "eval_reward" in m] == [20.0, 40.0]
    assert history[0]["time/evaluate"] > 0


def test_target_kl_ends_the_epochs_of_an_update():
    free = toy.trainer(learning_rate=0.05, num_ppo_epochs=6).run_update()
    stopped = toy.trainer(learning_rate=0.05, num_ppo_epochs=6, target_kl=1e-3).run_update()
    assert free["policy/steps"] == 12 and 1 <= stopped["policy/steps"] < 6


ONE_STEP = dict(**LOSS_KL, num_ppo_epochs=1, num_mini_batches=1)
SHARED_RUNS = [
    dict(normalize_values=True, whiten_rewards=True, critic_warmup_steps=1, bootstrap_truncated=True),
    # With a small epsilon, Adam would amplify the rounding error of gradients near 0.
    dict(
        advantage_estimator="grpo", num_generations=2, mask_truncated_completions=True, entropy_coef=0.01, adam_epsilon=1e-4,
        importance_sampling_level="sequence", cliprange=0.01, cliprange_high=0.02, **LOSS_KL,
    ),
    dict(advantage_estimator="grpo", num_generations=4, batch_size=28, total_episodes=28 * 3, **ONE_STEP),
    dict(critic="head", num_generations=4, batch_size=28, total_episodes=28 * 3, num_mini_batches=1),
]  # fmt: skip


def shared_run(number, spread=0.0):
    """Runs one of SHARED_RUNS. Returns the trainer, its weights after each update, and the tokens of each minibatch."""
    changes = {"total_episodes": 14 * 3, "batch_size": 14, "num_mini_batches": 4, **SHARED_RUNS[number]}
    shared = toy.shared_base(critic="advantage_estimator" not in changes and changes.get("critic", "adapter"))
    roles = [role for role in ("policy", "critic", "reference") if role in shared.roles]
    for parameter in [parameter for role in roles for parameter in shared.parameters_of(role)]:
        parameter.data += spread
    trainer, path, loads = toy.trainer(shared, **changes), [toy.weights(shared)], []
    accumulate, learn = trainer.accumulate, trainer.learn

    def counted(episodes, rows, *rest):
        loads.append(sum(episodes.lengths()[row] for row in rows))
        return accumulate(episodes, rows, *rest)

    def learned(episodes):  # ignores the self-checks, which also call `accumulate`
        trainer.accumulate = counted
        metrics = learn(episodes)
        trainer.accumulate = accumulate
        return metrics

    trainer.learn = learned
    trainer.train(lambda *_: path.append(toy.weights(shared)))
    return trainer, path, loads


def worker(rank, folder, numbers):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=2)
    row = memory.kv_bytes(toy.config(), 4) * (7 + 8) + 20 * toy.VOCAB
    # free memory: on rank 0 twice what 2 rows need, on rank 1 twice what 5 rows need
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda device: 2.0 * row * (2 + 3 * rank))
        assert toy.trainer().sampler.rows == 2, "workers decode different numbers of rows"
    for number in numbers:
        # The ranks start with different weights, and rank 0's must reach all ranks.
        trainer, path, loads = shared_run(number, spread=rank * 0.5)
        torch.save((path, trainer.history, loads), f"{folder}/{number}_{rank}.pt")
        trainer.save(f"{folder}/{number}")


@pytest.mark.parametrize("numbers", [(0,), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
def test_two_workers_do_what_one_does(numbers, tmp_path):
    in_processes(worker, str(tmp_path), numbers)
    for number in numbers:
        one, path, whole = shared_run(number)
        (mine, history, load), (theirs, history2, load2) = (
            torch.load(tmp_path / f"{number}_{rank}.pt", weights_only=True) for rank in (0, 1)
        )
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], theirs[1:], strict=True))
        for a, b, both in zip(load, load2, whole, strict=True):
            # number of tokens of the longest row: a prompt with one completion, or with several packed completions
            longest = 7 + 8 if number < 2 else both // 4
            assert a + b == both and abs(a - b) <= longest
        for update, limit in ((1, 1e-5), (2, 1e-4), (3, 1e-4)):  # rounding errors grow with each update
            assert (mine[update] - path[update]).norm() / (path[update] - path[0]).norm() < limit
        assert toy.unmeasured(history) == toy.unmeasured(history2)
        for a, b in zip(*map(toy.unmeasured, (one.history, history)), strict=True):
            assert b == pytest.approx(a, rel=1e-3, abs=1e-4)
        assert {p.name for p in (tmp_path / str(number)).glob("rng_*")} == {"rng_0_of_2.pt", "rng_1_of_2.pt"}


@pytest.mark.parametrize("estimator", ["gae", "remax"])
def test_a_batch_of_one_completion(estimator):
    sizes = dict(batch_size=1, num_mini_batches=1, total_episodes=3)
    metrics = toy.trainer(advantage_estimator=estimator, **sizes).train()
    assert len(metrics) == 3 and all(math.isfinite(v) for m in metrics for v in m.values())


def test_an_epoch_has_the_prompts_that_are_drawn_for_it():
    """The self-check before the first update also tests which prompts are sampled."""
    trainer = toy.trainer(
        total_episodes=8, batch_size=4, num_mini_batches=1, draws=lambda epoch: np.array([3, 5, 3, epoch])
    )
    samples = toy.recorded(trainer)
    trainer.train()
    seen = [sorted(sample.prompt_ids) for sample in samples[-2:]]
    prompts = trainer.prompts.rows
    expected = [[[int(i) for i in prompts[row]["input_ids"]] for row in (3, 5, 3, epoch)] for epoch in (0, 1)]
    assert seen == [sorted(prompts) for prompts in expected]
