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
    text = rlhf.table(results, seconds=12.0, page=None)
    for stage in rlhf.ORDER:
        assert re.search(
            rf"^{stage} +{STAGE[stage].headline[0].label} .*0\.500 +rlhf-{stage} v1 +3$", text, re.MULTILINE
        )
    assert "12 s in all" in text and "runs/evaluate/result.json" in text


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
