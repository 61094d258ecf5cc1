"""Tests that every self-check passes if a job has no fault. tools/seeded_faults tests that each check finds its fault."""

import pytest
import torch
import toy_ppo as toy

from pipeline.models import probes
from pipeline.ppo.selfcheck import roles
from pipeline.ppo.selfcheck import rollout as checks


def verdicts(results):
    return {result.check: result.holds for result in results}


@pytest.mark.parametrize(
    "settings",
    [
        {"missing_eos_penalty": 1.0, "temperature": 0.7, "min_new_tokens": 3},
        {"bootstrap_truncated": True, "gamma": 0.9, "lam": 0.5, "gradient_checkpointing": True},
        {"advantage_estimator": "rloo", "num_generations": 2, "mask_truncated_completions": True},
        {"advantage_estimator": "remax", "kl_in": "loss", "kl_estimator": "k3"},
    ],
    ids=str,
)
def test_a_sound_job_passes_every_check(settings, tmp_path):
    trainer = toy.trainer(**settings)
    before = toy.weights(trainer)
    for role in trainer.shared.roles:
        trainer.shared.save(role, tmp_path / role)
    trainer.folders = {role: str(tmp_path / role) for role in trainer.shared.roles if role != "reward"}
    results = checks.check_first_rollout(trainer, trainer.make_experience().episodes)
    assert False not in verdicts(results).values(), results
    assert list(verdicts(results).values()).count(True) >= 8
    assert torch.equal(before, toy.weights(trainer))  # the self-checks must not change the weights
    assert all(p.grad is None for p in trainer.shared.parameters())


@pytest.mark.parametrize(
    ("precision", "off", "holds"),
    [
        ("fp32", 0.05, False),
        ("half", 0.05, True),
        ("half", 0.2, False),
        ("quantized", 0.2, None),
        (None, 0.2, None),
    ],
)
def test_outputs_are_compared_as_closely_as_the_precision_of_the_training_allows(
    precision, off, holds, tmp_path
):
    trainer = toy.trainer()  # the training precision is fp32
    trainer.shared.save("policy", tmp_path)

    def output(ids):
        return trainer.shared.mean_logprob("policy", ids) + off

    probes.write_probes(str(tmp_path), toy.VOCAB, 0, output, precision)
    assert roles.behaves_as_trained(trainer, "policy", str(tmp_path)).holds is holds


def test_probes_contain_no_data_and_no_pad_token():
    rows = probes.probe_sequences(50, pad=7)
    assert rows == probes.probe_sequences(50, pad=7) and all(
        0 <= i < 50 and i != 7 for row in rows for i in row
    )
