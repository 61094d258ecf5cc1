"""Jobs that run in the process of their command (scaling.num_workers=0): the bits of one worker, and no Ray."""

import os
import subprocess
import sys

import pytest
from resumed import interrupted
from running import NO_EVAL, ROOT, stage

from pipeline.registry.lineage import folder_digests

TRL = [
    "trainer.max_steps=4", "trainer.save_strategy=steps", "trainer.save_steps=2", "mlflow.registered_model=null", *NO_EVAL,
    "data.batch_size=16", "trainer.per_device_train_batch_size=8",
]  # fmt: skip
PPO = [
    "trainer.total_episodes=24", "trainer.batch_size=8", "trainer.response_length=8", "trainer.save_steps=1",
    "data.eval=null", "judge=null", "policy=base", "reward=python:bad_rewards:length", "mlflow.registered_model=null",
]  # fmt: skip
SETTINGS = {"sft": TRL, "rm": TRL, "dpo": [*TRL, "policy=base"], "kto": [*TRL, "policy=base"], "ppo": PPO}


def weights(storage, name):
    return folder_digests(str(storage / name / "final/adapter"))["adapter_model.safetensors"]


@pytest.mark.parametrize(
    "verb", ["sft", *(pytest.param(verb, marks=pytest.mark.slow) for verb in ("rm", "dpo", "kto", "ppo"))]
)
def test_no_worker_and_one_end_with_the_same_bytes(verb, storage, embedded_ray):
    """Twice in one process, too: no stage leaves random numbers, threads or a precision behind."""
    for name, workers in (("here", 0), ("again", 0), ("worker", 1)):
        stage(verb, storage, f"same-{verb}-{name}", *SETTINGS[verb], f"scaling.num_workers={workers}")
    first, *others = (weights(storage, f"same-{verb}-{name}") for name in ("here", "again", "worker"))
    assert others == [first, first]


# The quick ones have a trainer of TRL and ours, and a worker before and after the interruption.
QUICK = [("rm", 0, 1), ("ppo", 1, 0), ("ppo", 0, 0)]
SLOW = [("rm", 0, 0), ("rm", 1, 0), ("ppo", 0, 1)]


@pytest.mark.parametrize(
    ("verb", "begins", "continues"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_a_run_that_was_interrupted_continues_here_or_in_a_worker(
    verb, begins, continues, storage, monkeypatch, embedded_ray
):
    name, options = f"cut-{verb}-{begins}{continues}", SETTINGS[verb]
    with monkeypatch.context() as patch:
        interrupted(patch, verb, 2)
        stage(verb, storage, name, *options, f"scaling.num_workers={begins}", status=1)
    assert (storage / name / "failed.json").exists()
    stage(verb, storage, name, *options, f"scaling.num_workers={continues}")
    stage(verb, storage, f"whole-{verb}", *options, "scaling.num_workers=0")
    assert weights(storage, name) == weights(storage, f"whole-{verb}")


PROBE = """
import sys
from pipeline.__main__ import main
status = main(sys.argv[2:])
heavy = {name for name in ("torch", "ray", "mlflow", "trl", "transformers", "datasets") if name in sys.modules}
assert heavy <= set(sys.argv[1].split()), sorted(heavy)
if "ray" in heavy:
    import ray
    assert not ray.is_initialized()
sys.exit(status)
"""
JOB = "jobs/demo/sft.yaml"


@pytest.mark.parametrize(
    ("may_import", "arguments", "status"),
    [
        ("", ["sft", JOB, "trainer.learning_rat=1"], 2),
        ("", ["init", "nowhere.jsonl"], 2),
        ("torch ray trl transformers datasets", ["validate", JOB], 0),
        ("torch ray mlflow trl transformers datasets", ["sft", JOB, "trainer.max_steps=1", "run.report=false", *NO_EVAL], 0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)  # fmt: skip
def test_a_command_imports_what_it_needs_and_starts_no_ray(may_import, arguments, status, tmp_path):
    if status == 0:
        arguments = [*arguments, f"run.storage_path={tmp_path}"]
    clean = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, may_import, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=clean,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-2000:]
