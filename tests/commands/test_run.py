"""Tests which names and overrides the stages of `run` get. tests/test_readme.py runs the command."""

import pytest

from pipeline.commands import run as rlhf
from pipeline.errors import InputError


def test_one_name_names_every_stage_that_has_no_name_of_its_own(in_root):
    jobs = rlhf.load("jobs/demo", ["run.name=x", "ppo.run.name=mine"], "now")
    assert [job.run.name for job in jobs.values()] == ["sft-x", "rm-x", "mine", "evaluate-x"]
    assert rlhf.load("jobs/demo", [], "now")["rm"].run.name == "rm-now"
    assert rlhf.load("jobs/demo", [])["rm"].run.name is None


def test_an_override_reaches_every_stage_or_the_one_it_names():
    given = ["trainer.seed=2", "ppo.trainer.kl_coef=0.1"]
    assert rlhf.overrides_of("ppo", given) == ["trainer.seed=2", "trainer.kl_coef=0.1"]
    assert rlhf.overrides_of("sft", given) == ["trainer.seed=2"]
    with pytest.raises(InputError, match="`run` has no stage 'dpo'"):
        rlhf.overrides_of("sft", ["dpo.trainer.beta=0.3"])
