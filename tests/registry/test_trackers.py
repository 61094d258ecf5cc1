"""Tests mlflow.report_to: TensorBoard and W&B get the same curves as MLflow, even if the run was killed. Both run offline."""

import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from pipeline import registry
from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.job.job import MLflow
from pipeline.registry import curves
from pipeline.settle.identity import tracking_of

FIRST = """
import os, sys, time
from pipeline import registry
from pipeline.job import load_job
from pipeline.settle.identity import tracking_of
job = load_job("jobs/demo/sft.yaml", [*sys.argv[2:], "gate={}"], "sft")
log = registry.open_curves(tracking_of(job), sys.argv[1])
for step in range(1, 7):
    log.log({"loss": 1 / step, "val/ratio": 0.5 * step}, step)
    time.sleep(0.1)
deadline = time.monotonic() + 60
mlflow = registry.client(tracking_of(job).uri)
while len(mlflow.get_metric_history(sys.argv[1], "loss")) < 6 or any(one.pending for one in log.queues):
    assert time.monotonic() < deadline
    time.sleep(0.1)
os.kill(os.getpid(), 9)
"""
NAMES = ["tensorboard", "wandb"]


@pytest.fixture
def begun(migrated, tmp_path, in_root, monkeypatch):
    """Creates the folder of a run. Returns (job, id of its MLflow run)."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "planted0planted0planted0planted0planted0")
    shutil.copy(migrated, tmp_path / "mlflow.db")

    def begin(*also):
        given = [
            "gate={}",
            f"run.storage_path={tmp_path}",
            "run.name=one",
            f"mlflow.report_to=[{','.join(also)}]",
        ]
        job = load_job("jobs/demo/sft.yaml", given, "sft")
        (tmp_path / "one").mkdir()
        return job, registry.client(tracking_of(job).uri).create_run("0").info.run_id

    return begin


def python(*arguments):
    """Runs Python code in a new process with this process's sys.path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def in_tensorboard(folder):
    """Reads the event files in a folder with TensorBoard. Returns {metric: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def in_wandb(folder):
    """Reads the offline run in a folder with W&B's own inspector. Returns ({metric: [(step, value)]}, summary)."""
    (file,) = glob.glob(f"{folder}/wandb/offline-run-*/run-*.wandb")
    shown = python("-m", "wandb", "leet", "inspect", "--json", file).stdout
    curves, summary = {}, {}
    for record in map(json.loads, shown.splitlines()):
        if record["type"] == "history":
            row = record["history"]["item"]
            for key in row.keys() - {"_step", "_runtime", "_timestamp"}:
                curves.setdefault(key, []).append((row["_step"], row[key]))
        summary |= record.get("summary", {}).get("update", {})
    return curves, summary


READ = {"tensorboard": in_tensorboard, "wandb": lambda folder: in_wandb(folder)[0]}


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_and_resumed_run_has_the_curves_of_mlflow(name, begun, tmp_path):
    pytest.importorskip(name)
    job, run_id = begun(name)
    given = [f"run.storage_path={tmp_path}", "run.name=one", f"mlflow.report_to=[{name}]"]
    killed = python("-c", FIRST, run_id, *given)
    assert killed.returncode == -9, killed.stderr
    again = registry.open_curves(tracking_of(job), run_id)
    # Steps 1 to 4 are replayed from the file, steps 5 and 6 are run again, and later steps are new.
    for step in range(1, 11):
        again.log({"loss": 1 / step, "val/ratio": 0.5 * step}, step)
    again.log({"eval_loss": 0.125}, 10)
    again.log({"eval_loss": 0.125, "initial_loss": 1.0}, 10, final=True)
    again.close()
    expected = registry.read_curves(tracking_of(job).uri, run_id)
    assert [step for step, _ in expected["loss"]] == list(range(1, 11))
    curves = READ[name](tmp_path / "one" / ("tensorboard" if name == "tensorboard" else ""))
    assert curves.keys() == expected.keys()
    for metric, points in expected.items():
        assert [step for step, _ in curves[metric]] == [step for step, _ in points]
        assert [value for _, value in curves[metric]] == pytest.approx([value for _, value in points])
    files = [path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert files and not any(b"planted0planted0" in content for content in files)


def test_final_metrics_of_an_earlier_step_are_in_wandbs_summary(begun, tmp_path):
    pytest.importorskip("wandb")
    job, run_id = begun("wandb")
    log = registry.open_curves(tracking_of(job), run_id)
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        log.log({"eval_loss": loss}, step)
    log.log({"eval_loss": 0.25, "initial_loss": 1.0}, 2, final=True)
    log.close()
    curves, summary = in_wandb(tmp_path / "one")
    assert curves["eval_loss"] == [(1, 0.5), (2, 0.25), (3, 0.75)]
    assert (summary["eval_loss"], summary["initial_loss"]) == (0.25, 1.0)


def test_a_missing_package_and_a_missing_account_are_reported_before_the_start(begun, monkeypatch, tmp_path):
    job, _ = begun(*NAMES)
    for name in NAMES:
        monkeypatch.setattr(importlib.util, "find_spec", lambda one, name=name: one != name or None)
        says = rf'^mlflow.report_to: found {name}, which is not installed here; run .*"\.\[{name}\]"'
        with pytest.raises(InputError, match=says):
            registry.check_trackers(job.mlflow.report_to)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: True)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    registry.check_trackers(job.mlflow.report_to)
    monkeypatch.delenv("WANDB_API_KEY")
    registry.check_trackers(job.mlflow.report_to)  # offline mode needs no account
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(InputError, match=r"no credentials: export WANDB_API_KEY=.*WANDB_MODE=offline"):
        registry.check_trackers(job.mlflow.report_to)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    registry.check_trackers(job.mlflow.report_to)


def test_every_name_that_a_job_accepts_has_a_tracker():
    assert set(curves.TRACKERS) == set(get_args(get_args(get_type_hints(MLflow)["report_to"])[0]))
