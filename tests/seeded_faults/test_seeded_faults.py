"""Tests that self-checks name planted bugs, and that no self-check fails without a bug. `make faults` prints all results."""

import pytest
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


# These runs have self-checks that no other quick test has. tests/stages/test_stages.py runs each stage of the demo,
# test_other_models.py runs the stages in bf16, and tests/ppo/test_trainer.py runs each variant of PPO.
RUNS = [
    ("sft", ["trainer.packing=true"]),
    ("kto", ["trainer.bf16=true", "trainer.loss_type=apo_zero_unpaired"]),
    ("ppo", ["trainer.critic=head", "trainer.num_generations=4"]),
]


@pytest.mark.parametrize(("run", "settings"), RUNS, ids=str)
def test_no_self_check_fails_in_a_sound_run(run, settings):
    assert messages(run, *settings) == []
