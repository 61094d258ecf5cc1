"""Runs stages for tests with the real command line, in this process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from pipeline.__main__ import main
from pipeline.job import TRAIN_STAGES, load_job

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
NO_EVAL = ["data.eval=null", "trainer.eval_strategy=no", "trainer.eval_on_start=false"]


def stage(
    verb: str, storage: Path, name: str, *overrides: str, job: str | None = None, status: int = 0
) -> dict[str, Any]:
    """Runs one stage with a storage path. Returns the run's result.json. By default, the job has no gate."""
    cwd = os.getcwd()
    os.chdir(ROOT)
    try:
        file, settings = job or f"jobs/demo/{verb}.yaml", ["gate={}", f"run.storage_path={storage}"]
        settings += ["run.report=false"] if verb in TRAIN_STAGES else []  # drawing a report takes two seconds
        settings += [f"run.name={name}", *overrides]
        assert main([verb, file, *settings]) == status
        path = storage / name / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        if verb in TRAIN_STAGES and result:  # checks that a gate can name each metric of the run
            spec = load_job(file, settings, verb).metrics
            assert not [m for m in result["metrics"] if m not in spec.lacks and not spec.is_open(m)]
        return result
    finally:
        os.chdir(cwd)


def tracked() -> list[str]:
    """Returns the files of the repository that git tracks."""
    return subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).rstrip("\0").split("\0")


def copy_repository(folder: Path, *stamps: str) -> Path:
    """Copies the repository into a folder. In this folder, `make` uses this environment and installs nothing."""
    for name in tracked():
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():  # pipeline/jobs is a link to jobs
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(sys.prefix)
    for stamp in (".core", *stamps):
        (Path(sys.prefix) / stamp).touch()
    return folder


def client(storage: Path) -> MlflowClient:
    uri = f"sqlite:///{storage}/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def curve(storage: Path, result: dict[str, Any], metric: str = "loss") -> list[float]:
    """Returns the values of a run's metric in MLflow, ordered by step."""
    history = client(storage).get_metric_history(result["mlflow_run_id"], metric)
    return [point.value for point in sorted(history, key=lambda point: point.step)]
