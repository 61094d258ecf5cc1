"""Tests that sharing prompts in a forward pass changes the cost of training, but not the result."""

import pytest
import torch
import toy_ppo as toy

from pipeline.ppo.episodes import Totals

GROUPS = dict(num_generations=8, batch_size=32, total_episodes=64)


def gradients(trainer):
    """Returns the gradient for a minibatch of all episodes, and the number of tokens that the base processed."""
    episodes = toy.first_episodes(trainer)
    tokens, states = [], trainer.shared.states
    trainer.shared.states = lambda role, batch: tokens.append(batch.input_ids.numel()) or states(role, batch)
    trainer.accumulate(episodes, list(range(len(episodes))), Totals.of(episodes.learn))
    learning = [p for role in trainer.roles for p in trainer.shared.parameters_of(role)]
    return torch.cat([p.grad.flatten() for p in learning]), sum(tokens)


@pytest.mark.parametrize("critic", ["adapter", "head"])
def test_a_prompt_is_computed_once_for_its_completions(critic):
    found = []
    for packs in (True, False):
        shared = toy.shared_base(critic=critic, spread=0.1)
        shared.can_pack = packs  # turns packing on or off, whatever the base supports
        settings = dict(critic=critic, check_reference=False, **GROUPS)
        found.append(
            gradients(toy.trainer(shared, min_new_tokens=2, per_device_train_batch_size=32, **settings))
        )
    (packed, fewer), (alone, tokens) = found
    assert (packed - alone).norm() < 2e-6 * alone.norm() and fewer < 0.8 * tokens


def forwards(**settings):
    """Returns the number of forward passes of one update, without sampling."""
    trainer = toy.trainer(**{"num_mini_batches": 1, "per_device_train_batch_size": 64, **settings})
    trainer.update = 1  # only update 0 runs the self-check
    rollout = trainer.rollout()
    # The first access to can_pack runs the base once, so it must happen before counting.
    assert trainer.shared.can_pack
    calls = []
    trainer.shared.base.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    trainer.score(rollout)
    trainer.reference_logprobs(rollout)
    trainer.logprobs_and_values(rollout.episodes)
    trainer.learn(rollout.episodes)
    return len(calls)


def test_a_critic_that_is_a_head_costs_no_forward():
    group = dict(advantage_estimator="rloo", num_generations=2)
    # forwards for old log-probs, reference log-probs and two epochs
    assert forwards(critic="head") == forwards(**group) == 4
    assert forwards() == 7


def test_one_backward_teaches_policy_and_head():
    def learned(**settings):
        trainer = toy.trainer(critic="head", total_episodes=16, **settings)
        trainer.train()
        return toy.weights(trainer, ["policy"]), toy.weights(trainer, ["critic"])

    (start, _), (policy, head) = learned(learning_rate=1e-12), learned(vf_coef=1.0)
    without, _ = learned(vf_coef=1e-9)
    assert head.any() and (policy - without).abs().max() > 1e-3
    warming, first = learned(vf_coef=1.0, critic_warmup_steps=1)
    torch.testing.assert_close(warming, start)  # the critic's warmup trains only the critic's head
    assert first.any()


ONE_STEP = dict(
    advantage_estimator="grpo", num_generations=4, kl_in="loss", kl_estimator="k3", num_ppo_epochs=1, num_mini_batches=1
)  # fmt: skip


def test_old_logprobs_come_from_the_training_forward_if_an_update_has_one_step(monkeypatch):
    """An update of one step needs no extra forward for old log-probs. The extra forward would change no weight and no metric."""
    assert forwards(**ONE_STEP) == 2  # one forward pass for the reference and one for training
    runs = []
    for later in (True, False):
        trainer = toy.trainer(**ONE_STEP, total_episodes=48)
        if not later:
            monkeypatch.setattr(type(trainer.args), "learns_in_one_forward", False)
        runs.append((trainer.train(), toy.weights(trainer)))
    (mine, weights), (theirs, expected) = runs
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(toy.unmeasured(mine), toy.unmeasured(theirs), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)
