"""The gate: what a rule may look like, and the metrics that it may name."""

import pytest
import toy_ppo as toy
from running import ROOT

from pipeline.config import OPERATORS, gates, load_job, parse_gate, rules
from pipeline.errors import InputError
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


def test_a_gate_on_held_out_rows_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    taken_away = load_job("jobs/demo/sft.yaml", ["data.eval=null"])  # the file's gate only moves no alias
    assert "gate.eval_loss: needs held-out rows" in " ".join(rules.warnings(taken_away))
    with pytest.raises(
        InputError, match=r"gate\.eval_loss: needs held-out rows .*set data\.eval_fraction=0\.1"
    ):
        load_job("jobs/demo/sft.yaml", ["data.eval=null", "gate.eval_loss=<=1"])
    (tmp_path / "rm.yaml").write_text(
        f"extends: {ROOT}/jobs/own/rm.yaml\ndata: {{eval_fraction: 0}}\ngate: {{eval_accuracy: '<= 1'}}\n"
    )
    with pytest.raises(InputError, match=r"rm\.yaml:3: gate\.eval_accuracy: needs held-out rows"):
        load_job(tmp_path / "rm.yaml")
