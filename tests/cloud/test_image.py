"""Tests the Dockerfile without a container runtime, and that all files name the same image version."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from running import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
JOINED = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ")
STEPS = [tuple(line.split(maxsplit=1)) for line in JOINED.splitlines() if line.strip()]
COPIED = [name for word, rest in STEPS if word == "COPY" for name in rest.split()[:-1]]


def test_the_image_gets_the_files_that_it_copies_and_has_no_root():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(COPIED)
    assert all((ROOT / name).exists() for name in COPIED)
    assert [rest for word, rest in STEPS if word == "USER"] == ["1000"]


@pytest.mark.parametrize("name", ["jobs/rayjob.yaml", "docs/clusters.md"])
def test_files_name_the_image_of_this_version(name):
    tags = re.findall(r"REGISTRY/rlhf:([\w.-]+\w)", (ROOT / name).read_text())
    assert tags and {tag.removesuffix("-cuda") for tag in tags} == {VERSION}


def test_make_image_builds_and_pushes(tmp_path):
    (tmp_path / "docker").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n')
    (tmp_path / "docker").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "image", "REGISTRY=r.io/me", "VARIANT=cuda"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    tag = f"r.io/me/rlhf:{VERSION}-cuda"
    assert f"export IMAGE={tag}" in done.stdout
    built = f"build --platform linux/amd64 --build-arg VARIANT=cuda -t {tag} ."
    assert (tmp_path / "log").read_text().splitlines() == [built, f"push {tag}"]


@pytest.mark.slow
def test_the_demo_runs_with_the_copied_files(tmp_path):
    """Runs `make rlhf` with this environment's packages."""
    subprocess.run(["cp", "-r", *COPIED, tmp_path], cwd=ROOT, check=True)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".venv/.core").touch()
    short = "sft.gate={} rm.gate={} ppo.gate={} sft.trainer.max_steps=2 rm.trainer.max_steps=2 ppo.trainer.total_episodes=64"
    paths = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    how = {"cwd": tmp_path, "env": paths, "capture_output": True, "text": True, "timeout": 550}
    done = subprocess.run(["make", "rlhf", f"ARGS={short}"], **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "Installing" not in done.stdout and "rlhf-ppo v1" in done.stdout
