"""The gate: what a rule may look like, and the metrics that it may name."""

import pytest
import toy_ppo as toy

from pipeline.config import OPERATORS, gates, parse_gate
from pipeline.ppo.rewards import FunctionReward


def test_gate_rules():
    assert (
        parse_gate(">= 0.95") == (">=", 0.95)
        and parse_gate("<1e-3") == ("<", 1e-3)
        and parse_gate("> -2") == (">", -2.0)
    )
    assert OPERATORS[">="](1.0, 1.0) and not OPERATORS[">"](1.0, 1.0)
    for wrong in ("0.95", "== 1", ">= ", ">= nan", ">= inf", ">= 1e400", 0.95, None, True, [">= 1"], {}):
        with pytest.raises(ValueError, match="expected a comparison"):
            parse_gate(wrong)


def test_ppo_logs_the_metrics_that_its_gate_may_name():
    """The table repeats names of the trainer, whose module imports torch: a mistake in a job file must not wait for that."""
    trainer = toy.trainer(reward=[FunctionReward(toy.low, name="reward")], total_episodes=16)
    trainer.train()
    assert set(trainer.history[-1]) == set(gates.UPDATE.split())
