"""Tests which job may resume a run, and which process may write into the run's folder. Errors leave the folder unchanged."""

import os
import re
import shutil

import pytest
from running import ROOT
from settled import work_of

from pipeline import run_folder
from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.job.identity import identity_of
from pipeline.models.tokenizer import load_tokenizer
from pipeline.registry import lineage
from pipeline.registry.lineage import folder_digests
from pipeline.run import checkpoints, resume
from pipeline.run.launch import write_result
from pipeline.run.resume import owned_folder, owner_files
from pipeline.settle import inputs
from pipeline.settle.identity import with_run_name
from pipeline.settle.work import Input
from pipeline.system import lease

BATCH = ["data.batch_size=16", "trainer.per_device_train_batch_size=8"]
PPO = ["policy=base", "reward=python:bad_rewards:length", "judge=null"]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """Returns a storage path with an sft run and a ppo run that stopped after their first checkpoint."""
    folder = tmp_path_factory.mktemp("halfway")
    before = os.getcwd()
    os.chdir(ROOT)
    for verb, more in (("sft", BATCH), ("ppo", PPO)):
        place = [f"run.storage_path={folder}", f"run.name={verb}"]
        job = load_job(f"jobs/demo/{verb}.yaml", [*place, *more], verb)
        rows = {"train": "sha256:rows", "trainer.advantage_estimator": "sha256:code"}
        resume.record_start(identity_of(with_run_name(job)), {}, "sha256:base", rows)
        checkpoint = folder / verb / "checkpoint_00000010"
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text("{}")
        checkpoints.seal_checkpoint(str(folder / verb), checkpoint.name, folder_digests(str(checkpoint)))
    os.chdir(before)
    return folder


@pytest.mark.parametrize(
    ("verb", "overrides", "says"),
    [
        ("sft", ["trainer.learning_rate=0.5"], r"trainer\.learning_rate=0\.002 \(now 0\.5\).*run\.overwrite=true.*may change, such as mlflow, "),
        ("sft", ["trainer.adam_beta2=0.9"], r"trainer\.adam_beta2=not given \(now 0\.9\)"),
        ("ppo", ["reward=python:bad_rewards:nan"], r'reward="python:bad_rewards:length"'),
        ("sft", ["trainer.seed=2", "lora.r=8"], r"lora\.r=16 \(now 8\), trainer\.seed=1 \(now 2\) and cannot"),
    ],
)  # fmt: skip
def test_a_changed_job_does_not_continue_a_checkpoint(verb, overrides, says, halfway, in_root, capsys):
    more = BATCH if verb == "sft" else PPO
    place = [f"run.storage_path={halfway}", f"run.name={verb}"]
    before = folder_digests(str(halfway / verb))
    assert main([verb, f"jobs/demo/{verb}.yaml", *place, *more, *overrides]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"^error: run\.name: .* began with {says}", error, re.DOTALL), error
    assert folder_digests(str(halfway / verb)) == before


def test_keys_that_do_not_affect_results_may_change(halfway, in_root):
    others = [
        "run.max_failures=3", "trainer.logging_steps=1", "trainer.save_strategy=steps", "trainer.save_steps=7",
        "trainer.per_device_train_batch_size=4", "gate.eval_loss=<= 3", "scaling.num_workers=2",
        "trainer.gradient_checkpointing=true", "mlflow.alias=challenger",
    ]  # fmt: skip
    assert resumable(job_of(halfway, *BATCH, *others))


def test_evaluation_keys_must_stay_if_they_decide_what_is_registered(halfway, tmp_path, in_root):
    """Only if evaluations decide which adapter is registered, a resumed run must keep run.* and the evaluation keys."""
    folder = shutil.copytree(halfway, tmp_path / "copy")
    begun = [*BATCH, "run.load_best_model_at_end=true", "trainer.eval_strategy=steps", "trainer.eval_steps=5"]
    for left, change, says in [
        (BATCH, "run.load_best_model_at_end=true", r"run\.load_best_model_at_end=false \(now true\)"),
        (BATCH, "run.early_stopping_patience=3", r"run\.early_stopping_patience=not given \(now 3\)"),
        (BATCH, "run.stop_if.eval_loss=< 1", r'run\.stop_if\.eval_loss=not given \(now "< 1"\)'),
        (begun, "trainer.eval_steps=7", r"trainer\.eval_steps=5 \(now 7\)"),
        # Without data.batch_size, the micro-batch and the number of workers decide the batch.
        (["data.batch_size=null"], "trainer.per_device_train_batch_size=8", r"batch_size=16 \(now 8\)"),
        (["data.batch_size=null"], "scaling.num_workers=2", r"num_workers=0 \(now 2\)"),
    ]:
        resume.record_start(job_of(folder, *left), {}, "b", {})
        with pytest.raises(InputError, match=says):
            resumable(job_of(folder, *left, change))
        assert resumable(job_of(folder, *left, "run.num_to_keep=5"))


@pytest.mark.parametrize(("loss", "combines"), [("sigmoid", False), ("[sigmoid, sft]", True), ("aot", True)])
def test_a_loss_that_combines_rows_depends_on_the_micro_batch(loss, combines, in_root):
    """TRL computes such a loss over a micro-batch, so another size changes the gradient."""
    jobs = [
        load_job(
            "jobs/demo/dpo.yaml",
            [*BATCH, f"trainer.loss_type={loss}", f"trainer.per_device_train_batch_size={n}"],
        )
        for n in (8, 4)
    ]
    old, new = (identity_of(with_run_name(job)) for job in jobs)
    assert ("trainer.per_device_train_batch_size" in resume.blocking_changes(old.settings, new)) == combines


def resumable(run):
    return resume.resumable_job(resume.find_earlier(run))


def job_of(folder, *overrides):
    given = [f"run.storage_path={folder}", "run.name=sft", *overrides]
    return identity_of(with_run_name(load_job("jobs/demo/sft.yaml", given, "sft")))


def test_other_versions_of_libraries_are_reported(halfway, tmp_path, in_root, monkeypatch, capsys):
    folder, job = shutil.copytree(halfway, tmp_path / "copy"), job_of(tmp_path / "copy", *BATCH)
    resume.record_start(job, {}, "b", {})
    now = lineage.versions()
    assert resumable(job) and "began with" not in capsys.readouterr().out
    monkeypatch.setattr(lineage, "versions", lambda: now | {"torch": "99.1"})
    assert resumable(job_of(folder, *BATCH))
    assert f"warning: 'sft' began with torch {now['torch']} (now 99.1), so" in capsys.readouterr().out


def test_without_a_checkpoint_the_job_may_still_be_edited(halfway, tmp_path, in_root, capsys):
    folder = shutil.copytree(halfway, tmp_path / "copy")
    shutil.rmtree(folder / "sft/checkpoint_00000010")
    assert not resumable(job_of(folder, *BATCH, "trainer.learning_rate=0.5"))
    assert "starts over: it began with trainer.learning_rate=" in capsys.readouterr().out
    job = job_of(folder, *BATCH)
    found = resumable(job)
    assert found, "the same job goes on with its MLflow run"
    assert not resume.same_content(found, job, "sha256:base", {"train": "sha256:edited"})


def test_changed_content_under_the_same_path_is_detected(halfway, in_root):
    job = job_of(halfway, *BATCH)
    found = resumable(job)
    assert resume.same_content(found, job, "sha256:base", {"train": "sha256:rows"})
    for base, rows, says in (
        ("sha256:other", {}, r"content of model\.name_or_path \(jobs/demo/model\) has changed since 'sft'"),
        ("sha256:base", {"train": "sha256:edited"}, r"content of data\.train has changed .*run\.overwrite="),
        ("sha256:base", {"trainer.advantage_estimator": "x"}, r"content of trainer\.advantage_estimator has"),
    ):
        with pytest.raises(InputError, match=says):
            resume.same_content(found, job, base, rows)


def test_a_run_does_not_resume_with_another_tokenizer_in_the_folder_of_the_base(halfway, tmp_path, in_root):
    folder, job = shutil.copytree(halfway, tmp_path / "copy"), job_of(tmp_path / "copy", *BATCH)
    tokenizer = load_tokenizer("jobs/demo/model")
    resume.record_start(job, {}, "sha256:base", resume.digest_tokenizer(tokenizer))
    found = resumable(job_of(folder, *BATCH))
    assert resume.same_content(found, job, "sha256:base", resume.digest_tokenizer(tokenizer))
    tokenizer.eos_token = tokenizer.decode(5)
    with pytest.raises(InputError, match=r"the tokenizer or the chat template \(.*\) has changed"):
        resume.same_content(found, job, "sha256:base", resume.digest_tokenizer(tokenizer))


def digests(job):
    given = {name: Input(at, "function") for name, at in job.inputs.items() if at.startswith("python:")}
    return inputs.digests_of_functions(work_of(job, inputs=given))


def test_an_edited_python_reward_counts_as_changed_content(halfway, tmp_path, in_root, monkeypatch):
    """Without this error, `collect` would give rows that were scored by two different rewards the same reward_version."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_reward.py"
    module.write_text("def score(completions, **_):\n    return [0.0 for _ in completions]\n")
    ppo = load_job("jobs/demo/ppo.yaml", ["reward=python:edited_reward:score", "policy=base"], "ppo")
    assert digests(ppo).keys() == {"reward"}, "nothing is trained on its judge"
    given = ["reward=[python:edited_reward:score]", f"run.storage_path={tmp_path}", "run.name=one"]
    job = load_job("jobs/demo/collect.yaml", given, "collect")
    rows = digests(job)
    assert rows.keys() == {"reward"}
    run = identity_of(job)
    resume.record_start(run, {}, "sha256:base", rows)
    (tmp_path / "one" / run_folder.PARTS).mkdir()
    found = resumable(run)
    assert resume.same_content(found, run, "sha256:base", digests(job))
    module.write_text("def score(completions, **_):\n    return [1.0 for _ in completions]\n")
    with pytest.raises(InputError, match=r"content of reward has changed since 'one' .*Restore the files"):
        resume.same_content(found, run, "sha256:base", digests(job))


def test_unreadable_files_of_a_run(halfway, tmp_path, in_root, capsys):
    folder = shutil.copytree(halfway, tmp_path / "copy")
    (folder / "sft/job.json").write_text("[" * 100_000)
    assert main(["sft", "jobs/demo/sft.yaml", f"run.storage_path={folder}", "run.name=sft"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"^error: run\.name: .*/sft/job\.json cannot be read .*run\.overwrite=true", error), (
        error
    )


def test_a_report_on_an_unfinished_run_does_not_replace_the_one_of_the_finished_run(tmp_path, in_root):
    job = load_job("jobs/demo/sft.yaml", [f"run.storage_path={tmp_path}", "run.name=one"], "sft")
    (tmp_path / "one").mkdir()
    (tmp_path / "one/report.html").write_text("drawn during the run")
    with lease.held(str(tmp_path / "one")) as mine:
        write_result(work_of(job, lease=mine), None, {})
    assert (tmp_path / "one/result.json").exists() and not (tmp_path / "one/report.html").exists()


# ------------------------------------------------------------------------------------------------ the lease


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    return folder


def own(run, seen=None, overwrite=False):
    return owned_folder(str(run), owner_files(str(run)) if seen is None else seen, overwrite)


def test_a_folder_that_changed_before_this_process_owned_it_is_refused(run):
    seen = owner_files(str(run))
    (run / "job.json").write_text("{}")
    with pytest.raises(InputError, match=r"run\.name: another process has run .* the same command again"):
        own(run, seen).__enter__()
    with own(run, seen, overwrite=True) as mine:
        assert mine.attempt == 2, "an attempt that still runs must find it"
        assert [path.name for path in run.iterdir()] == ["lease"]


def test_a_resumed_run_uses_the_recorded_version_and_commit_of_its_base(halfway, in_root):
    """A resume is rejected if the digest of the base has changed, because the alias or the branch of the base has moved."""
    assert resumable(job_of(halfway, *BATCH, "model.name_or_path=models:/rlhf-sft@champion"))
    job = job_of(halfway, *BATCH)
    left = resumable(job)
    begun = {**left, "model": {**left["model"], "revision": "a" * 40}}
    assert not resume.changed_settings(begun, job, ("begun_with", *resume._resolved(job)))
    begun["begun_with"] = {**left["begun_with"], "base": f"commit:{'a' * 40}"}
    with pytest.raises(InputError, match=f"Set model.revision={'a' * 40}, choose another run.name"):
        resume.same_content(begun, job, f"commit:{'b' * 40}", left["begun_with"]["rows"])


def test_recorded_versions_apply_to_unchanged_inputs_of_the_job(tmp_path, in_root):
    def ppo(*overrides):
        named = ["policy=models:/a@champion", "judge=models:/b@champion"]
        place = [f"run.storage_path={tmp_path}", "run.name=one"]
        return identity_of(load_job("jobs/demo/ppo.yaml", [*named, *place, *overrides], "ppo"))

    pinned = {"policy": "models:/a/1", "judge": "models:/b/2", "reward.0": "models:/rlhf-rm/3"}
    resume.record_start(ppo(), pinned, "b", {})
    found = resumable(ppo())
    assert resume.pinned_inputs(found, ppo()) == pinned
    del pinned["judge"]  # a judge that differs from the interrupted run's is resolved again
    assert resume.pinned_inputs(found, ppo("judge=models:/c@champion")) == pinned
