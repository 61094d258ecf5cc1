"""A job on top of another one (`extends`), and a job without held-out rows."""

import pytest
from running import ROOT

from pipeline.config import load_job
from pipeline.config.stages import STAGE
from pipeline.errors import InputError


def write(path, text):
    path.write_text(text)
    return path


def test_a_job_extends_another_key_by_key(tmp_path):
    base = write(tmp_path / "base.yaml", "stage: sft\nmodel: {name_or_path: m}\ndata: {train: a, seed: 3}\n")
    path = write(tmp_path / "mine.yaml", "extends: base.yaml\ndata:\n  train: b\n  sed: 4\n")
    with pytest.raises(InputError, match=r"mine\.yaml:4: data\.sed: unknown key; did you mean data\.seed"):
        load_job(path)
    write(path, "extends: base.yaml\ndata:\n  train: b\n")
    job = load_job(path, ["data.max_length=7"])
    assert (job.data.train, job.data.seed, job.data.max_length, job.source) == ("b", 3, 7, str(path))
    write(base, "stage: sft\nmodel: {name_or_path: m}\ndata: {train: a, seed: x}\n")
    with pytest.raises(InputError, match=r"base\.yaml:3: data\.seed"):
        load_job(path)
    third = write(tmp_path / "third.yaml", "extends: mine.yaml\n")
    with pytest.raises(
        InputError, match=r"third\.yaml:1: extends: found 'mine\.yaml', which extends a job itself"
    ):
        load_job(third)


def test_of_several_extended_files_later_ones_win(tmp_path):
    write(tmp_path / "one.yaml", "stage: sft\nmodel: {name_or_path: m}\ndata: {train: a, seed: 3}\n")
    write(tmp_path / "two.yaml", "data: {seed: 4, max_length: 9}\nlora: {rr: 8}\n")
    path = write(tmp_path / "mine.yaml", "extends: [one.yaml, two.yaml]\ndata: {max_length: 7}\n")
    with pytest.raises(InputError, match=r"two\.yaml:2: lora\.rr: unknown key"):
        load_job(path)
    write(tmp_path / "two.yaml", "data: {seed: 4, max_length: 9}\nlora: {r: 8}\n")
    job = load_job(path)
    assert (job.data.train, job.data.seed, job.data.max_length, job.lora) == ("a", 4, 7, {"r": 8})
    for wrong in ("[]", "[one.yaml, 2]", "{a: b}"):
        write(path, f"extends: {wrong}\n")
        with pytest.raises(InputError, match="expected one or several job files"):
            load_job(path)


@pytest.mark.parametrize("stage", [name for name, facts in STAGE.items() if facts.learns])
def test_nothing_more_than_data_eval_is_typed_to_train_without_held_out_rows(stage, monkeypatch):
    monkeypatch.chdir(ROOT)
    job = load_job(f"jobs/demo/{stage}.yaml", ["data.eval=null"], stage)
    assert job.trainer.get("eval_strategy", "no") == "no" and not job.trainer.get("eval_on_start")
    assert not job.trainer.get("eval_steps")
    key = "eval_strategy=epoch" if STAGE[stage].trl else "eval_steps=2"
    with pytest.raises(InputError, match="there is nothing to evaluate on"):
        load_job(f"jobs/demo/{stage}.yaml", ["data.eval=null", f"trainer.{key}"], stage)


def test_an_empty_section_takes_the_place_of_the_others(tmp_path):
    (tmp_path / "mine.yaml").write_text(f"extends: {ROOT}/jobs/demo/sft.yaml\ngate: {{}}\n")
    assert load_job(ROOT / "jobs/demo/sft.yaml").gate and not load_job(tmp_path / "mine.yaml").gate
