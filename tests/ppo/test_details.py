"""The details of PPO that have to be right, one test (at least) for each, named after it; each fails if its detail breaks."""

import math

import pytest
import torch
import toy_ppo as toy

from pipeline.ppo import advantages as advantages_module
from pipeline.ppo.batch import collate
from pipeline.ppo.functional import gae, whiten
from pipeline.ppo.rewards import AdapterReward, FunctionReward
from pipeline.ppo.rollout import Completion, Sampling, TransformersEngine


def half_way(trainer, spread=0.0):
    """Episodes of the first update, rolled out, scored and judged; `spread` moves the policy away from the reference."""
    for parameter in trainer.shared.parameters_of("policy"):
        parameter.data += spread * torch.randn_like(parameter)
    episodes, samples, _ = trainer.rollout()
    trainer.score(episodes, samples)
    trainer.logprobs_and_values(episodes)
    return episodes


def in_some_rows(condition):
    """Guards against a test that proves nothing because its case does not occur."""
    assert condition.any() and not condition.all()
    return condition


def test_01_sampling_is_pure_with_one_temperature():
    shared = toy.shared_base(critic=False, spread=0.3)
    prompt, count = [5, 6, 7], 20_000
    sampling = Sampling(max_new_tokens=1, eos=(2, 3), temperature=0.7, seed=1)
    completions = TransformersEngine(shared, rows=count).generate([prompt] * count, range(count), sampling)
    seen = torch.bincount(torch.tensor([r.tokens[0] for r in completions]), minlength=toy.VOCAB) / count
    with torch.no_grad(), shared.use("policy"):
        true = (shared.base(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    assert (seen - true).abs().sum() / 2 < 0.03  # top-k, top-p or another temperature: more than 0.1
    assert (seen > 0).sum() > 30


@pytest.mark.parametrize(
    "changes", [dict(temperature=0.6), dict(min_new_tokens=4), dict(kl_estimator="k3", temperature=1.5)]
)
def test_01_temperature_and_barred_ends_are_alike_in_sampler_and_log_probs(changes):
    trainer = toy.trainer(**changes)
    kept = toy.recorded(trainer)
    metrics = trainer.run_update()
    assert metrics["val/sampler_drift"] < 1e-5
    assert abs(metrics["objective/kl"]) < 1e-4
    assert min(map(len, kept[0].completion_ids)) >= changes.get("min_new_tokens", 1)


def test_02_old_log_probs_are_the_trainers_and_the_first_ratio_is_asserted():
    trainer = toy.trainer()
    episodes = half_way(trainer)
    trainer.rewards_and_advantages(episodes, None)
    stats = trainer.accumulate(episodes, list(range(16)), float(episodes.mask.sum()), True)
    assert stats["val/ratio"].item() == pytest.approx(1, abs=1e-5)
    episodes.sampler_logprobs += 3.0  # the sampler's own do not enter the ratio
    assert (
        trainer.accumulate(episodes, [0, 1], float(episodes.mask[:2].sum()), True)["policy/approxkl_avg"]
        < 1e-9
    )
    # from here on training differs from what was sampled
    object.__setattr__(trainer.sampling, "temperature", 0.8)
    with pytest.raises(RuntimeError, match="first ratios are not 1"):
        trainer.learn(episodes)


def test_03_log_probs_and_values_are_shifted_together():
    """The last token of a completion is seen by no log-prob but its own, and by no value: all are read one place earlier."""
    trainer = toy.trainer(shared=toy.shared_base(spread=0.3))
    completion = [Completion([9, 8, 7, 6], True, [0.0] * 4)]
    part = collate([[5, 6, 7]], completion, [0], 0, torch.device("cpu"))
    other = collate([[5, 6, 7]], [Completion([9, 8, 7, 50], True, [0.0] * 4)], [0], 0, torch.device("cpu"))
    with torch.no_grad():
        a, b = trainer.logprobs("policy", part)[0][0], trainer.logprobs("policy", other)[0][0]
        assert torch.equal(a[:3], b[:3]) and a[3] != b[3]
        (values, after), (values2, after2) = trainer.values(part), trainer.values(other)
        assert torch.equal(values, values2) and after != after2
        everywhere = trainer.shared.values("critic", part.input_ids)[0]
        assert torch.equal(values[0], everywhere[2:6]) and after[0] == everywhere[6]
        logits = trainer.shared.logits(trainer.shared.hidden(None, part.input_ids))[0]
        bare = trainer.logprobs(None, part)[0][0]
    assert bare.tolist() == pytest.approx(
        [logits.log_softmax(-1)[2 + t, [9, 8, 7, 6][t]].item() for t in range(4)], abs=1e-5
    )


def test_04_eos_is_an_action_and_padding_is_never_found_by_id():
    completions = [
        Completion([9, 0, 0, 2], True, [0.0] * 4),
        Completion([2], True, [0.0]),
        Completion([0, 0], False, [0.0] * 2),
    ]
    episodes = collate([[5], [5, 0], [6, 7, 8]], completions, [0, 1, 2], 0, torch.device("cpu"))
    assert episodes.mask.tolist() == [[True] * 4, [True] + [False] * 3, [True, True, False, False]]
    assert episodes.input_ids.tolist() == [[5, 9, 0, 0, 2], [5, 0, 2, 0, 0], [6, 7, 8, 0, 0]]
    assert episodes.starts.tolist() == [1, 2, 3] and episodes.ended.tolist() == [True, True, False]
    trainer = toy.trainer()
    real = half_way(trainer)
    last = real.input_ids[torch.arange(16), real.starts + real.counts - 1]
    assert torch.equal(torch.isin(last, torch.tensor(toy.EOS)), in_some_rows(real.ended))
    assert real.old_logprobs[torch.arange(16), real.counts - 1].lt(0).all()


def test_05_score_once_at_the_last_action_and_kl_on_every_action():
    trainer = toy.trainer(kl_coef=0.1, check_reference=False)
    episodes = half_way(trainer, spread=0.2)
    rewards = trainer.rewards_and_advantages(episodes, None)
    kl = episodes.old_logprobs - episodes.ref_logprobs
    paid = rewards + 0.1 * kl
    at = torch.zeros_like(paid)
    at[torch.arange(16), episodes.counts - 1] = episodes.scores
    in_some_rows(episodes.counts == episodes.mask.shape[1])
    torch.testing.assert_close(paid * episodes.mask, at, atol=1e-6, rtol=0)
    assert (rewards[~episodes.mask] == 0).all() and (kl[episodes.mask] != 0).all()


def first_and_last_advantage(**changes):
    trainer = toy.trainer(kl_coef=0.0, lam=0.0, whiten_advantages=False, **changes)
    episodes = half_way(trainer)
    trainer.rewards_and_advantages(episodes, None)
    in_some_rows(episodes.ended)
    last = torch.arange(16), episodes.counts - 1
    return episodes, episodes.advantages[last] + episodes.values[last]


def test_06_no_value_after_eos():
    episodes, target = first_and_last_advantage()
    torch.testing.assert_close(target, episodes.scores)
    assert (episodes.bootstrap[episodes.ended] == 0).all() and (
        episodes.bootstrap[~episodes.ended] != 0
    ).all()


def test_06_cut_off_completions_by_one_explicit_flag():
    episodes, target = first_and_last_advantage(bootstrap_truncated=True, gamma=0.5)
    expected = torch.where(episodes.ended, episodes.scores, 0.5 * episodes.bootstrap)
    torch.testing.assert_close(target, expected)
    plain, _ = first_and_last_advantage()
    fined, target = first_and_last_advantage(missing_eos_penalty=2.0, reward_clip=0.3)
    torch.testing.assert_close(fined.scores, plain.scores.clamp(-0.3, 0.3) - 2.0 * ~plain.ended)
    torch.testing.assert_close(target, fined.scores)


def test_07_gae_skips_padding_and_returns_are_made_before_whitening():
    trainer = toy.trainer(lam=0.95, gamma=0.99)
    episodes = half_way(trainer)
    episodes.values[~episodes.mask] = 7.0  # garbage where there is no action
    rewards = trainer.rewards_and_advantages(episodes, None)
    expected = torch.zeros_like(rewards)
    for b, n in enumerate(episodes.counts.tolist()):
        row = torch.ones(1, n)
        expected[b, :n] = gae(rewards[b : b + 1, :n], episodes.values[b : b + 1, :n], row, 0.99, 0.95)[0][0]
    torch.testing.assert_close(episodes.returns, (expected + episodes.values).where(episodes.mask, 0.0))
    torch.testing.assert_close(episodes.advantages, whiten(expected, episodes.mask))


def test_08_advantages_are_whitened_over_the_batch_of_all_workers(monkeypatch):
    trainer = toy.trainer()
    episodes = half_way(trainer)
    rewards = trainer.rewards_and_advantages(episodes, None)
    chosen = episodes.advantages[episodes.mask]
    assert chosen.mean().abs() < 1e-6 and chosen.std() == pytest.approx(1, rel=1e-5)
    doubled = []
    # a twin with the same share
    monkeypatch.setattr(advantages_module, "all_reduce", lambda x: doubled.append(x) or 2 * x)
    args = (trainer.args, rewards, episodes.values, episodes.mask, torch.zeros(16))
    twin, _ = advantages_module.estimate_advantages(*args)
    n = int(episodes.mask.sum())
    torch.testing.assert_close(twin * math.sqrt((2 * n) / (2 * n - 1) * (n - 1) / n), episodes.advantages)
    assert len(doubled) == 2


def test_09_whitened_rewards_keep_their_mean():
    plain, whitened = toy.trainer(kl_coef=0.5), toy.trainer(kl_coef=0.5, whiten_rewards=True)
    episodes = half_way(plain)
    before = plain.rewards_and_advantages(episodes, None)[episodes.mask]
    after = whitened.rewards_and_advantages(episodes, None)[episodes.mask]
    assert after.mean().item() == pytest.approx(before.mean().item(), rel=1e-4) and before.mean().abs() > 0.01
    assert after.std().item() == pytest.approx(1, rel=1e-3)


def test_10_value_loss_is_clipped_against_the_values_of_the_rollout():
    trainer = toy.trainer(cliprange_value=0.05)
    episodes = half_way(trainer)
    trainer.rewards_and_advantages(episodes, None)
    for parameter in trainer.shared.parameters_of("critic"):
        parameter.data += 0.05 * torch.randn_like(parameter)
    new, _ = trainer.values(episodes)
    old, returns, mask = episodes.values, episodes.returns, episodes.mask
    free, clipped = (new - returns) ** 2, (old + (new - old).clamp(-0.05, 0.05) - returns) ** 2
    in_some_rows((clipped > free)[mask])
    loss, _ = trainer.value_objective(episodes, float(mask.sum()))
    assert loss.item() == pytest.approx(0.5 * torch.maximum(free, clipped)[mask].mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [dict(per_device_train_batch_size=1), dict(per_device_train_batch_size=5), dict(micro_batch_tokens=40)],
)
def test_11_micro_batches_do_not_change_the_update(changes):
    one, many = toy.trainer(), toy.trainer(**changes)
    start = toy.weights(one)
    one.run_update(), many.run_update()
    moved = toy.weights(one) - start
    assert (toy.weights(many) - toy.weights(one)).norm() / moved.norm() < 1e-5


def test_12_no_dropout_even_in_train_mode():
    shared = toy.shared_base("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
    for role in ("policy", "critic"):
        assert shared.configs[role].lora_dropout == 0
    trainer = toy.trainer(shared, gradient_checkpointing=True)  # train mode, and both assertions of the start
    assert trainer.run_update()["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert trainer.shared.base.training


def test_13_critic_starts_from_the_reward_and_is_warmed_up_alone():
    shared = toy.shared_base()
    trainer = toy.trainer(shared, reward=AdapterReward(shared), critic_warmup_steps=1, total_episodes=48)
    episodes, samples, _ = trainer.rollout()
    trainer.score(episodes, samples)
    with torch.no_grad():
        assert trainer.values(episodes)[1].tolist() == pytest.approx(episodes.scores.tolist(), abs=1e-5)
    policy, critic = toy.weights(shared, ["policy"]), toy.weights(shared, ["critic"])
    trainer.run_update()
    assert torch.equal(policy, toy.weights(shared, ["policy"])) and not torch.equal(
        critic, toy.weights(shared, ["critic"])
    )
    trainer.run_update()
    assert not torch.equal(policy, toy.weights(shared, ["policy"]))


def test_14_rewards_are_normalised_by_the_constants_of_their_version():
    reward = FunctionReward(toy.low, mean=0.25, std=0.5, weight=2.0)
    for normalize, expected in ((True, lambda s: 2 * (s - 0.25) / 0.5), (False, lambda s: 2 * s)):
        trainer = toy.trainer(reward=reward, normalize_rewards=normalize)
        episodes, samples, _ = trainer.rollout()
        raw = trainer.score(episodes, samples)["low"]
        assert episodes.scores.tolist() == pytest.approx([expected(s) for s in raw], abs=1e-6)


def test_15_kl_controller_counts_nats_a_completion_and_is_in_the_checkpoint(tmp_path):
    changes = dict(
        kl_controller="adaptive", kl_target=0.1, kl_horizon=100, kl_coef=0.1, check_reference=False
    )
    trainer = toy.trainer(toy.shared_base(spread=0.2), **changes)
    episodes = half_way(toy.trainer(toy.shared_base(spread=0.2), **changes))
    metrics = trainer.run_update()
    kl = (episodes.old_logprobs - episodes.ref_logprobs).sum(-1).mean().item()
    # a mean over tokens would be below
    assert metrics["objective/kl"] == pytest.approx(kl, rel=1e-4) and kl > 1
    assert metrics["objective/kl_coef"] == 0.1 and trainer.kl_coef == pytest.approx(
        0.1 * (1 + 0.2 * 16 / 100)
    )
    trainer.save(tmp_path)
    again = toy.trainer(**changes)
    again.restore(tmp_path)
    assert again.kl_coef == trainer.kl_coef
    below = toy.trainer(toy.shared_base(spread=0.2), **{**changes, "kl_target": 1000.0})
    below.run_update()
    assert below.kl_coef < 0.1


def test_16_reference_is_the_frozen_adapter_and_the_first_kl_is_zero():
    shared = toy.shared_base()
    for parameter in [*shared.parameters_of("reference"), *shared.parameters_of("policy")]:
        parameter.data += 0.1 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )
    trainer = toy.trainer(shared)  # both moved alike: an sft adapter, not the bare base
    frozen = toy.weights(shared, ["reference"])
    assert trainer.run_update()["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert trainer.run_update()["objective/kl"] != pytest.approx(0, abs=1e-4)
    assert torch.equal(frozen, toy.weights(shared, ["reference"]))
    with pytest.raises(
        RuntimeError, match="KL to the reference is 0 before the first step: log-probs differ"
    ):
        toy.trainer(toy.shared_base(spread=0.1)).run_update()
    toy.trainer(toy.shared_base(spread=0.1), check_reference=False).run_update()


def test_17_adams_epsilon():
    assert toy.trainer().optimizer.defaults["eps"] == 1e-5
    assert toy.trainer(adam_epsilon=1e-3).optimizer.defaults["eps"] == 1e-3


def test_18_log_ratio_loss_heads_and_adapters_are_fp32_over_a_bf16_base():
    shared = toy.shared_base()
    shared.base.to(torch.bfloat16)
    for role in shared.roles:
        for parameter in shared.parameters_of(role):
            parameter.data = parameter.data.float()
    trainer = toy.trainer(shared, bf16=True)
    episodes = half_way(trainer)
    trainer.rewards_and_advantages(episodes, None)
    loss, stats = trainer.policy_objective(episodes, 10.0)
    value, _ = trainer.value_objective(episodes, 10.0)
    floats = (
        loss,
        value,
        *stats,
        episodes.old_logprobs,
        episodes.values,
        episodes.scores,
        episodes.advantages,
    )
    assert {x.dtype for x in floats} == {torch.float32}
    logits = shared.logits(shared.hidden("policy", episodes.input_ids))
    assert logits.dtype == torch.float32
    trainer.run_update()
    assert {p.dtype for r in ("policy", "critic") for p in shared.parameters_of(r)} == {torch.float32}
    assert {s["exp_avg"].dtype for s in trainer.optimizer.state.values()} == {torch.float32}


def test_19_a_gradient_that_is_not_finite_skips_the_step(monkeypatch):
    trainer = toy.trainer(num_ppo_epochs=1, num_mini_batches=2)
    objective, calls = trainer.policy_objective, []

    def broken(part, tokens):
        loss, stats = objective(part, tokens)
        calls.append(1)
        return (loss * math.inf if len(calls) == 1 else loss), stats

    monkeypatch.setattr(trainer, "policy_objective", broken)
    start = toy.weights(trainer)
    monkeypatch.setattr(trainer.args, "num_mini_batches", 1)
    monkeypatch.setattr(trainer.args, "per_device_train_batch_size", 16)
    trainer.run_update()
    assert (
        trainer.skipped_steps == 1
        and torch.equal(start, toy.weights(trainer))
        and not trainer.optimizer.state
    )
    metrics = trainer.run_update()
    assert metrics["skipped_steps"] == 1 and not torch.equal(start, toy.weights(trainer))
    assert torch.isfinite(toy.weights(trainer)).all()


def test_19_a_batch_without_an_action_to_learn_from_is_harmless():
    trainer = toy.trainer(mask_truncated_completions=True)
    trainer.run_update()  # Adam has momentum now
    start = toy.weights(trainer)
    trainer.sampling = Sampling(8, eos=(), seed=1)  # nothing ends any more
    metrics = trainer.run_update()
    assert metrics["completions/clipped_ratio"] == 1 and metrics["policy/steps"] == 0
    assert torch.equal(start, toy.weights(trainer)) and all(map(math.isfinite, metrics.values()))


def test_20_the_base_is_never_merged_into():
    trainer = toy.trainer()
    names = [
        n for n, p in trainer.shared.named_parameters() if "lora_" not in n and not n.startswith("heads.")
    ]
    before = {n: p.clone() for n, p in trainer.shared.named_parameters() if n in names}
    trainer.train()
    assert len(before) > 10 and all(
        torch.equal(p, before[n]) for n, p in trainer.shared.named_parameters() if n in before
    )
    assert not any(layer.merged for layer in trainer.shared._layers)


def test_21_gradients_of_each_role_are_the_same_with_checkpointing():
    found = []
    for checkpointing in (False, True):
        trainer = toy.trainer(
            toy.shared_base(spread=0.1), gradient_checkpointing=checkpointing, check_reference=False
        )
        episodes = half_way(trainer)
        trainer.rewards_and_advantages(episodes, None)
        trainer.accumulate(episodes, list(range(16)), float(episodes.mask.sum()), True)
        found.append(
            {r: [p.grad.clone() for p in trainer.shared.parameters_of(r)] for r in ("policy", "critic")}
        )
        assert trainer.shared.base.training == checkpointing
    for role in ("policy", "critic"):
        assert sum(g.abs().sum() for g in found[0][role]) > 0
        for a, b in zip(found[0][role], found[1][role], strict=True):
            assert torch.equal(a, b)


def test_21_every_role_keeps_learning():
    trainer = toy.trainer()
    for role in ("policy", "critic"):
        before = toy.weights(trainer, [role])
        trainer.run_update()
        assert not torch.equal(before, toy.weights(trainer, [role]))
        assert all(p.requires_grad for p in trainer.shared.parameters_of(role))
