"""Tests that an interrupted run and an uninterrupted run have bit-identical adapters, equal metrics and equal curves.

`make chaos` interrupts every stage with every fault at random moments. The tests in this file interrupt at a few fixed moments.
"""

import functools
import os
import re
import subprocess

import dying
import pytest
from resumed import assert_equal, interrupted, touched
from running import NO_EVAL, stage

pytestmark = pytest.mark.usefixtures("embedded_ray")
TRL = [
    "trainer.max_steps=5", "data.batch_size=8", "trainer.per_device_train_batch_size=4", "trainer.save_strategy=steps",
    # With these steps, no checkpoint is at a step with a log line.
    "trainer.save_steps=2", "trainer.logging_steps=3",
    "mlflow.registered_model=null", *NO_EVAL,
]  # fmt: skip
PPO = [
    "trainer.total_episodes=32", "trainer.batch_size=8", "trainer.response_length=12", "trainer.save_steps=2",
    "trainer.kl_controller=adaptive", "trainer.kl_horizon=100", "trainer.normalize_values=true", "data.eval=null",
    "judge=null", "policy=base", "reward=python:bad_rewards:length", "mlflow.registered_model=null",
]  # fmt: skip
SETTINGS = {"sft": TRL, "rm": TRL, "dpo": [*TRL, "policy=base"], "kto": [*TRL, "policy=base"], "ppo": PPO}
# (stage, fault, workers before, workers after). test_best.py interrupts ppo while it runs in the command's own process.
QUICK = [("rm", "interrupted", 0, 0), ("ppo", "killed", 1, 1)]
SLOW = [
    *(("rm", "interrupted", begins, 1 - begins) for begins in (0, 1)),
    *(("ppo", "interrupted", begins, 1 - begins) for begins in (0, 1)),
    # If a run resumed at max_steps, transformers 5.23 alone would train one more step.
    *[(verb, "killed after the last step", 1, 1) for verb in ("sft", "rm", "dpo", "kto")],
]


@pytest.mark.parametrize(
    ("verb", "what", "begins", "ends"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    verb, what, begins, ends, storage, monkeypatch, capsys
):
    name, options = f"resume-{verb}-{what.replace(' ', '-')}-{begins}{ends}", SETTINGS[verb]
    expected = stage(verb, storage, f"whole-{verb}", *options, "scaling.num_workers=0")
    once, workers = storage / f"{name}-died", f"scaling.num_workers={ends}"
    capsys.readouterr()
    if what == "interrupted":
        with monkeypatch.context() as patch:
            interrupted(patch, verb, 2)
            stage(verb, storage, name, *options, f"scaling.num_workers={begins}", status=1)
        assert (storage / name / "failed.json").exists()
    else:
        touched(monkeypatch, verb, 3 if what == "killed" else None, once, dying.killed)
    result = stage(verb, storage, name, *options, workers, "run.max_failures=1")
    assert (
        once.exists() == (what != "interrupted") and "continuing from checkpoint_" in capsys.readouterr().out
    )
    assert_equal(storage, expected, result)


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of 16 MB. Skips the test if this user may not mount disks."""
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
def test_a_storage_failure_during_a_run_keeps_the_last_good_checkpoint(
    trouble, storage, small_disk, monkeypatch, capfd
):
    """The command exits with status 1 and the operating system's error. After a repair, the same command completes the run."""
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
