"""A run that something happens to ends as one that nothing happened to: same adapter to the last bit, metrics, curve.

`make chaos` does this to every stage with every fault, at random moments; here are a few at fixed ones.
"""

import functools
import importlib
import os
import re
import subprocess

import dying
import pytest
from resumed import assert_equal, touched
from running import NO_EVAL, stage

pytestmark = pytest.mark.usefixtures("embedded_ray")
TRL = [
    "trainer.max_steps=7", "data.batch_size=8", "trainer.per_device_train_batch_size=4", "trainer.save_strategy=steps",
    "trainer.save_steps=2", "trainer.logging_steps=3",  # no line of the log is written where a checkpoint is
    "mlflow.registered_model=null", *NO_EVAL,
]  # fmt: skip
PPO = [
    "trainer.total_episodes=56", "trainer.batch_size=8", "trainer.response_length=16", "trainer.save_steps=2",
    "trainer.kl_controller=adaptive", "trainer.kl_horizon=100", "trainer.normalize_values=true", "data.eval=null",
    "judge=null", "policy=base", "reward=python:bad_rewards:length", "mlflow.registered_model=null",
]  # fmt: skip


@pytest.mark.slow
def test_sft_with_its_driver_stopped_and_its_newest_checkpoint_spoilt(storage, monkeypatch, capsys):
    expected = stage("sft", storage, "resume-sft", *TRL)
    with monkeypatch.context() as patch:
        touched(patch, "sft", 5, storage / "sft-died", dying.killed)
        stage("sft", storage, "resume-sft-spoilt", *TRL, "scaling.num_workers=1", status=1)
    assert (storage / "sft-died").exists()
    folder = storage / "resume-sft-spoilt"
    newest = folder / "checkpoint_00000004/optimizer.pt"
    os.truncate(newest, newest.stat().st_size // 2)
    capsys.readouterr()
    result = stage("sft", storage, "resume-sft-spoilt", *TRL)
    assert re.search(
        r"continuing from checkpoint_00000002.*\n  checkpoint_00000004: optimizer\.pt has \d+ bytes, expected",
        capsys.readouterr().out,
    )
    assert_equal(storage, expected, result)


def test_ppo_with_a_worker_killed(storage, monkeypatch, capsys):
    expected = stage("ppo", storage, "resume-ppo", *PPO)
    touched(monkeypatch, "ppo", 5, storage / "ppo-died", dying.killed)
    capsys.readouterr()
    result = stage("ppo", storage, "resume-ppo-killed", *PPO, "run.max_failures=1", "scaling.num_workers=1")
    assert (storage / "ppo-died").exists()
    lines = capsys.readouterr().out
    assert re.search(r"fp32 products.*continuing from.*fp32 products", lines, re.DOTALL)
    assert_equal(storage, expected, result)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sft", "rm", "dpo", "kto"])
def test_killed_after_the_last_step_no_further_step_is_made(verb, storage, monkeypatch):
    """transformers 5.23, resumed in mid-epoch at max_steps, would make one step more."""
    options = [*TRL, *(["policy=base"] if verb in ("dpo", "kto") else [])]
    expected = stage(verb, storage, f"resume-last-{verb}", *options)
    module = importlib.import_module(f"pipeline.stages.{verb}")
    monkeypatch.setattr(module, "train", dying.before_finish(verb, str(storage / f"{verb}-last")))
    result = stage(
        verb, storage, f"resume-last-{verb}-killed", *options, "run.max_failures=1", "scaling.num_workers=1"
    )
    assert (storage / f"{verb}-last").exists()
    assert_equal(storage, expected, result)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 MB, where the system lets this user mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["disk full", "storage gone"])
def test_a_storage_that_fails_in_mid_run_leaves_the_last_good_checkpoint(
    trouble, storage, small_disk, monkeypatch, capfd
):
    """Exit status 1 and the system's own reason; mended, the same command ends as if nothing had been."""
    expected = stage("sft", storage, f"resume-{trouble[0]}", *TRL)
    elsewhere = [f"mlflow.tracking_uri=sqlite:///{storage}/mlflow.db", f"data.cache_dir={storage}/data"]
    name = f"hurt-{trouble[0]}"
    run = small_disk / name
    happens = dying.fill if trouble == "disk full" else dying.swap
    with monkeypatch.context() as patch:
        where = str(small_disk if trouble == "disk full" else run)
        touched(patch, "sft", 3, storage / trouble, functools.partial(happens, where))
        stage("sft", small_disk, name, *TRL, *elsewhere, "scaling.num_workers=1", status=1)
    said = capfd.readouterr()
    if trouble == "disk full":
        assert re.search(r"No space left on device", said.err)
        assert "the same command with run.name=hurt-d continues from checkpoint_00000002" in said.out
        (small_disk / "filler").unlink()
    else:
        assert re.search(r"Unable to set up cluster storage|Not a directory", said.err)
        run.unlink()
        os.rename(f"{run}-gone", run)
    assert_equal(storage, expected, stage("sft", small_disk, name, *TRL, *elsewhere))
