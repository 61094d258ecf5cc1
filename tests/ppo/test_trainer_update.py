"""Tests the parts of one PPOTrainer update: scores, advantages, log-probs, losses, gradients, and frozen weights."""

import math
import re

import pytest
import torch
import toy_ppo as toy
from running import ROOT

from pipeline.errors import SelfCheckFailed
from pipeline.job.rollout import RolloutConfig
from pipeline.ppo import losses
from pipeline.ppo.episodes import Totals
from pipeline.scoring import forward
from pipeline.scoring.rewards import AdapterReward
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Completion, Sampling

GRPO = dict(advantage_estimator="grpo", num_generations=8)

GSPO = dict(
    advantage_estimator="grpo", num_generations=2, importance_sampling_level="sequence", cliprange=0.01, cliprange_high=0.02,
    kl_in="loss", kl_estimator="k3", entropy_coef=0.1, mask_truncated_completions=True,
)  # fmt: skip
# the Python code of an update in docs/architecture.md
[PAGE] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL)
# Settings that the code in docs/architecture.md reads. Each value differs from the default and changes the result.
# Clipping changes only the policy's gradient.
SET = dict(
    temperature=0.8, gamma=0.98, lam=0.9, kl_coef=0.3, cliprange=0.05, cliprange_value=0.1, vf_coef=0.2, max_grad_norm=0.5,
    lr_scheduler_type="linear", critic_learning_rate=5e-3, weight_decay=0.01,
)  # fmt: skip
# with these settings, all rows are 14 tokens long
EVEN = dict(rows=[row | {"input_ids": 2 * row["input_ids"][:3]} for row in toy.prompts()], min_new_tokens=7)


# Unlike the code in docs/architecture.md, the trainer sorts a minibatch by length. With rows of different lengths, the
# order of sums differs, and rounding makes the two updates differ by 6e-7 of their size. If the documented code lacked a
# step, the updates would differ by 5e-2 or more.
@pytest.mark.parametrize(("changes", "rounding"), [(EVEN, 0.0), ({}, 1e-4)], ids=["even", "ragged"])
def test_the_update_in_the_documentation_equals_the_trainers(changes, rounding):
    """Compares the second updates, because before the first update the policy equals the reference and Adam's moments are 0."""

    def after_an_update():
        shared = toy.shared_base()
        trainer = toy.trainer(shared, [AdapterReward(shared)], **SET, **changes)
        trainer.run_update()
        return trainer

    one, other, page = after_an_update(), after_an_update(), {}
    exec(PAGE, page)
    start = {role: toy.weights(one, [role]) for role in one.roles}
    expected = one.make_experience().episodes
    assert (expected.counts == 8).all() == bool(changes)
    metrics = one.run_update()
    assert metrics["grad_norm/critic"] < one.args.max_grad_norm < metrics["grad_norm/policy"]
    assert metrics["policy/clipfrac_avg"] > 0 and metrics["val/clipfrac_avg"] > 0
    batch = page["ppo_update"](
        other.shared,
        other.sampler.tokenizer,
        other.args,
        other.prompts.rows,
        other.sampler.rewards,
        other.optimizer,
        other.update,
    )
    assert torch.equal(batch.input_ids, expected.input_ids)
    for name in ("rewards", "advantages", "returns"):
        mine, its = (getattr(episodes, name)[expected.mask] for episodes in (batch, expected))
        assert (mine - its).norm() <= rounding * its.norm(), name
    for role in one.roles:
        mine, its = toy.weights(other, [role]), toy.weights(one, [role])
        assert (mine - its).norm() <= rounding * (its - start[role]).norm(), role


def test_old_log_probs_are_the_trainers_and_the_first_ratio_is_asserted():
    trainer = toy.trainer()
    episodes = toy.first_episodes(trainer)
    stats = trainer.accumulate(episodes, list(range(16)), Totals.of(episodes.mask))
    assert stats["val/ratio"].item() == pytest.approx(1, abs=1e-5)
    episodes.sampler_logprobs += 3.0  # the sampler's log-probs must not enter the policy ratio
    stats = trainer.accumulate(episodes, [0, 1], Totals.of(episodes.mask[:2]))
    assert stats["policy/approxkl_avg"] < 1e-9
    # from here on, training uses another temperature than sampling
    object.__setattr__(trainer.sampler.sampling, "temperature", 0.8)
    with pytest.raises(SelfCheckFailed, match=r"the first ratio is 1: .* log-probs differ before any step"):
        trainer.learn(episodes)
    trainer.update = 1  # after the first update, a deviation is only reported as a metric
    assert trainer.learn(episodes)["policy/first_ratio_error"] > 0.1


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        (dict(), dict(per_device_train_batch_size=1)),
        (GSPO, dict(per_device_train_batch_size=5)),
        (dict(loss_aggregation="constant", entropy_coef=0.1), dict(max_tokens_per_micro_batch=40)),
    ],
)
def test_micro_batches_do_not_change_the_update(loss, changes):
    one, many = toy.trainer(**loss), toy.trainer(**loss, **changes)
    start = toy.weights(one)
    one.run_update(), many.run_update()
    moved = toy.weights(one) - start
    assert (toy.weights(many) - toy.weights(one)).norm() / moved.norm() < 1e-5


@pytest.mark.parametrize("aggregation", ["token", "constant", None])
def test_policy_loss_kl_and_entropy_are_aggregated_the_same_way(aggregation):
    """Compares the losses with a loop over completions. Masked completions change neither the loss nor its divisor."""
    trainer = toy.trainer(**{**GSPO, "loss_aggregation": aggregation, "importance_sampling_level": "token"})
    episodes = toy.first_episodes(trainer)
    for parameter in trainer.shared.parameters_of("policy"):
        parameter.data += 0.02 * torch.randn_like(parameter)
    totals = Totals.of(episodes.learn)
    logprobs, entropy = trainer.sampler.logprobs("policy", episodes, entropy=True)
    loss, _ = losses.policy_objective(trainer.args, episodes, totals, logprobs, entropy, trainer.kl_coef)
    rows = []
    for row in toy.in_some_rows(episodes.ended).nonzero().flatten().tolist():
        here = slice(0, int(episodes.counts[row]))
        ratio = (logprobs - episodes.old_logprobs)[row, here].exp()
        advantages = episodes.advantages[row, here]
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.99, 1.02) * advantages)
        d = (logprobs - episodes.ref_logprobs)[row, here]
        rows.append(-surrogate + 0.02 * ((-d).exp() - 1 + d) - 0.1 * entropy[row, here])
    by_hand = {
        "token": torch.cat(rows).mean(),
        None: torch.stack([row.mean() for row in rows]).mean(),  # grpo's default is "sequence"
        "constant": torch.cat(rows).sum() / (len(rows) * 8),
    }
    assert totals == (len(torch.cat(rows)), len(rows))
    assert loss.item() == pytest.approx(by_hand[aggregation].item(), rel=1e-5)
    assert toy.trainer().args.aggregation == "token"


def test_critic_starts_from_the_reward_and_is_warmed_up_alone():
    """While only the critic is trained, the KL stays 0 and the KL controller does not change the coefficient."""
    shared = toy.shared_base()
    changes = dict(kl_controller="adaptive", kl_horizon=100, critic_warmup_steps=1, total_episodes=48)
    trainer = toy.trainer(shared, reward=AdapterReward(shared), **changes)
    episodes = toy.first_episodes(trainer)
    with torch.no_grad():
        assert trainer.values(episodes)[1].tolist() == pytest.approx(episodes.scores.tolist(), abs=1e-5)
    policy, critic = toy.weights(shared, ["policy"]), toy.weights(shared, ["critic"])
    warming = trainer.run_update()
    assert torch.equal(policy, toy.weights(shared, ["policy"])) and "policy/first_ratio_error" not in warming
    assert not torch.equal(critic, toy.weights(shared, ["critic"]))
    first = trainer.run_update()
    assert (
        not torch.equal(policy, toy.weights(shared, ["policy"])) and first["policy/first_ratio_error"] < 1e-5
    )
    assert warming["objective/kl_coef"] == first["objective/kl_coef"] == 0.02 != trainer.kl_coef


def test_a_critic_that_starts_from_no_reward_predicts_zero_and_learns():
    """A random head would have a negative explained variance, and the first updates would have to undo it."""
    shared = toy.shared_base(critic=False)
    shared.add("critic", lora=toy.LORA, head=True, trainable=True)
    trainer, start = toy.trainer(shared), toy.weights(shared, ["critic"])
    assert trainer.run_update()["val/explained_variance"] == pytest.approx(0, abs=1e-6)
    moved = toy.weights(shared, ["critic"]) != start
    # the critic's head was updated, so the critic's adapter gets a gradient
    assert moved[-32:].all() and moved[:-32].any()


def test_each_role_warms_up_when_it_begins_to_learn():
    """The policy's learning rate is 0 only in updates that train only the critic. The metric `lr` is the policy's rate."""
    critic_warmup_steps = 3
    trainer = toy.trainer(
        lr_scheduler_type="linear", warmup_steps=3, critic_warmup_steps=critic_warmup_steps,
        total_episodes=16 * (8 + critic_warmup_steps), learning_rate=1e-3, critic_learning_rate=1e-4, num_ppo_epochs=1,
    )  # fmt: skip
    rates = []
    while trainer.update < trainer.total:
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        assert trainer.run_update()["lr"] == rates[-1][0]
    ramp = [1 / 4, 2 / 4, 3 / 4]
    policy, critic = zip(*rates, strict=True)
    down = [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5]
    assert list(policy) == pytest.approx([1e-3 * f for f in [0] * critic_warmup_steps + ramp + down])
    decay = len(rates) - 3
    assert list(critic) == pytest.approx([1e-4 * f for f in ramp + [n / decay for n in range(decay, 0, -1)]])


def test_reference_is_the_frozen_adapter_and_the_first_kl_is_zero():
    shared = toy.shared_base()
    for parameter in [*shared.parameters_of("reference"), *shared.parameters_of("policy")]:
        parameter.data += 0.1 * torch.sin(torch.arange(parameter.numel())).view_as(parameter)
    # policy and reference start from an adapter that differs from the bare base
    trainer = toy.trainer(shared)
    frozen = toy.weights(shared, ["reference"])
    assert trainer.run_update()["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert trainer.run_update()["objective/kl"] != pytest.approx(0, abs=1e-4)
    assert torch.equal(frozen, toy.weights(shared, ["reference"]))
    with pytest.raises(SelfCheckFailed, match=r"KL to the reference is 0 .*: log-probs differ"):
        toy.trainer(toy.shared_base(spread=0.1)).run_update()
    toy.trainer(toy.shared_base(spread=0.1), check_reference=False).run_update()


def test_a_gradient_that_is_not_finite_skips_the_step(monkeypatch):
    trainer = toy.trainer(num_ppo_epochs=1, num_mini_batches=1)
    accumulate = trainer.accumulate

    def broken(*args):
        stats = accumulate(*args)
        trainer.shared.parameters_of("policy")[0].grad.fill_(math.inf)
        return stats

    start = toy.weights(trainer)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "accumulate", broken)
        assert trainer.run_update()["skipped_steps"] == 1
    assert torch.equal(start, toy.weights(trainer)) and not trainer.optimizer.state
    assert trainer.run_update()["skipped_steps"] == 1
    assert not torch.equal(start, toy.weights(trainer)) and torch.isfinite(toy.weights(trainer)).all()


def test_a_batch_without_an_action_to_learn_from_is_harmless():
    trainer = toy.trainer(mask_truncated_completions=True)
    trainer.run_update()  # after one optimizer step, Adam's moments are nonzero
    start = toy.weights(trainer)
    trainer.sampler.sampling = Sampling(8, eos=(), seed=1)  # from here on, no completion ends with EOS
    metrics = trainer.run_update()
    assert metrics["completions/clipped_ratio"] == 1 and metrics["policy/steps"] == 0
    assert torch.equal(start, toy.weights(trainer)) and all(map(math.isfinite, metrics.values()))


# ---------------------------------------------------------------------------------------- scores and advantages


def test_scores_are_clipped_before_truncated_completions_are_fined():
    trainer = toy.trainer(
        missing_eos_penalty=2.0, reward_clip=0.3, kl_coef=0.0, lam=0.0, whiten_advantages=False
    )
    episodes = toy.first_episodes(trainer)
    ended, raw = toy.in_some_rows(episodes.ended), toy.first_episodes(toy.trainer()).scores
    torch.testing.assert_close(episodes.scores, raw.clamp(-0.3, 0.3) - 2.0 * ~ended)
    last = torch.arange(16), episodes.counts - 1  # no value is bootstrapped after the last action
    torch.testing.assert_close(episodes.advantages[last] + episodes.values[last], episodes.scores.float())


@pytest.mark.parametrize("correction", ["token", "sequence"])
def test_advantages_are_corrected_for_the_samplers_log_probs(correction):
    class Off(SlotDecoder):
        def generate(self, *args):
            found = super().generate(*args)
            return [Completion(r.tokens, r.ended, [r.logprobs[0] - 0.5, *r.logprobs[1:]]) for r in found]

    def advantages(**changes):
        shared = toy.shared_base()
        return toy.trainer(shared, decoder=Off(shared), **changes).make_experience().episodes

    plain = advantages()
    corrected = advantages(rollout=RolloutConfig(correction=correction, correction_cap=1.6))
    weights = torch.ones(plain.mask.shape)
    weights[:, 0 if correction == "token" else slice(None)] = 1.6  # exp(0.5), truncated to the cap 1.6
    assert torch.allclose(corrected.advantages, plain.advantages * weights, rtol=1e-4)
    assert torch.equal(corrected.returns, plain.returns)


@pytest.mark.parametrize("settings", [GRPO, dict(advantage_estimator="reinforce_plus_plus")])
def test_equal_scores_have_no_advantage(settings):
    trainer = toy.trainer(reward=lambda completions: [2718.2817] * len(completions), kl_coef=0.0, **settings)
    trainer.run_update()  # raises if the self-check and the loss disagree
    assert (toy.first_episodes(trainer).advantages == 0).all()


def test_scores_that_are_equal_in_fp32_are_still_ranked():
    trainer = toy.trainer(
        reward=lambda completions: [1e8 + i % 2 for i in range(len(completions))], kl_coef=0.0, **GRPO
    )
    expected = 0.5 / (math.sqrt(8 * 0.25 / 7) + 1e-4)
    assert toy.first_episodes(trainer).advantages[:, 0].abs().tolist() == pytest.approx([expected] * 16)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_copied_critic_predicts_the_reward_and_keeps_its_values(normalize):
    """`normalize_values` rescales the outputs of the critic's head, but the predicted values stay the same."""
    shared = toy.shared_base()
    reward = AdapterReward(shared, mean=5.0, std=3.0, weight=0.5)
    settings = dict(
        normalize_rewards=normalize, normalize_values=True, critic_learning_rate=0.0, learning_rate=0.0
    )
    trainer = toy.trainer(shared, reward=reward, critic_reward=reward, **settings)
    episodes = toy.first_episodes(trainer)
    truncated = toy.in_some_rows(~episodes.ended)
    torch.testing.assert_close(episodes.bootstrap[truncated], episodes.scores[truncated].float())
    assert (episodes.bootstrap[~truncated] == 0).all()
    states = forward.action_states(shared, "critic", episodes)

    def values():
        return trainer.moments.raw(trainer.values(episodes, states)[0])

    before = values()
    for _ in range(2):
        trainer.run_update()
        assert trainer.moments.std != 1.0
        torch.testing.assert_close(values(), before)
        torch.testing.assert_close(trainer.moments.normal(before), trainer.values(episodes, states)[0])
