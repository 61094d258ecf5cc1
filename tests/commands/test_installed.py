"""Tests the package after its installation from a wheel, outside of the clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from running import ROOT

from pipeline.commands import completion, shipped


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the package's wheel. Returns a folder with the unpacked wheel."""
    built, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("installed")
    build = [sys.executable, *"-m pip wheel -q --no-deps --no-build-isolation -w".split(), built, ROOT]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder


def rlhf(wheel, cwd, *arguments):
    """Runs the console command `rlhf` with the installed package, like the script that pip installs."""
    command = "import sys; sys.argv[0] = 'rlhf'; from pipeline.__main__ import command; command()"
    program, env = [sys.executable, "-P", "-c", command], {**os.environ, "PYTHONPATH": str(wheel)}
    return subprocess.run([*program, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def test_the_wheel_names_the_command_and_carries_profiles_and_demo(wheel):
    [points] = wheel.glob("*.dist-info/entry_points.txt")
    assert "rlhf = pipeline.__main__:command" in points.read_text()
    listed = subprocess.run(["git", "ls-files", "jobs"], cwd=ROOT, capture_output=True, text=True)
    tracked = listed.stdout.split()
    assert tracked and not [name for name in tracked if not (wheel / "pipeline" / name).is_file()]
    for template in ("models/plain.jinja", "commands/card.jinja"):
        assert (wheel / "pipeline" / template).is_file()


def test_demo_writes_its_files_to_the_current_folder_and_keeps_existing_ones(wheel, tmp_path):
    """The command has an invalid key, so it ends before training."""
    done = rlhf(wheel, tmp_path, "demo", "trainer.learning_rat=1")
    assert done.returncode == 2 and "did you mean trainer.learning_rate?" in done.stderr
    assert done.stdout == "wrote jobs/demo: job files to read and change\n"
    mine = tmp_path / "jobs/demo/sft.yaml"
    assert mine.read_text() == (ROOT / "jobs/demo/sft.yaml").read_text()
    mine.write_text("stage: nonsense\n")
    again = rlhf(wheel, tmp_path, "demo")
    assert again.returncode == 2 and "nonsense" in again.stderr and mine.read_text() == "stage: nonsense\n"


@pytest.mark.slow
def test_demo_runs_the_main_job_away_from_the_clone(wheel, tmp_path):
    done = rlhf(wheel, tmp_path, "demo")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "judge win rate" in done.stdout and (tmp_path / "runs/mlflow.db").is_file()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("jobs").write_text("a file\n")
    with pytest.raises(Exception, match="jobs/demo cannot be written"):
        shipped.copy_profile("demo")


def complete(words):
    """Returns the completions that bash offers for a command line with an incomplete last word."""
    script = completion.completion_script(["sft", "score", "plan", "run"])
    line = " ".join(f"'{word}'" for word in words)
    ask = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _rlhf; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", ask], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_completion_knows_subcommands_job_files_and_their_keys():
    assert complete(["rlhf", "s"]) == ["sft", "score"]
    assert "jobs/own/sft.yaml" in complete(["rlhf", "sft", "jobs/own/s"])
    assert complete(["rlhf", "sft", "jobs/own/sft.yaml", "trainer.learning_r"]) == ["trainer.learning_rate="]
    assert "trainer.kl_coef=" in complete(["rlhf", "plan", "x.yaml", "trainer.kl_c"])
    assert complete(["rlhf", "score", "x.yaml", "rew"]) == ["reward="]


def test_python_functions_of_the_current_folder_are_found(wheel, tmp_path):
    """The job names a function that its module lacks, so that the error shows whether the module was imported."""
    shutil.copytree(wheel / "pipeline/jobs/demo", tmp_path / "jobs/demo")
    (tmp_path / "my_rewards.py").write_text("def f(prompts, completions, rows):\n    return [1.0]\n")
    done = rlhf(wheel, tmp_path, "score", "jobs/demo/score.yaml", "reward=python:my_rewards:g")
    assert done.returncode == 2
    assert "module 'my_rewards' has no attribute 'g'" in done.stderr, done.stderr
