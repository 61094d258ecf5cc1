"""Tests which names and overrides `run` uses for its stages. tests/test_readme.py runs the command."""

import pytest

from pipeline.commands import run as rlhf
from pipeline.errors import InputError


def test_the_summary_shows_the_results_of_the_profile():
    """Without a judge, the first metric shown for PPO is the reward.

    The next commands that `run` suggests use the profile of the run.
    """
    common = {"tracking_uri": "http://mlflow:5000", "folder": "s3://b/runs/x"}
    ppo = {"stage": "ppo", "metrics": {"initial_reward": 0.25, "eval_reward": 0.5}}
    results = [ppo | common, {"stage": "evaluate", "metrics": {"eval_win_rate": 0.75}} | common]
    text = rlhf.end_of_profile(results, "jobs/llama3-8b", seconds=12.0, page=None)
    assert "Done in 12 s. ppo: reward 0.25 -> 0.5; evaluate: reward win rate 0.75\n" in text
    assert "jobs/llama3-8b/ppo.yaml" in text and 'make ppo PROFILE=llama3-8b ARGS="' in text
    assert "http://mlflow:5000 " in text and "make ui" not in text and "demo" not in text
    assert "python -m pipeline ppo mine/x/ppo.yaml" in rlhf.end_of_profile(
        results, "mine/x", seconds=1.0, page=None
    )


def test_one_name_names_every_stage_that_has_no_name_of_its_own(in_root):
    jobs = rlhf.load_profile("jobs/demo", ["run.name=x", "ppo.run.name=mine"], "now")
    assert [job.run.name for job in jobs.values()] == ["sft-x", "rm-x", "mine", "evaluate-x"]
    assert rlhf.load_profile("jobs/demo", [], "now")["rm"].run.name == "rm-now"
    assert rlhf.load_profile("jobs/demo", [])["rm"].run.name is None
    with pytest.raises(InputError, match=r"run\.name: runs/x would be the run folder of several stages"):
        rlhf.load_profile("jobs/demo", ["sft.run.name=x", "rm.run.name=x"])


def test_an_override_reaches_every_stage_or_the_one_it_names():
    given = ["trainer.seed=2", "ppo.trainer.kl_coef=0.1"]
    assert rlhf.overrides_of("ppo", given) == ["trainer.seed=2", "trainer.kl_coef=0.1"]
    assert rlhf.overrides_of("sft", given) == ["trainer.seed=2"]
    with pytest.raises(InputError, match="`run` has no stage 'dpo'"):
        rlhf.overrides_of("sft", ["dpo.trainer.beta=0.3"])
