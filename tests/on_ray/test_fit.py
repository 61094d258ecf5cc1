"""The TorchTrainer of a run."""

import pytest
from running import ROOT

from pipeline.config import load_job
from pipeline.on_ray import fit
from pipeline.runtime import resume


@pytest.mark.parametrize("embedded", [True, False])
def test_a_rank_waits_in_a_collective_for_one_that_loads_or_scores_for_longer_than_half_an_hour(
    embedded, monkeypatch, tmp_path
):
    monkeypatch.setattr(fit, "session_folder", lambda: str(tmp_path) if embedded else None)
    job = resume.named(
        load_job(ROOT / "jobs/demo/ppo.yaml", ["scaling.num_workers=1", f"run.storage_path={tmp_path}"])
    )
    trainer = fit._trainer(job, print, {}, {}, None)
    assert trainer.backend_config.timeout_s > 10_000_000
