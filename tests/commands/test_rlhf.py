"""The table at the end of `rlhf`, and which overrides reach which stage."""

import re

import pytest

from pipeline.commands import rlhf
from pipeline.config.stages import STAGE
from pipeline.errors import InputError


def test_the_table_shows_the_first_headline_figure_of_each_stage():
    results = [
        {
            "stage": stage,
            "metrics": {STAGE[stage].headline[0].before: 0.25, STAGE[stage].headline[0].after: 0.5},
            "registered_model": f"rlhf-{stage}",
            "version": "1",
            "seconds": 3.0,
            "folder": f"runs/{stage}",
        }
        for stage in rlhf.ORDER
    ]
    text = rlhf.table(results, "jobs/demo", seconds=12.0, page=None)
    for stage in rlhf.ORDER:
        assert re.search(
            rf"^{stage} +{STAGE[stage].headline[0].label} .*0\.500 +rlhf-{stage} v1 +3$", text, re.MULTILINE
        )
    assert "12 s in all" in text and "runs/evaluate/result.json" in text


def test_the_table_shows_what_the_profile_has():
    """Without a judge PPO's first figure is the reward, and what to type next is of that profile."""
    results = [
        {
            "stage": "ppo",
            "metrics": {"before_reward": 0.25, "eval_reward": 0.5},
            "folder": "s3://b/runs/ppo-1",
            "tracking_uri": "http://mlflow:5000",
        },
        {
            "stage": "evaluate",
            "metrics": {"eval_win_rate": 0.75},
            "folder": "s3://b/runs/evaluate-1",
            "tracking_uri": "http://mlflow:5000",
        },
    ]
    text = rlhf.table(results, "jobs/llama3-8b", seconds=12.0, page=None)
    assert re.search(r"^ppo +reward +0\.250 +0\.500 ", text, re.MULTILINE)
    assert re.search(r"^evaluate +reward win rate +0\.750 ", text, re.MULTILINE)
    assert "jobs/llama3-8b/ppo.yaml" in text and 'make ppo PROFILE=llama3-8b ARGS="' in text
    assert "http://mlflow:5000 " in text and "make ui" not in text and "demo" not in text
    assert "python -m pipeline ppo mine/x/ppo.yaml" in rlhf.table(results, "mine/x", seconds=1.0, page=None)


def test_one_name_for_four_runs_is_refused_before_the_first(in_root, tmp_path):
    with pytest.raises(InputError, match=r"run\.name: found 'x' for several stages.*sft\.run\.name="):
        rlhf.run("jobs/demo", ["run.name=x", f"run.storage_path={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_an_override_reaches_every_stage_or_the_one_it_names():
    given = ["trainer.seed=2", "ppo.trainer.kl_coef=0.1"]
    assert rlhf.overrides_of("ppo", given) == ["trainer.seed=2", "trainer.kl_coef=0.1"]
    assert rlhf.overrides_of("sft", given) == ["trainer.seed=2"]
    with pytest.raises(InputError, match="`rlhf` has no stage 'dpo'"):
        rlhf.overrides_of("sft", ["dpo.trainer.beta=0.3"])
