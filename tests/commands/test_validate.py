"""Tests that `validate` works without the GPUs and the input models that the run itself needs."""

import pytest
from running import ROOT

from pipeline.commands import validate
from pipeline.errors import InputError
from pipeline.job import load_job

ROWS = "jobs/demo/data"


def plan_reading(stage, tmp_path, capsys, *overrides, profile="demo"):
    job = load_job(ROOT / f"jobs/{profile}/{stage}.yaml", [f"run.storage_path={tmp_path}", *overrides], stage)
    return validate.run(job), capsys.readouterr().out


def test_a_ppo_job_needs_no_registered_models(tmp_path, capsys):
    report, text = plan_reading("ppo", tmp_path, capsys, "data.train=jobs/demo/data/prompts_eval.jsonl")
    assert report["splits"]["train"]["kept"] == 120
    for name in ("policy: models:/rlhf-sft@champion", "reward: models:/rlhf-rm@champion"):
        assert f"note: {name}: no registered model" in text
    rows = ["model.name_or_path=jobs/demo/model", "data.max_length=100", "trainer.response_length=40"]
    _, text = plan_reading("ppo", tmp_path, capsys, *rows, f"data.train={ROWS}/prompts.jsonl", profile="own")
    assert "run `make sft PROFILE=own` first" in text and "run `make rm PROFILE=own` first" in text
    with pytest.raises(InputError, match="No module named 'nowhere'"):
        plan_reading("ppo", tmp_path, capsys, "reward=python:nowhere:polite")


def test_a_job_for_gpus_is_validated_without_gpus(tmp_path, capsys):
    overrides = ["model.name_or_path=jobs/demo/model", "data.max_length=256", "data.eval_fraction=0"]
    overrides += [f"data.{name}={ROWS}/demonstrations_eval.jsonl" for name in ("train", "eval")]
    report, text = plan_reading("sft", tmp_path, capsys, *overrides, profile="llama3-8b")
    assert report["splits"]["train"]["kept"] == 60
    assert "note: the run cannot start on this machine: scaling.use_gpu: " in text


def test_rows_are_read_without_ray(tmp_path, in_root, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    report = validate.run(load_job("jobs/demo/sft.yaml", [f"run.storage_path={tmp_path}"], "sft"))
    assert report["splits"]["train"]["kept"] == 500


def test_a_job_that_reads_no_rows_is_an_error(tmp_path, capsys):
    with pytest.raises(InputError, match="`export` reads no rows"):
        plan_reading("export", tmp_path, capsys)
