"""Installs tools that the project does not pin. Each tool gets a separate environment."""

import subprocess
import sys

import pytest


def install(folder, *packages):
    """Makes an environment in `folder` with the given packages. Returns its bin. Skips the test if there is no package index."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    command = [folder / "bin/pip", "install", "-q", "--retries", "1", *packages]
    result = subprocess.run(command, capture_output=True, text=True, timeout=570)
    if result.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {result.stderr.strip()[-300:]}")
    return folder / "bin"
