"""What Ray Train is told about a run."""

from types import SimpleNamespace

import pytest
from running import ROOT

from pipeline.config import load_job
from pipeline.runtime import driver


@pytest.mark.parametrize("embedded", [True, False])
def test_a_rank_waits_in_a_collective_for_one_that_loads_or_scores_for_longer_than_half_an_hour(
    embedded, monkeypatch, tmp_path
):
    monkeypatch.setattr(driver.embedded, "session_folder", lambda: str(tmp_path) if embedded else None)
    job = driver.name_run(
        load_job(ROOT / "jobs/demo/ppo.yaml", ["scaling.num_workers=1", f"run.storage_path={tmp_path}"])
    )
    trainer = driver._torch_trainer(SimpleNamespace(job=job), {}, print, None)
    assert trainer.backend_config.timeout_s > 10_000_000
