"""Tests that SkyPilot's file and the command for Hugging Face Jobs start valid jobs."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from environments import install
from running import ROOT

from pipeline.commands import run as rlhf
from pipeline.job import load_job

FILE = ROOT / "jobs/cloud/sky.yaml"
TASK = yaml.safe_load(FILE.read_text())
PARSE = "import sky, sys; sky.Task.from_yaml(sys.argv[1]).validate_run()"


def started_by_sky(tmp_path, **env):
    """Runs the `run` section of sky.yaml with fake programs. Returns the arguments that the fake pipeline received."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("mlflow", "curl"):
        (programs / name).write_text("#!/bin/sh\nexit 0\n")
    # the fake pipeline waits until the background process keep.py has started
    waits = f'[ "$1" != -m ] || until grep -q "keep.py watch" {tmp_path}/log; do sleep 0.1; done'
    (programs / "python").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n{waits}\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    node = {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", TASK["run"]], cwd=tmp_path,
        env=TASK["envs"] | node | {"BUCKET": "s3://b", "PATH": f"{programs}:{os.environ['PATH']}"} | env,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log").read_text().splitlines()
    kept = sorted(line.split(maxsplit=1)[1] for line in log if "keep.py" in line)
    database = f"{tmp_path}/mlflow.db s3://b/mlflow/mlflow.db"
    assert kept == [f"{verb} {database}" for verb in ("keep", "restore", "watch")]
    [command] = [line for line in log if line.startswith("-m pipeline ")]
    return shlex.split(command)[2:]


def test_sky_starts_valid_jobs_whose_runs_have_names(tmp_path, monkeypatch):
    command, folder, *overrides = started_by_sky(tmp_path)
    assert (command, folder) == ("run", "jobs/own")
    monkeypatch.chdir(ROOT)
    jobs = rlhf.load_profile(folder, overrides)
    assert jobs["rm"].run.name == "rm-own", "the next node resumes a run by its name"
    assert all(job.scaling["use_gpu"] and job.run.storage_path == "s3://b/runs" for job in jobs.values())


def test_sky_installs_a_python_that_its_image_lacks(tmp_path):
    """Simulates SkyPilot's image, which has Python 3.10 and uv."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("uv", "make"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/log\n')
        (programs / name).chmod(0o755)
    node = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(["bash", "-ec", TASK["setup"]], cwd=tmp_path, env=node, check=True, timeout=60)
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["uv venv --seed --python 3.11 .venv", "make .venv/.cloud"]
    assert (TASK["resources"]["cpus"], TASK["resources"]["memory"]) == ("8+", "32+")
    assert TASK["resources"]["autostop"]["down"]


def test_sky_starts_a_valid_server(tmp_path, monkeypatch):
    command, path, *overrides = started_by_sky(tmp_path, COMMAND="serve", PROFILE="own")
    monkeypatch.chdir(ROOT)
    job = load_job(path, overrides, "serve")
    assert command == "serve" and job.scaling["use_gpu"]
    assert Path(job.serve.feedback_path).parent == Path(*TASK["file_mounts"]), (
        "the feedback would be lost with the node"
    )


@pytest.mark.slow
def test_skypilot_accepts_its_file_and_rejects_a_broken_copy(tmp_path):
    pin = re.search(r'"skypilot\[aws\](==[\d.]+)"', FILE.read_text())[1]
    python = install(tmp_path / "tool", f"skypilot{pin}") / "python"
    copy = tmp_path / "sky.yaml"
    home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def parse(text):
        copy.write_text(text)
        command = [python, "-c", PARSE, copy]
        return subprocess.run(command, capture_output=True, text=True, env=home, cwd=ROOT, timeout=120)

    assert "'BUCKET' is None" in parse(FILE.read_text()).stderr
    good = FILE.read_text().replace("BUCKET: ", "BUCKET: s3://a-bucket")
    done = parse(good)
    assert done.returncode == 0, done.stderr[-2000:]
    broken = parse(good.replace("disk_size", "disk_sise"))
    assert broken.returncode != 0 and "did you mean 'disk_size'" in broken.stderr


def test_hf_accepts_the_documented_command_and_its_job_is_valid(monkeypatch):
    page = (ROOT / "docs/clusters.md").read_text().replace("\\\n", "")
    [command] = re.findall(r"^hf jobs uv run .*$", page, re.MULTILINE)
    program = [Path(sys.executable).parent / "hf", *shlex.split(command)[1:]]
    environment = {**os.environ, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"}  # --dry-run needs no network
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert done.returncode == 0 and "flavor   l4x1" in done.stdout, done.stdout + done.stderr
    stage, path, *overrides = shlex.split(command.partition("jobs/cloud/hf_job.py ")[2])
    monkeypatch.chdir(ROOT)
    load_job(path.replace("velo", "own"), overrides, stage)


def test_the_script_for_hf_installs_the_pins():
    """Parses the PEP 723 block of the script."""
    text = (ROOT / "jobs/cloud/hf_job.py").read_text()
    [block] = re.findall(r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+?)^# ///$", text)
    facts = tomllib.loads("".join(line[2:] or "\n" for line in block.splitlines(keepends=True)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert facts == {key: project[key] for key in ("requires-python", "dependencies")}
