"""Tests the summary after a run, which says how to use a model version that has no alias."""

import pytest

from pipeline.run.summary import print_summary

COST = {"gpu_hours": 0, "dollars": None, "tokens": 12, "dollars_per_1000_completions": None}
JOB = {"gate": {"eval_accuracy": ">= 0.95"}, "mlflow": {"alias": "champion"}}
PASSED = {"alias": "champion", "gate": "passed"}
FAILED = {"alias": None, "gate": "failed: eval_accuracy = 0.7, required >= 0.95"}


def rates(low, high):
    return PASSED | {"metrics": {"eval_win_rate": 0.52, "eval_win_rate_low": low, "eval_win_rate_high": high}}


@pytest.mark.parametrize(
    ("stage", "ended", "says", "never"),
    [
        ("rm", FAILED, "@champion has not moved; name models:/mine-rm/3 to use this version", "than before"),
        ("rm", PASSED, "mine-rm v3", "has not moved"),
        ("ppo", rates(0.41, 0.63), "not better than before: win rate 0.52 (0.41 to 0.63); try a higher", "worse"),
        ("evaluate", rates(0.41, 0.63), "not better than the baseline: win rate 0.52 (0.41 to 0.63)\n", "worse"),
        ("ppo", rates(0.2, 0.4), "worse than before: ", "try a higher"),
        ("ppo", rates(0.51, 0.7), "mine-rm v3", "than before"),
        ("rm", PASSED | {"champion": {"metrics": {}, "note": "worse than v2: 1"}}, "\n  worse than v2: 1\n", "not"),
    ],
)  # fmt: skip
def test_warnings_of_a_summary(stage, ended, says, never, capsys):
    result = {"stage": stage, "samples": [], "metrics": {}, "adapter": "x", "job": JOB, "cost": COST}
    version = {"registered_model": "mine-rm", "version": "3"}
    print_summary(result | {"folder": "runs/x", "seconds": 1, **version, **ended})
    printed = capsys.readouterr().out
    assert says in printed and never not in printed


def test_a_space_separates_a_long_name_or_value_from_the_next_column(capsys):
    name = "eval_rm_probe/polite_closing"
    metrics = {"initial_reward": -0.0001234, "eval_reward": -0.00001234, name: 0.4445}
    job = {**JOB, "gate": {name: "<= 0.5", "eval_reward": ">= 0"}}
    result = {"stage": "ppo", "samples": [], "metrics": metrics, "adapter": "x", "job": job, "cost": COST}
    version = {"registered_model": "mine-ppo", "version": "3", **PASSED}
    print_summary(result | {"folder": "runs/x", "seconds": 1, **version})
    printed = capsys.readouterr().out
    assert f"{name} 0.4445 " in printed and "-0.0001234 -> -1.234e-05 gate >= 0" in printed
