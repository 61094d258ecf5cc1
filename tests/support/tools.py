"""Tools that tests run from an environment of their own: they are no part of the project's pins."""

import subprocess
import sys

import pytest


def install(folder, *packages):
    """Makes an environment in `folder` with these packages, and returns its bin. Skips the test if there is no index."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    pip = [folder / "bin/pip", "install", "-q", "--retries", "1", *packages]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=570)
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {done.stderr.strip()[-300:]}")
    return folder / "bin"
