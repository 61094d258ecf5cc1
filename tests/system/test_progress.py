"""Tests progress output: a line every INTERVAL_S if stderr is not a terminal, and the progress of loading a base."""

import os
import re
import subprocess
import sys

import pytest
from model_hub import of_folder, serve
from running import ROOT

from pipeline.job import load_job
from pipeline.system import progress


def test_counted_work_is_reported_and_bytes_as_bytes(capsys, monkeypatch):
    with progress.Bar(total=1, desc="short work prints nothing") as report:
        report.update()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    report = progress.Bar(total=3, desc="scoring pairs: batch")
    for _ in range(2):
        report.update()
    assert "scoring pairs: batch: 2 of 3, 00:00 left\n" in capsys.readouterr().out
    with progress.Bar(total=16_000_000_000, unit="B", unit_scale=True, desc="model.safetensors") as bar:
        bar.update(4_000_000_000)
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("model.safetensors: 4.00GB of 16.0GB, "), out


def test_the_loading_of_a_base_is_shown(capsys, monkeypatch, in_root):
    """Every process of a run sets TQDM_DISABLE to hide other progress bars. The progress of loading a base is still shown."""
    from pipeline.models.base import load_base

    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    load_base(load_job("jobs/demo/sft.yaml", [], "sft").model)
    assert "Loading weights: " in capsys.readouterr().out


DOWNLOAD = """
from huggingface_hub import constants
from pipeline.job import load_job
from pipeline.models.base import load_base
from pipeline.system.hub import loading_message
from pipeline.system import progress
progress.INTERVAL_S, constants.DOWNLOAD_CHUNK_SIZE = 0.0, 100_000
job = load_job("jobs/demo/sft.yaml", ["model.name_or_path=org/model"], "sft")
for _ in range(2):
    print(loading_message("org/model"))
    load_base(job.model)
"""


@pytest.mark.slow
def test_a_download_is_shown_once(tmp_path):
    with serve() as hub:
        hub.put("org/model", of_folder(ROOT / "jobs/demo/model"))
        env = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        shown = subprocess.check_output([sys.executable, "-c", DOWNLOAD], cwd=ROOT, env=env, text=True)
    shown = shown.splitlines()
    assert "downloading and loading org/model" in shown
    again = shown.index("loading org/model (1.40MB)")
    assert any(re.search(r"model\.safetensors: \S+B of 1\.40MB, \S+ left", line) for line in shown[:again])
    assert not any("safetensors" in line for line in shown[again:])
