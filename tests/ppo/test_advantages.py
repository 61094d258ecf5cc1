"""Tests the advantages of a first update, beyond what the self-check compares with their definitions."""

import math

import pytest
import torch
import toy_ppo as toy

from pipeline.job.rollout import RolloutConfig
from pipeline.scoring import forward
from pipeline.scoring.rewards import AdapterReward
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Completion


def first_and_last_advantage(**changes):
    trainer = toy.trainer(kl_coef=0.0, lam=0.0, whiten_advantages=False, **changes)
    episodes = toy.first_episodes(trainer)
    toy.in_some_rows(episodes.ended)
    last = torch.arange(16), episodes.counts - 1
    return episodes, episodes.advantages[last] + episodes.values[last]


def test_the_target_of_the_last_action():
    """After EOS no value follows. The flag `bootstrap_truncated` decides what follows a truncated completion."""
    plain, target = first_and_last_advantage()
    torch.testing.assert_close(target, plain.scores.float())
    assert torch.equal(plain.bootstrap == 0, plain.ended)
    episodes, target = first_and_last_advantage(bootstrap_truncated=True, gamma=0.5)
    expected = torch.where(episodes.ended, episodes.scores.float(), 0.5 * episodes.bootstrap)
    torch.testing.assert_close(target, expected)
    fined, target = first_and_last_advantage(missing_eos_penalty=2.0, reward_clip=0.3)
    torch.testing.assert_close(fined.scores, plain.scores.clamp(-0.3, 0.3) - 2.0 * ~plain.ended)
    torch.testing.assert_close(target, fined.scores.float())


@pytest.mark.parametrize(("limit", "weight"), [(3.0, math.exp(0.5)), (1.2, 1.2)])
def test_tokens_from_a_sampler_of_lower_precision_are_importance_weighted(limit, weight):
    class Off(SlotDecoder):
        def generate(self, *args):
            return [
                Completion(r.tokens, r.ended, [p - 0.5 for p in r.logprobs]) for r in super().generate(*args)
            ]

    def advantages(**changes):
        shared = toy.shared_base()
        return toy.trainer(shared, decoder=Off(shared), **changes).make_experience().episodes

    plain, weighed = advantages(), advantages(rollout=RolloutConfig(correction="token", correction_cap=limit))
    assert torch.allclose(weighed.advantages, plain.advantages * weight, rtol=1e-4)
    assert torch.equal(weighed.returns, plain.returns)


SCORES = [10.1, 1000.1, 2718.2817]
WITHOUT_CRITIC = [
    {"advantage_estimator": "grpo", "num_generations": 8},
    {"advantage_estimator": "rloo", "num_generations": 8},
    {"advantage_estimator": "reinforce_plus_plus"},
]


@pytest.mark.parametrize(
    ("settings", "score"),
    [
        pytest.param(settings, score, marks=[pytest.mark.slow] * (i != j))
        for i, settings in enumerate(WITHOUT_CRITIC)
        for j, score in enumerate(SCORES)
    ],
)
def test_equal_scores_have_no_advantage(settings, score):
    trainer = toy.trainer(reward=lambda completions: [score] * len(completions), kl_coef=0.0, **settings)
    trainer.run_update()  # the self-check agrees
    episodes = toy.first_episodes(trainer)
    assert (episodes.advantages == 0).all()


def test_scores_that_are_equal_in_fp32_are_still_ranked():
    trainer = toy.trainer(
        reward=lambda completions: [1e8 + i % 2 for i in range(len(completions))],
        kl_coef=0.0,
        advantage_estimator="grpo",
        num_generations=8,
        local_rollout_forward_batch_size=16,
    )
    episodes = toy.first_episodes(trainer)
    expected = 0.5 / (math.sqrt(8 * 0.25 / 7) + 1e-4)
    assert episodes.advantages[:, 0].abs().tolist() == pytest.approx([expected] * 16)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_copied_critic_predicts_the_reward(normalize):
    shared = toy.shared_base()
    reward = AdapterReward(shared, mean=5.0, std=3.0, weight=0.5)
    trainer = toy.trainer(shared, reward=reward, normalize_rewards=normalize, critic_reward=reward)
    episodes = toy.first_episodes(trainer)
    truncated = toy.in_some_rows(~episodes.ended)
    torch.testing.assert_close(episodes.bootstrap[truncated], episodes.scores[truncated].float())


def test_normalization_keeps_the_values_of_a_copied_critic():
    shared = toy.shared_base()
    reward = AdapterReward(shared, mean=5.0, std=3.0, weight=0.5)
    settings = dict(reward=reward, normalize_rewards=False, critic_reward=reward, normalize_values=True)
    trainer = toy.trainer(shared, **settings, critic_learning_rate=0.0, learning_rate=0.0)
    episodes = toy.first_episodes(trainer)
    states = forward.states(shared, "critic", episodes)

    def values():
        return trainer.moments.raw(trainer.values(episodes, states)[0])

    before = values()
    for _ in range(2):
        trainer.run_update()
        assert trainer.moments.std != 1.0
        torch.testing.assert_close(values(), before)
        torch.testing.assert_close(trainer.moments.normal(before), trainer.values(episodes, states)[0])
