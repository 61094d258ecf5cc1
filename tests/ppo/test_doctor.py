"""The doctor: on a sound job every check holds, and each check fails when the thing that it is about is broken."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import toy_ppo as toy
from running import stage

from pipeline.errors import SelfCheckFailed
from pipeline.findings import Finding
from pipeline.inference.decoder import SlotDecoder
from pipeline.models import probes
from pipeline.ppo import trainer as ppo_trainer
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.selfcheck import doctor
from pipeline.ppo.selfcheck import rollout as checks
from pipeline.ppo.selfcheck.definitions import advantages_by_definition


def rolled(**settings):
    """A trainer and its first episodes, with everything that is known before it learns."""
    trainer = toy.trainer(**settings)
    rollout = trainer.rollout()
    episodes = rollout.episodes
    trainer.score(rollout)
    trainer.reference_logprobs(rollout)
    trainer.logprobs_and_values(episodes)
    rewards = trainer.rewards_and_advantages(episodes, trainer.greedy_scores(rollout))
    return trainer, episodes, rewards


def verdicts(findings):
    return {finding.check: finding.holds for finding in findings}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bootstrap_truncated": True},
        {"missing_eos_penalty": 1.0, "temperature": 0.7, "min_new_tokens": 3},
        {"advantage_estimator": "rloo", "num_generations": 2},
        {"advantage_estimator": "remax", "kl_in": "loss", "kl_estimator": "k3"},
        {"gamma": 0.9, "lam": 0.5, "mask_truncated_completions": True},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_a_sound_job_passes_every_check(settings, tmp_path):
    trainer = toy.trainer(**settings)
    before = toy.weights(trainer)
    for role in trainer.shared.roles:
        trainer.shared.save(role, tmp_path / role)
    findings, phases = doctor.examine(
        trainer, {r: str(tmp_path / r) for r in trainer.shared.roles if r != "reward"}
    )
    assert False not in verdicts(findings).values(), findings
    assert list(verdicts(findings).values()).count(True) >= 8
    assert torch.equal(before, toy.weights(trainer))  # looked at, not trained
    assert all(p.grad is None for p in trainer.shared.parameters())
    assert phases["time/update"] > 0
    phases |= {"time/rollout": 1.0, "time/score": 1.0, "time/values": 1.0, "time/update": 2.0}
    table = doctor.render(findings, phases, 16, PPOConfig(batch_size=64, num_ppo_epochs=3))
    assert "WRONG" not in table and "64 completions, 3 epochs, would take 36 s" in table


def test_the_start_of_a_run_raises_what_the_checks_find(monkeypatch):
    monkeypatch.setattr(checks, "sampler_agrees", lambda *_: Finding("agrees", "it does not", False))
    with pytest.raises(SelfCheckFailed, match="agrees: it does not"):
        toy.trainer().run_update()


BREAKS = {
    "reference_is_policy": lambda episodes: episodes.ref_logprobs.sub_(0.1),
    "sampler_agrees": lambda episodes: episodes.sampler_logprobs.mul_(1.2),
    "ends_inside": lambda episodes: episodes.ended.logical_not_(),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_check_sees_what_it_is_about(name):
    trainer, episodes, _ = rolled()
    check = getattr(checks, name)
    assert check(trainer, episodes).holds is True
    BREAKS[name](episodes)
    assert check(trainer, episodes).holds is False


def test_an_end_that_the_mask_leaves_out_is_seen():
    trainer, episodes, _ = rolled()
    row = int(episodes.ended.nonzero()[0])
    episodes.mask[row, int(episodes.counts[row]) - 1] = False
    assert checks.ends_inside(trainer, episodes).holds is False


def test_a_score_paid_elsewhere_is_seen():
    trainer, episodes, rewards = rolled()
    assert advantages_by_definition(trainer, episodes, rewards, None).holds is True
    twice = rewards.clone()
    twice[:, 0] += episodes.scores
    for paid in (twice, rewards.roll(1, -1)):
        assert advantages_by_definition(trainer, episodes, paid, None).holds is False


@pytest.mark.parametrize(
    "draws", [None, lambda epoch: np.arange(8)[::-1]], ids=["every prompt", "drawn prompts"]
)
def test_another_order_of_prompts_is_seen(draws, monkeypatch):
    trainer = toy.trainer()
    trainer.draws, trainer.prompts_per_epoch = draws, 8 if draws else 32
    assert checks.each_episode_once(trainer, trainer.rollout().episodes).holds is True
    order = ppo_trainer.prompt_order
    monkeypatch.setattr(ppo_trainer, "prompt_order", lambda *args: order(*args)[::-1])
    assert checks.each_episode_once(trainer, trainer.rollout().episodes).holds is False


@pytest.mark.parametrize(
    "change",
    [
        lambda shared: setattr(shared.heads["critic"], "append", torch.nn.Dropout(0.1)),
        lambda shared: shared.heads["critic"].half(),
        lambda shared: shared.parameters_of("reference")[0].requires_grad_(True),
    ],
    ids=["dropout", "half precision", "a reference that learns"],
)
def test_what_should_not_learn_is_seen(change):
    trainer = toy.trainer()
    assert checks.only_adapters_learn(trainer).holds is True
    change(trainer.shared)
    assert checks.only_adapters_learn(trainer).holds is False


def test_a_sampler_with_a_temperature_of_its_own_is_seen():
    class Hot(SlotDecoder):
        def generate(self, role, prompts, numbers, sampling):
            return super().generate(role, prompts, numbers, replace(sampling, temperature=1.5))

    shared = toy.shared_base()
    with pytest.raises(SelfCheckFailed, match="sampler and trainer agree"):
        toy.trainer(shared, decoder=Hot(shared)).run_update()


def test_an_adapter_that_is_not_its_file_is_seen(tmp_path):
    trainer = toy.trainer()
    trainer.shared.save("critic", tmp_path)
    assert doctor.same_as_file(trainer, "critic", str(tmp_path)).holds is True
    trainer.shared.heads["critic"].weight.data[0, 0] += 1e-3  # a lost head is the most reported fault
    assert doctor.same_as_file(trainer, "critic", str(tmp_path)).holds is False


def test_a_reward_that_scores_otherwise_than_in_training_is_seen(tmp_path):
    from pipeline.ppo.rewards import AdapterReward

    shared = toy.shared_base()
    trainer = toy.trainer(shared, reward=[AdapterReward(shared)])
    # no probes: nothing to say
    assert doctor.behaves_as_trained(trainer, "reward", str(tmp_path)).holds is None

    rows = probes.sequences(toy.VOCAB, pad=0)
    probes.write(str(tmp_path), rows, lambda ids: shared.score("reward", ids))
    assert doctor.behaves_as_trained(trainer, "reward", str(tmp_path)).holds is True
    shared.heads["reward"].weight.data.normal_()
    assert doctor.behaves_as_trained(trainer, "reward", str(tmp_path)).holds is False


def test_probes_hold_nothing_of_the_data_and_no_pad():
    rows = probes.sequences(50, pad=7)
    assert rows == probes.sequences(50, pad=7) and all(0 <= i < 50 and i != 7 for row in rows for i in row)


def test_gradients_that_checkpointing_changes_are_seen(monkeypatch):
    trainer, episodes, _ = rolled(gradient_checkpointing=True)
    assert doctor.checkpointing_agrees(trainer, episodes).holds is True
    accumulate = trainer.accumulate

    def wrong_when_checkpointed(*args, **keys):
        stats = accumulate(*args, **keys)
        if trainer.shared.gradient_checkpointing:
            trainer.shared.parameters_of("critic")[1].grad.mul_(2.3)
        return stats

    monkeypatch.setattr(trainer, "accumulate", wrong_when_checkpointed)
    assert doctor.checkpointing_agrees(trainer, episodes).holds is False


def test_a_base_that_learns_is_seen():
    trainer, episodes, _ = rolled()
    trainer.shared.base.get_input_embeddings().weight.requires_grad_(True)
    assert (
        verdicts(doctor.one_minibatch(trainer, episodes))[
            "gradients reach the learning roles and nothing else"
        ]
        is False
    )


# ------------------------------------------------------------------------------------------ the command line


def test_doctor_wants_a_ppo_job(tmp_path, capsys):
    stage("doctor", tmp_path, "mine", job="jobs/demo/sft.yaml", status=2)
    assert "doctor examines ppo jobs" in capsys.readouterr().err
