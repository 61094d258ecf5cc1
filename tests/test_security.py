"""Secrets appear nowhere, states of a resumed run are read as data, and what a job names cannot run code unasked."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import NO_EVAL, ROOT

SECRETS = {
    "HF_TOKEN": "hf_plantedPLANTED0123456789abcdefghij",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-password-7f3a",
    "AWS_SECRET_ACCESS_KEY": "plantedAWS/secret+access/key0123456789ab",
}


def files(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_a_whole_run_writes_no_secret_anywhere(tmp_path):
    """The real command with secrets in its environment: log, checkpoints, MLflow's database and artifacts, result.json."""
    given = [
        "sft", "jobs/demo/sft.yaml", f"run.storage_path={tmp_path}", "run.name=secret", "gate={}", "trainer.max_steps=2",
        "data.batch_size=8", "trainer.per_device_train_batch_size=8", "trainer.save_strategy=steps", "trainer.save_steps=1",
        "trainer.logging_steps=1", *NO_EVAL,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *given],
        cwd=ROOT,
        env=os.environ | SECRETS,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    written = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files(tmp_path)}
    assert {"mlflow.db", "secret/result.json", "secret/job.json"} <= written.keys()
    assert any(name.endswith("adapter_model.safetensors") for name in written)
    written |= {"stdout": done.stdout, "stderr": done.stderr}
    for name, secret in SECRETS.items():
        found = [where for where, content in written.items() if secret.encode() in content]
        assert not found, f"{name} is in {found}"


@pytest.mark.parametrize("key", ["mlflow.tracking_uri", "data.train"])
def test_an_error_about_an_address_does_not_repeat_its_password(key, tmp_path):
    address = {
        "mlflow.tracking_uri": "http://me:planted-pass@127.0.0.1:9",
        "data.train": "s3://AKIA:planted-pass@b/x.jsonl",
    }
    given = ["sft", "jobs/demo/sft.yaml", f"run.storage_path={tmp_path}", f"{key}={address[key]}"]
    env = os.environ | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *given], cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "planted-pass" not in done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------ pickles


class Touches:
    """Unpickled, it runs a command."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("file", ["optimizer.pt", "rng_0_of_1.pt"])
def test_a_state_of_ppo_that_would_run_code_is_refused(file, tmp_path):
    """What `restore` reads, it reads with weights_only."""
    import torch

    from pipeline.ppo import state

    path = tmp_path / file
    torch.save({"state": Touches(tmp_path / "ran")}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(path, weights_only=True)
    assert not (tmp_path / "ran").exists()
    source = Path(state.__file__).read_text()
    loads = re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", source)
    assert len(loads) == source.count("torch.load(") >= 2
    assert all("weights_only=True" in load for load in loads)


@pytest.mark.parametrize("file", ["optimizer.pt", "rng_state.pth", "scheduler.pt"])
def test_a_state_of_a_transformers_trainer_that_would_run_code_is_refused(file, tmp_path):
    """The installed transformers allow-lists a few numpy types for random states, and nothing that runs."""
    import torch
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(
        torch.nn.Linear(1, 1),
        TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none", disable_tqdm=True),
    )
    trainer.create_optimizer_and_scheduler(1)
    torch.save(trainer.optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(trainer.lr_scheduler.state_dict(), tmp_path / "scheduler.pt")
    torch.save(Touches(tmp_path / "ran"), tmp_path / file)
    read = trainer._load_rng_state if file == "rng_state.pth" else trainer._load_optimizer_and_scheduler
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        read(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_no_source_file_unpickles_or_evaluates():
    """What could run code from a file stands nowhere but where it is named here."""
    own_tasks = {"pipeline/data/read.py"}  # what the job's own Ray tasks return, never a file
    wanted = re.compile(
        r"\bpickle\.loads?\(|\byaml\.(unsafe_)?load\(|\beval\(|\bexec\(|weights_only=False|shell=True"
    )
    found = {
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "pipeline").rglob("*.py"))
        for line in path.read_text().splitlines()
        if wanted.search(line) and not line.strip().endswith(".eval()") and ".eval(" not in line
    }
    assert found == own_tasks
