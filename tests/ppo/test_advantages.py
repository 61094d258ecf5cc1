"""From scores to token rewards, advantages and returns, on the episodes of a first update."""

import math

import pytest
import torch
import toy_ppo as toy

from pipeline.inference.decoder import SlotDecoder
from pipeline.inference.rows import Completion
from pipeline.ppo import losses
from pipeline.ppo.functional import gae, whiten
from pipeline.ppo.rewards import AdapterReward
from pipeline.ppo.rollout_config import RolloutConfig


def test_score_once_at_the_last_action_and_kl_on_every_action():
    trainer = toy.trainer(kl_coef=0.1, check_reference=False)
    episodes = toy.first_episodes(trainer, spread=0.2)
    kl = episodes.old_logprobs - episodes.ref_logprobs
    paid = episodes.rewards + 0.1 * kl
    at = torch.zeros_like(paid)
    at[torch.arange(16), episodes.counts - 1] = episodes.scores.float()
    toy.in_some_rows(episodes.counts == episodes.mask.shape[1])
    torch.testing.assert_close(paid * episodes.mask, at, atol=1e-6, rtol=0)
    assert (episodes.rewards[~episodes.mask] == 0).all() and (kl[episodes.mask] != 0).all()


def first_and_last_advantage(**changes):
    trainer = toy.trainer(kl_coef=0.0, lam=0.0, whiten_advantages=False, **changes)
    episodes = toy.first_episodes(trainer)
    toy.in_some_rows(episodes.ended)
    last = torch.arange(16), episodes.counts - 1
    return episodes, episodes.advantages[last] + episodes.values[last]


def test_no_value_after_eos():
    episodes, target = first_and_last_advantage()
    torch.testing.assert_close(target, episodes.scores.float())
    assert (episodes.bootstrap[episodes.ended] == 0).all() and (
        episodes.bootstrap[~episodes.ended] != 0
    ).all()


def test_cut_off_completions_by_one_explicit_flag():
    episodes, target = first_and_last_advantage(bootstrap_truncated=True, gamma=0.5)
    expected = torch.where(episodes.ended, episodes.scores.float(), 0.5 * episodes.bootstrap)
    torch.testing.assert_close(target, expected)
    plain, _ = first_and_last_advantage()
    fined, target = first_and_last_advantage(missing_eos_penalty=2.0, reward_clip=0.3)
    torch.testing.assert_close(fined.scores, plain.scores.clamp(-0.3, 0.3) - 2.0 * ~plain.ended)
    torch.testing.assert_close(target, fined.scores.float())


def test_gae_skips_padding_and_returns_are_made_before_whitening():
    trainer = toy.trainer(lam=0.95, gamma=0.99)
    episodes = toy.first_episodes(trainer)
    episodes.values[~episodes.mask] = 7.0  # garbage where there is no action
    trainer.rewards_and_advantages(episodes)
    expected = torch.zeros_like(episodes.rewards)
    for b, n in enumerate(episodes.counts.tolist()):
        row = torch.ones(1, n)
        expected[b, :n] = gae(
            episodes.rewards[b : b + 1, :n], episodes.values[b : b + 1, :n], row, 0.99, 0.95
        )[0][0]
    torch.testing.assert_close(episodes.returns, (expected + episodes.values).where(episodes.mask, 0.0))
    torch.testing.assert_close(episodes.advantages, whiten(expected, episodes.mask))


def test_advantages_are_whitened_over_the_batch_of_all_workers(monkeypatch):
    trainer = toy.trainer()
    episodes = toy.first_episodes(trainer)
    chosen = episodes.advantages[episodes.mask]
    assert chosen.mean().abs() < 1e-6 and chosen.std() == pytest.approx(1, rel=1e-5)
    doubled = []

    # a twin with the same share
    monkeypatch.setattr(losses, "all_reduce", lambda x: doubled.append(x) or 2 * x)
    alone = episodes.advantages
    trainer.rewards_and_advantages(episodes)
    n = int(episodes.mask.sum())
    torch.testing.assert_close(episodes.advantages * math.sqrt((2 * n) / (2 * n - 1) * (n - 1) / n), alone)
    assert len(doubled) == 2


def test_whitened_rewards_keep_their_mean():
    plain, whitened = toy.trainer(kl_coef=0.5), toy.trainer(kl_coef=0.5, whiten_rewards=True)
    episodes = toy.first_episodes(plain)
    before = episodes.rewards[episodes.mask]
    whitened.rewards_and_advantages(episodes)
    after = episodes.rewards[episodes.mask]
    assert after.mean().item() == pytest.approx(before.mean().item(), rel=1e-4) and before.mean().abs() > 0.01
    assert after.std().item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(("limit", "weight"), [(3.0, math.exp(0.5)), (1.2, 1.2)])
def test_what_a_sampler_of_other_precision_drew_is_weighed(limit, weight):
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


@pytest.mark.parametrize("score", [10.1, 1000.1, 2718.2817])
@pytest.mark.parametrize(
    "settings",
    [
        {"advantage_estimator": "grpo", "num_generations": 8},
        {"advantage_estimator": "rloo", "num_generations": 8},
        {"advantage_estimator": "reinforce_plus_plus"},
    ],
    ids=str,
)
def test_equal_scores_have_no_advantage(settings, score):
    trainer = toy.trainer(reward=lambda completions: [score] * len(completions), kl_coef=0.0, **settings)
    trainer.run_update()  # the self-check agrees
    episodes = toy.first_episodes(trainer)
    assert (episodes.advantages == 0).all()


def test_scores_that_fp32_does_not_tell_apart_are_compared():
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
def test_a_copied_critic_predicts_what_is_paid(normalize):
    shared = toy.shared_base()
    reward = AdapterReward(shared, mean=5.0, std=3.0, weight=0.5)
    trainer = toy.trainer(shared, reward=reward, normalize_rewards=normalize, critic_reward=reward)
    episodes = toy.first_episodes(trainer)
    cut_off = toy.in_some_rows(~episodes.ended)
    torch.testing.assert_close(episodes.bootstrap[cut_off], episodes.scores[cut_off].float())
