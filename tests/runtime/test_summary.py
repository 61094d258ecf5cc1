"""The end of a run on the terminal: a version without the alias is of use, and the summary says how."""

import pytest

from pipeline import registry
from pipeline.config import load_job
from pipeline.runtime.summary import print_summary


def ended(stage, alias, gate):
    job = {"gate": {"eval_accuracy": ">= 0.95"}, "mlflow": {"alias": "champion"}}
    result = {
        "stage": stage,
        "samples": [],
        "metrics": {},
        "adapter": "x",
        "job": job,
        "cost": {"gpu_hours": 0, "dollars": None, "tokens": 12, "dollars_per_1000_completions": None},
        "folder": "runs/x",
        "seconds": 1,
    }
    return result | {"registered_model": "mine-rm", "version": "3", "alias": alias, "gate": gate}


FAILED = "failed: eval_accuracy = 0.7, required >= 0.95"


def test_a_version_that_its_gate_kept_back_can_be_named(capsys):
    print_summary(ended("rm", None, FAILED), None)
    text = capsys.readouterr().out
    assert "registered              mine-rm v3  (gate failed: eval_accuracy" in text
    assert "@champion has not moved; name models:/mine-rm/3 to use this version" in text
    print_summary(ended("rm", "champion", "passed"), None)
    assert "has not moved" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "low", "high", "says"),
    [
        ("ppo", 0.41, 0.63, "  not better than before: win rate 0.52 (0.41 to 0.63); try a higher trainer.learning_rate, "),
        ("evaluate", 0.41, 0.63, "  not better than the baseline: win rate 0.52 (0.41 to 0.63)\n"),
        ("ppo", 0.2, 0.4, "  worse than before: "),
        ("ppo", 0.51, 0.7, None),
    ],
)  # fmt: skip
def test_a_win_rate_that_shows_no_gain_is_reported(stage, low, high, says, capsys):
    rates = {"eval_win_rate": 0.52, "eval_win_rate_low": low, "eval_win_rate_high": high}
    result = ended(stage, "champion", "passed")
    print_summary(result | {"metrics": rates}, None)
    printed = capsys.readouterr().out
    assert says in printed if says else "than before" not in printed


@pytest.mark.parametrize(
    ("stage", "metric", "low", "high"),
    [
        ("ppo", "eval_win_rate_low", 0.5, 0.51),  # an interval that contains one half shows no gain
        ("ppo", "eval_eos", 0.09, 0.1),
        ("sft", "eval_eos_accuracy", 0.09, 0.1),
    ],
)
def test_the_gate_of_own_rows_asks_for_a_gain_and_for_completions_that_end(stage, metric, low, high, in_root):
    gate, others = load_job(f"jobs/own/{stage}.yaml").gate, {"eval_win_rate_low": 0.51, "eval_eos": 1.0}
    assert [registry.evaluate_gate(gate, {**others, metric: value})[0] for value in (low, high)] == [
        False,
        True,
    ]
