"""Planted bugs are named by the self-checks, and sound runs raise no alarm. `make faults` prints all of them."""

import re

import faulty_runs
import known_faults
import pytest
import toy_ppo as toy

from pipeline.ppo.selfcheck import doctor

QUICK = {
    "ppo": [
        "the adapter is not switched",
        "LoRA's scaling is lost on loading",
        "prompts lack the generation prompt",
        "completions are greedy",
        "the sampler keeps the first policy",
        "log-probs are read one place late",
        "values are read after the action",
        "a head's values are read after the action",
        "completions in one row see each other",
        "rewards are not normalised as the reward model says",
        "the KL is rewarded instead of paid for",
        "the policy loss has the wrong sign",
        "the optimizer lost the policy's parameters",
        "groups are made of other prompts' completions",
        "sampling stops on one of two end tokens",
    ],
    "sft": [
        "the loss is over prompts, too",
        "the end token is not trained",
        "rows begin with two begin tokens",
        "the collator masks the end token",
        "packed rows attend to each other",
        "pad is the end token",
        "sft's optimizer lost the adapter",
    ],
    "rm": [
        "the head is frozen and random",
        "pooling stops before the end token",
        "truncation makes both sides equal",
    ],
    "dpo": [
        "dpo's reference is the bare base",
        "dpo's log-probs include the prompt",
        "dpo's policy is a new adapter on the bare base",
    ],
    "kto": [
        "kto's labels are swapped in the loss",
        "kto's loss is over the prompts, too",
        "kto's KL term is over the rows' own completions",
    ],
}
NAMED = [name for names in QUICK.values() for name in names]


def parameters():
    for number, fault in enumerate(known_faults.FAULTS):
        slow = [] if fault.name in NAMED else [pytest.mark.slow]
        if not fault.unnamed:
            yield pytest.param(number, id=fault.name, marks=slow)


@pytest.mark.parametrize("number", parameters())
def test_a_planted_fault_is_named(number):
    fault = known_faults.FAULTS[number]
    said = faulty_runs.visit(fault, number)
    assert any(re.search(fault.cause, line, re.DOTALL) for line in said), said


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        ("sft", []),
        ("sft", ["trainer.packing=true"]),
        ("rm", []),
        ("rm", ["trainer.bf16=true"]),
        ("dpo", []),
        ("dpo", ["trainer.bf16=true"]),
        ("kto", []),
        ("kto", ["trainer.bf16=true", "trainer.loss_type=apo_zero_unpaired"]),
        ("ppo", []),
        ("ppo", ["trainer.critic=head", "trainer.num_generations=4"]),
        ("ppo", ["trainer.bf16=true"]),
    ],
    ids=str,
)
def test_a_sound_run_is_quiet(run, settings):
    if run == "ppo":
        assert faulty_runs.of_ppo(*settings, inputs=faulty_runs.adapters()) == []
    else:
        assert faulty_runs.of_stage(run, *settings, inputs=faulty_runs.adapters()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", toy.KINDS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
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
    ],
    ids=str,
)
def test_no_architecture_and_no_variant_raises_an_alarm(kind, settings):
    critic = "advantage_estimator" not in settings and settings.get("critic", "adapter")
    trainer = toy.trainer(toy.shared_base(kind, critic=critic), **settings)
    findings, _ = doctor.examine(trainer, {})
    assert [finding for finding in findings if finding.holds is False] == []
    toy.trainer(toy.shared_base(kind, critic=critic), **settings).train()


def test_every_quick_exhibit_is_there():
    assert {fault.name for fault in known_faults.FAULTS} >= set(NAMED)
    assert len(known_faults.FAULTS) == len({fault.name for fault in known_faults.FAULTS}) >= 60
