"""Fixtures for tests of the registry: a job with an empty MLflow store in its storage path, and an adapter to register."""

import shutil

import pytest

from pipeline.job import load_job


@pytest.fixture
def job(migrated, tmp_path, in_root):
    shutil.copy(migrated, tmp_path / "mlflow.db")
    return load_job("jobs/demo/sft.yaml", ["gate={}", f"run.storage_path={tmp_path}", "run.name=one"], "sft")


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)
