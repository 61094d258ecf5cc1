"""Tests `SMALL=1 make gpu`, which runs every experiment on a CPU. A failed check gives exit status 1, but stops nothing."""

import json
import os
import subprocess
import sys

import pytest
from running import ROOT

from tools.gpu.record import Record, markdown


@pytest.mark.slow
def test_every_experiment_passes_on_a_cpu(tmp_path):
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}", f"ARGS=--out {tmp_path}"],
        cwd=ROOT, env=os.environ | {"SMALL": "1"}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    skipped = {one["name"] for one in found["experiments"] if one["outcome"] == "skipped"}
    assert len(found["experiments"]) > 20 and skipped <= {"with-ray-and-trl", "with-vllm"}
    assert "| ppo-70b-nf4 | passed |" in (tmp_path / "gpu.md").read_text()


def test_without_a_gpu_the_message_says_what_to_do(monkeypatch, capsys):
    from tools.gpu import experiments, models  # imported here, because the import chooses the sizes

    monkeypatch.setattr("sys.argv", ["tools.gpu"])
    for name in ("CUDA", "SMALL"):
        monkeypatch.setattr(models, name, False)
    with pytest.raises(SystemExit) as ended:
        experiments.main()
    assert ended.value.code == 2 and "SMALL=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("holds", "error", "outcome"),
    [([True], "", "passed"), ([True, False], "", "FAILED"), ([True], "x", "FAILED"), ([], "", "FAILED")],
)
def test_an_experiment_passes_if_all_its_checks_hold(holds, error, outcome):
    record = Record("one", error=error)
    for each in holds:
        record.check("a | b", 0.12345, each)
    assert record.outcome == outcome
    assert f"| one | {outcome} |" in markdown({"device": "GPU"}, [record])
