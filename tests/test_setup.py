"""Tests the pinned versions, the Makefile and other files around the code."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")  # joins lines that end with a backslash
TARGETS = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()


def pins(lines):
    """Reads a file of pins. Returns {normalized name: version}. Every line must be an exact pin."""
    versions = {}
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[\w,]+\])?==([0-9][\w.]*)", line)
        assert match, f"not an exact pin: {line}"
        versions[plain(match[1])] = match[2]
    return versions


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_in(file):
    return pins(line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#"))


def test_every_requirement_is_pinned_and_locked():
    locked = locked_in("constraints.txt")
    extras = PROJECT["optional-dependencies"]
    tested = ("dev", "notebook", "cloud", "tensorboard", "wandb")
    pinned = pins([*PROJECT["dependencies"], *(spec for extra in tested for spec in extras[extra])])
    assert {name: locked.get(name) for name in pinned} == pinned
    # vLLM has its own constraints file, because vLLM needs other versions of some packages.
    with_vllm = locked_in("constraints-vllm.txt")
    assert pins(extras["vllm"]).items() <= with_vllm.items()
    moved = {name for name, version in locked.items() if with_vllm.get(name) != version}
    assert moved == {"fastapi", "numpy", "setuptools"}


@pytest.mark.parametrize("python", ["3.11", "3.14"])
def test_what_the_pinned_packages_ask_for_is_pinned_on_linux(python):
    """Evaluates the metadata of the installed packages for a Python version on Linux."""
    from packaging.requirements import Requirement

    locked = locked_in("constraints.txt")
    environment = {
        "python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "os_name": "posix",
        "platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }  # fmt: skip
    # Packages for other platforms and for CUDA are not installed here.
    installed = {plain(requirement.name) for requirement in distributions()}
    queue = [Requirement(requirement) for requirement in PROJECT["dependencies"]]
    met, unpinned = set(), set()
    while queue:
        requirement = queue.pop()
        name = plain(requirement.name)
        if name not in locked:
            unpinned.add(name)
        elif (name, extras := frozenset(requirement.extras)) not in met and name in installed:
            met.add((name, extras))
            needs = [Requirement(text) for text in requires(name) or []]
            environments = [{**environment, "extra": extra} for extra in extras or {""}]
            queue += [n for n in needs if not n.marker or any(map(n.marker.evaluate, environments))]
    assert len(met) > 100 and not unpinned


def test_the_workflow_runs_what_ci_runs_on_pythons_that_are_supported():
    import yaml

    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["docs"]["steps"][-1] == {"run": "make docs"}
    job = jobs["ci"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    for python in job["strategy"]["matrix"]["python"]:
        assert int(low) <= int(python.removeprefix("3.")) < int(high)
    assert f"(3, {low}) <= sys.version_info[:2] < (3, {high})" in MAKEFILE


# ---------------------------------------------------------------- make
# A fake Python, which passes the version check, copies itself into a "venv", and records what make installs or runs.
FAKE = """#!/usr/bin/env bash
case "$*" in
  *sys.version_info*) exit ${FAKE_TOO_OLD:-0} ;;
  --version) echo "Python 3.9.1" ;;
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  "-m pip config list") echo "${FAKE_CONFIG:-}" ;;
  "-m pip install "*) echo "$*" >> "$FAKE_LOG"; printf "${FAKE_SAYS:-}"; exit ${FAKE_PIP:-0} ;;
  *) echo "ran: $*" ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    fake, log = tmp_path / "fakepython", tmp_path / "pip.log"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    log.touch()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}

    def run(*arguments, **env):
        command = ["make", f"PYTHON={fake}", *([] if "PATH" in env else ["UV=false"]), *arguments]
        env = clean | {"FAKE_LOG": str(log), **env}
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        result.installs = log.read_text().splitlines()
        return result

    run.folder = tmp_path
    return run


def test_help_lists_the_first_day_and_help_all_every_target(make):
    assert make().stdout == make("help").stdout
    for target, expected in (("help", TARGETS[:7]), ("help-all", TARGETS)):
        text = make(target).stdout
        assert re.findall(r"^  make (\S+) +\S", text, re.MULTILINE) == expected
        assert max(map(len, text.splitlines())) <= 80
    assert expected[2:7] == ["rlhf", "init", "chat", "ui", "report"]
    assert {"PROFILE", "JOB", "ARGS", "SWEEP", "RAY_ADDRESS", "FORWARD"} <= {*re.findall(r"([A-Z_]+)=", text)}


def test_setup_installs_once_and_again_when_the_pins_change(make):
    failed = make("setup", FAKE_PIP="1", FAKE_SAYS="no such version\\n")
    assert failed.stderr.startswith("no such version\n")
    assert failed.returncode != 0 and not (make.folder / ".venv/.core").exists()
    (make.folder / "pip.log").write_text("")
    first = make("setup", FAKE_SAYS="Collecting torch\\n")
    assert first.returncode == 0, first.stderr
    assert len(first.installs) == 1 and "-c constraints.txt -e ." in first.installs[0]
    [line] = first.stdout.splitlines()
    assert re.fullmatch(r"Installing into \.venv .*log: \.venv/install\.log\) \.\.\. done in \d+ s", line)
    assert (make.folder / ".venv/install.log").read_text() == "Collecting torch\n"
    again = make("setup")
    assert (again.returncode, again.stdout, again.stderr, len(again.installs)) == (0, "", "", 1)
    for number, name in enumerate(("pyproject.toml", "constraints.txt"), start=2):
        later = (make.folder / ".venv/.core").stat().st_mtime + number
        os.utime(make.folder / name, (later, later))
        assert len(make("setup").installs) == number
        now = later + 0.5  # makes the install's timestamp file newer than the changed file
        os.utime(make.folder / ".venv/.core", (now, now))


@pytest.mark.parametrize(
    ("settings", "installer"),
    [("", "uv"), ("global.find-links='/wheels'", "pip")],
)
def test_uv_installs_the_packages_unless_pip_has_its_own_index(make, settings, installer):
    folder = make.folder / "bin"
    folder.mkdir()
    (folder / "uv").write_text('#!/bin/sh\necho "uv $*" >> "$FAKE_LOG"\n')
    (folder / "uv").chmod(0o755)
    result = make("setup", PATH=f"{folder}:{os.environ['PATH']}", FAKE_CONFIG=settings)
    assert result.returncode == 0, result.stderr
    [install] = result.installs
    prefix = "uv pip install --python .venv/bin/python" if installer == "uv" else "-m pip install"
    assert install.startswith(prefix) and install.endswith("-c constraints.txt -e .")


def test_an_unsupported_python_is_an_error(make):
    result = make("rlhf", FAKE_TOO_OLD="1")
    assert result.returncode != 0 and result.installs == []
    assert "Python 3.11 to 3.14 is needed" in result.stderr and "is Python 3.9.1" in result.stderr
    assert "make rlhf PYTHON=/path/to/python3.11" in result.stderr


@pytest.mark.parametrize(
    "key",
    ["trainer.learning_rate=1e-4", "policy=base"],
)
def test_a_key_outside_of_args_stops_make(key, make):
    """If make took the key for a make variable, the job would silently use the value in the job file."""
    result = make("sft", key, "PROFILE=own", "JOB=a.yaml", "ARGS=trainer.seed=2 lora.r=8")
    assert (result.returncode, result.stdout) == (2, "")
    assert "keys of a job go into ARGS: make sft JOB='a.yaml' PROFILE='own' " in result.stderr
    assert f"ARGS=\"trainer.seed=2 lora.r=8 '{key}'\"" in result.stderr
    assert make("sft", "ARGS=trainer.seed=2 lora.r=8", "JOB=a.b/c.yaml", "OMP_NUM_THREADS=1").returncode == 0


def test_a_variable_of_make_init_stops_make_sft(make):
    """Without this error, `make sft NAME=velo MODEL=org/model` would train the base of the demo."""
    result = make("sft", "NAME=velo", "MODEL=org/model")
    assert (result.returncode, result.stdout) == (2, "") and "NAME is for make init; run" in result.stderr
    assert "PROFILE=velo" in result.stderr and 'ARGS="model.name_or_path=org/model' in result.stderr
    assert make("init", "NAME=velo", "MODEL=org/model", "DATA=rows.csv").returncode == 0


def test_stages_run_the_job_of_the_profile(make):
    lines = {
        "sft": "sft jobs/demo/sft.yaml",
        "rm PROFILE=llama3-8b ARGS=a.b=1": "rm jobs/llama3-8b/rm.yaml a.b=1",
        "ppo JOB=x/mine.yaml": "ppo x/mine.yaml",
        "validate": "validate jobs/demo/sft.yaml",
        "validate JOB=jobs/demo/rm.yaml": "validate jobs/demo/rm.yaml",
        "sweep SWEEP=lora.r=8,16": "sweep jobs/demo/sft.yaml lora.r=8,16",
        "chat PROFILE=own": "chat jobs/own/generate.yaml",
        "rlhf ARGS=run.overwrite=true": "run jobs/demo run.overwrite=true",
    }
    for arguments, line in lines.items():
        assert make(*arguments.split()).stdout.splitlines()[-1] == f"ran: -m pipeline {line}"
