"""Tests that self-checks name planted bugs, and that no self-check fails without a bug. `make faults` prints all results."""

import pytest
import toy_ppo as toy
from faulty_runs import messages
from known_faults import FAULTS


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[] if fault.quick else pytest.mark.slow)
        for fault in FAULTS
        if not fault.unnamed
    ],
)
def test_a_planted_fault_is_named(fault):
    said = messages(fault.run, *fault.settings.split(), fault=fault)
    assert fault.is_named(said), said


# The quick cases cover self-checks that no other quick test covers. tests/stages/test_stages.py runs each stage of the demo, and
# test_other_models.py runs the stages in bf16.
QUICK = [
    ("sft", ["trainer.packing=true"]),
    ("kto", ["trainer.bf16=true", "trainer.loss_type=apo_zero_unpaired"]),
    ("ppo", ["trainer.critic=head", "trainer.num_generations=4"]),
]
SLOW = [(stage, settings) for stage in ("rm", "dpo", "ppo") for settings in ([], ["trainer.bf16=true"])]


@pytest.mark.parametrize(
    ("run", "settings"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in [("sft", []), ("kto", []), *SLOW])],
    ids=str,
)
def test_no_self_check_fails_in_a_sound_run(run, settings):
    assert messages(run, *settings) == []


VARIANTS = [
    {"bf16": True},
    {"temperature": 0.7, "min_new_tokens": 3, "missing_eos_penalty": 1.0},
    {"advantage_estimator": "rloo", "num_generations": 4, "loss_aggregation": "sequence"},
    {"advantage_estimator": "grpo", "num_generations": 4, "kl_in": "loss", "kl_estimator": "k3"},
    {"advantage_estimator": "grpo", "num_generations": 4, "importance_sampling_level": "sequence"},
    {"advantage_estimator": "remax", "entropy_coef": 0.01},
    {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "dual_clip": 3.0},
    {"normalize_values": True, "whiten_rewards": True, "bootstrap_truncated": True},
    {"mask_truncated_completions": True, "kl_estimator": "abs", "critic_warmup_steps": 1},
    {"gradient_checkpointing": True, "kl_estimator": "k2", "kl_controller": "adaptive"},
    {"critic": "head"},
    {"critic": "head", "num_generations": 4, "bf16": True, "gradient_checkpointing": True},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {}) for kind in toy.KINDS), *(("llama", one) for one in VARIANTS), ("gemma2", VARIANTS[-1])],
    ids=str,
)
def test_no_self_check_fails_with_another_architecture_or_variant(kind, settings):
    critic = "advantage_estimator" not in settings and settings.get("critic", "adapter")
    toy.trainer(toy.shared_base(kind, critic=critic), **settings).train()


def test_no_two_faults_have_the_same_name():
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) >= 60
