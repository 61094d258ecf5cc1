"""The end of a run on the terminal: a version without the alias is of use, and the summary says how."""

import pytest

from pipeline import registry
from pipeline.config import load_job
from pipeline.runtime.summary import print_summary


def ended(stage, job_file, alias, gate):
    job = {"source": job_file, "gate": {"eval_accuracy": ">= 0.95"}, "mlflow": {"alias": "champion"}}
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


@pytest.mark.parametrize(
    ("stage", "file", "says"),
    [
        ("rm", "jobs/llama3-8b/rm.yaml", 'make ppo PROFILE=llama3-8b ARGS="reward=models:/mine-rm/3"'),
        ("sft", "jobs/demo/sft.yaml", 'make ppo ARGS="policy=models:/mine-rm/3"'),
        ("dpo", "elsewhere/dpo.yaml", 'make evaluate ARGS="policy=models:/mine-rm/3"'),
    ],
)
def test_a_version_that_its_gate_kept_back_is_named_for_the_next_stage(stage, file, says, capsys):
    print_summary(ended(stage, file, None, FAILED), None)
    text = capsys.readouterr().out
    assert "registered              mine-rm v3  (gate failed: eval_accuracy" in text
    assert f"@champion has not moved; to go on with this version:  {says}" in text
    print_summary(ended(stage, file, "champion", "passed"), None)
    assert "make" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "low", "high", "says"),
    [
        (
            "ppo",
            0.41,
            0.63,
            "  not better than before: win rate 0.52 (0.41 to 0.63); try a higher trainer.learning_rate, ",
        ),
        ("evaluate", 0.41, 0.63, "  not better than the baseline: win rate 0.52 (0.41 to 0.63)\n"),
        ("ppo", 0.2, 0.4, "  worse than before: "),
        ("ppo", 0.51, 0.7, None),
    ],
)
def test_a_win_rate_that_shows_no_gain_is_reported(stage, low, high, says, capsys):
    rates = {"eval_win_rate": 0.52, "eval_win_rate_low": low, "eval_win_rate_high": high}
    result = ended(stage, f"jobs/own/{stage}.yaml", "champion", "passed")
    print_summary(result | {"metrics": rates}, None)
    printed = capsys.readouterr().out
    assert says in printed if says else "than before" not in printed


def test_an_interval_that_contains_one_half_does_not_pass_the_gate_of_own_rows(in_root):
    gate = load_job("jobs/own/ppo.yaml").gate
    assert not registry.evaluate_gate(gate, {"eval_win_rate_low": 0.5, "eval_eos": 1.0})[0]
    assert registry.evaluate_gate(gate, {"eval_win_rate_low": 0.51, "eval_eos": 1.0})[0]


@pytest.mark.parametrize(("stage", "metric"), [("sft", "eval_eos_accuracy"), ("ppo", "eval_eos")])
def test_a_policy_that_does_not_end_does_not_pass_the_gate_of_own_rows(stage, metric, in_root):
    gate = load_job(f"jobs/own/{stage}.yaml").gate
    others = {"eval_win_rate_low": 0.51}
    assert not registry.evaluate_gate(gate, others | {metric: 0.09})[0]
    assert registry.evaluate_gate(gate, others | {metric: 0.1})[0]
