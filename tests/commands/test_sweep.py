"""Tests a sweep on Ray from the command line to the registered version. A slow test also kills a worker and the driver."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from running import ROOT, client

from pipeline import registry
from pipeline.__main__ import main
from pipeline.commands import sweep as command
from pipeline.errors import InputError
from pipeline.job.identity import identity_of
from pipeline.run.resume import deciding_settings, owner_files
from pipeline.settle.identity import tracking_of
from pipeline.sweep import space

JOB = "jobs/demo/rm.yaml"
SHORT = [
    "run.report=false", "trainer.eval_on_start=false", "trainer.eval_strategy=steps", "trainer.save_strategy=steps",
    "trainer.logging_steps=1", "gate.eval_accuracy=>= 0.1",
]  # fmt: skip


def arguments(storage, *more):
    return ["sweep", JOB, *SHORT, f"run.storage_path={storage}", *more]


def runs(storage):
    return {run.info.run_name: run for run in client(storage).search_runs(["1"])}


def left(folder):
    return json.loads((Path(folder) / "sweep.json").read_text())


def test_a_sweep_registers_the_better_of_two_trials(embedded_ray, in_root, tmp_path, capsys):
    """One trial is already finished, so that the test runs only the other trial. Starting a trial's processes is slow."""
    ended = {"metrics": {"eval_loss": 9.0}, "ended": {"step": 2, "of": 2, "early": None}}
    first = tmp_path / "two/learning_rate-1e-3/result.json"
    first.parent.mkdir(parents=True)
    first.write_text(json.dumps(ended | {"seconds": 3.0, "mlflow_run_id": "x"}))
    given = arguments(
        tmp_path, "trainer.learning_rate=1e-3,4e-3", "trainer.max_steps=2", "trainer.eval_steps=1", "trainer.save_steps=2",
        "trainer.warmup_steps=0", "trainer.lr_scheduler_type=constant", "sweep.reduction_factor=1", "run.name=two",
    )  # fmt: skip
    assert main(given) == 0
    printed = capsys.readouterr().out
    summary = left(tmp_path / "two")
    assert summary["best"] == "learning_rate-4e-3" and summary["ended"]
    assert [row["state"] for row in summary["trials"]] == ["finished", "finished"]
    assert [r["step"] for r in summary["reports"]["learning_rate-4e-3"]] == [1, 2]
    # Only the run of the best trial registers a version, which passes the job's gate.
    (version,) = client(tmp_path).search_model_versions("name = 'rlhf-rm'")
    best = json.loads((tmp_path / "two/learning_rate-4e-3/result.json").read_text())
    assert version.run_id == best["mlflow_run_id"] and version.tags["gate"] == "passed"
    assert (best["version"], best["alias"]) == (str(version.version), "champion")
    assert client(tmp_path).get_model_version_by_alias("rlhf-rm", "champion").version == version.version
    # In MLflow, the trials have the same parent run. The rows were tokenized only once.
    known = runs(tmp_path)
    parents = {name: run.data.tags.get("mlflow.parentRunId") for name, run in known.items()}
    parent = known["two"].info.run_id
    assert parents == {"two": None, "learning_rate-4e-3": parent}
    assert {run.info.status for run in known.values()} == {"FINISHED"}
    assert len(list((tmp_path / "data").iterdir())) == 1
    # The terminal shows one table, without the output of the trials.
    for text in (
        "running 1 of 2 trials, 1 at a time",
        "learning_rate-4e-3  step 2/2  eval_loss",
        "best: trainer.learning_rate=4e-3",
    ):
        assert text in printed
    assert "(rm " not in printed and "training" in (tmp_path / "two/output.log").read_text()
    assert (
        len(re.findall(r"^ *trainer\.learning_rate +eval_loss +steps +seconds +ended$", printed, re.M)) == 1
    )
    assert not (tmp_path / "two/tune").exists()
    # If the same command is run again, it only prints the result.
    assert main(given) == 0
    assert "has ended" in capsys.readouterr().out
    assert len(client(tmp_path).search_model_versions("name = 'rlhf-rm'")) == 1


def test_a_folder_with_another_sweep_is_an_error(in_root, tmp_path):
    def begun(*more):
        return space.read_sweep(JOB, ["lora.r=4,8", f"run.storage_path={tmp_path}", "run.name=s", *more])

    sweep = begun()
    content = {
        "job": deciding_settings(identity_of(sweep.job)),
        "metric": "eval_loss",
        "reports": {},
        "ended": True,
    }
    content["trials"] = [{"trial": trial.name} for trial in sweep.trials]
    (tmp_path / "s").mkdir()
    (tmp_path / "s/sweep.json").write_text(json.dumps(content))

    def recorded(sweep):
        return command.read_recorded_sweep(sweep, owner_files(sweep.folder))

    more = begun("trainer.learning_rate=1e-3,2e-3")
    assert recorded(sweep)["ended"] and not recorded(more)["ended"], "the same job may get more trials"
    for other in (["trainer.seed=9"], ["run.metric_for_best_model=eval_accuracy"]):
        with pytest.raises(InputError, match="a sweep of a different job"):
            recorded(begun(*other))
        assert recorded(begun(*other, "run.overwrite=true")) == {}


def test_trials_start_from_the_versions_behind_the_aliases(in_root):
    inputs = {"policy": "models:/rlhf-sft/3", "reward.0": "models:/rlhf-rm/2"}
    sweep = space.read_sweep("jobs/demo/ppo.yaml", ["trainer.kl_coef=0.1,0.2", "judge=null"])
    for trial in command.with_versions(sweep, inputs).trials:
        assert (trial.job.policy, trial.job.reward) == ("models:/rlhf-sft/3", "models:/rlhf-rm/2")
    varied = space.read_sweep("jobs/demo/ppo.yaml", ["policy=base,models:/rlhf-sft/1", "judge=null"])
    policies = [trial.job.policy for trial in command.with_versions(varied, inputs).trials]
    assert policies == ["base", "models:/rlhf-sft/1"]


def test_an_interrupted_sweep_ends_the_mlflow_runs_of_its_trials(in_root, tmp_path):
    sweep = command.with_one_store(
        space.read_sweep(JOB, ["lora.r=4,8", f"run.storage_path={tmp_path}", "run.name=s"])
    )
    inner = registry.mlflow_run(tracking_of(sweep.trials[0].job), {})
    with pytest.raises(KeyboardInterrupt), command.trials_ended(sweep):
        inner.__enter__()
        raise KeyboardInterrupt
    assert runs(tmp_path)["r-4"].info.status == "KILLED"


@pytest.mark.slow
def test_four_trials_with_a_worker_and_the_driver_killed(tmp_path):
    given = arguments(
        tmp_path, "trainer.learning_rate=1e-3,100", "lora.r=4,8", "trainer.max_steps=16", "trainer.eval_steps=4",
        "trainer.save_steps=4", "trainer.max_grad_norm=0", "run.max_failures=2", "run.name=four",
    )  # fmt: skip
    typed = [sys.executable, "-m", "pipeline", *given]
    log = tmp_path / "log"

    def start():
        return subprocess.Popen(typed, cwd=ROOT, stdout=log.open("a"), stderr=subprocess.STDOUT)

    driver = start()
    try:
        until(lambda: "step 8/16" in log.read_text(), driver)
        worker = next(p for p in psutil.Process(driver.pid).children(recursive=True) if is_worker(p))
        worker.kill()
        until(lambda: log.read_text().count("  ended") >= 1, driver)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    stamps = {path.parent.name: path.stat().st_mtime for path in (tmp_path / "four").glob("*/result.json")}
    assert stamps and len(stamps) < 4 and not left(tmp_path / "four")["ended"]
    assert start().wait() == 0, log.read_text()

    summary = left(tmp_path / "four")
    states = {row["trial"]: row["state"] for row in summary["trials"]}
    failed = {name for name, state in states.items() if state == "failed"}
    assert failed == {"learning_rate-100_r-4", "learning_rate-100_r-8"}
    assert sum(state in ("finished", "stopped") for state in states.values()) == 2
    assert all("is nan at step" in row["why"] for row in summary["trials"] if row["state"] == "failed")
    best = tmp_path / "four" / summary["best"]
    assert json.loads((best / "result.json").read_text())["version"] == "1"
    # Only the best trial's result.json is written again, to add the registered version.
    for name in set(stamps) - {summary["best"]}:
        assert (tmp_path / f"four/{name}/result.json").stat().st_mtime == stamps[name]
    known = runs(tmp_path)
    assert len(known) == 5  # four trials and the parent run of the sweep
    assert {run.info.status for name, run in known.items() if "100" not in name} == {"FINISHED"}
    assert len(client(tmp_path).search_model_versions("name = 'rlhf-rm'")) == 1

    # The command that the sweep prints for its best trial trains the same adapter as that trial, which was resumed.
    settings = ["run.name=alone", "mlflow.registered_model=null", "gate={}"]
    alone = [*shlex.split(summary["command"])[1:], *settings]
    subprocess.run([sys.executable, *alone], cwd=ROOT, check=True, stdout=log.open("a"))
    # After a resume, the last checkpoint of a trial is named final-2.
    adapters = [
        Path(json.loads((folder / "result.json").read_text())["adapter"])
        for folder in (best, tmp_path / "alone")
    ]
    first, second = (folder.joinpath("adapter_model.safetensors").read_bytes() for folder in adapters)
    assert first == second


def is_worker(process):
    try:
        return "RayTrainWorker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def until(happened, process, seconds=300):
    give_up = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.3)
