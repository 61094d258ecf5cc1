"""Tests the template for Anyscale's gallery, which Ray's documentation also renders."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from environments import install
from head import Head
from running import ROOT

from tools.chaos.runs import free_port

HOME = ROOT / "docs/galleries"
[ENTRY] = yaml.safe_load((HOME / "anyscale/BUILD.yaml").read_text())
TEMPLATE = HOME / "anyscale" / ENTRY["dir"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHORT = "sft.gate={} rm.gate={} ppo.gate={} sft.trainer.max_steps=2 rm.trainer.max_steps=2 ppo.trainer.total_episodes=64"


def test_the_entry_has_its_files_and_the_pins():
    assert (HOME / "anyscale" / ENTRY["test"]["tests_path"] / "tests.sh").exists()
    assert all((HOME / "anyscale" / file).exists() for file in ENTRY["compute_config"].values())
    assert (TEMPLATE / "requirements.txt").read_text().splitlines() == PROJECT["dependencies"]
    ray = next(pin for pin in PROJECT["dependencies"] if pin.startswith("ray")).partition("==")[2]
    assert ENTRY["cluster_env"]["image_uri"].startswith(f"anyscale/ray:{ray}-py312-")


@pytest.mark.slow
def test_its_test_script_passes(tmp_path):
    """Runs the notebook with papermill on a separate Ray, with few steps and this environment's packages."""
    tools = install(tmp_path / "tools", "papermill==2.7.0", "nbconvert==7.17.2", "ipykernel")
    page = tmp_path / "README.md"
    convert = [tools / "jupyter-nbconvert", "--to", "markdown", TEMPLATE / "README.ipynb"]
    subprocess.run([*convert, "--output-dir", tmp_path], check=True, capture_output=True)
    assert page.read_text() == (TEMPLATE / "README.md").read_text()

    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "papermill").symlink_to(tools / "papermill")
    for name in ("pip", "uv"):
        (stubs / name).write_text("#!/bin/sh\n")
        (stubs / name).chmod(0o755)
    folder = shutil.copytree(TEMPLATE, tmp_path / "template")
    script = HOME / "anyscale" / ENTRY["test"]["tests_path"] / "tests.sh"
    with Head() as head:
        environment = os.environ | {
            "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "REPOSITORY": str(ROOT), "MODEL": "jobs/demo/model", "STORAGE": str(tmp_path), "MLFLOW_PORT": str(free_port()),
            "CLUSTER": head.address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(head.token),
            "DEMO_ARGS": SHORT, "ARGS": SHORT,
        }  # fmt: skip
        for name in ("PYTHONPATH", "RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
            environment.pop(name, None)
        run = subprocess.Popen(
            ["bash", script], cwd=folder, env=environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            output, _ = run.communicate(timeout=900)
        finally:
            # ends the MLflow server that the script may have left running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGTERM)
    assert run.returncode == 0, output[-4000:]
    assert len(list((tmp_path / "rlhf/runs").glob("*/result.json"))) == 4
