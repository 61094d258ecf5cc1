"""Tests that jobs with scaling.num_workers=0 run in the command's process, without Ray, and equal one worker bit for bit."""

import json
import os
import subprocess
import sys

import pytest
from resumed import assert_equal
from running import NO_EVAL, ROOT, stage

from tests.runtime.test_resume import SETTINGS


# For rm and ppo, the quick cases of test_resume.py compare runs that end in a worker with runs in this process.
@pytest.mark.slow
@pytest.mark.parametrize("verb", SETTINGS)
def test_no_worker_and_one_worker_give_the_same_bytes(verb, storage, embedded_ray):
    """The stage runs twice in one process, to show that it leaves no random state, threads or precision behind."""
    first, *others = (
        stage(verb, storage, f"same-{verb}-{name}", *SETTINGS[verb], f"scaling.num_workers={workers}")
        for name, workers in (("here", 0), ("again", 0), ("worker", 1))
    )
    for other in others:
        assert_equal(storage, first, other)


# Commands take seconds even on a slow disk, because they check keys and paths before heavy imports.
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
    ("may_import", "arguments", "error"),
    [
        ("", ["sft", JOB, "trainer.learning_rat=1"], "command line: trainer.learning_rat: unknown key"),
        ("", ["sft", JOB, "data.train=/nowhere.jsonl"], "data.train: there is no file '/nowhere.jsonl'"),
        ("", ["rm", "jobs/demo/rm.yaml", "model.name_or_path=/nowhere"], "model.name_or_path: there is no folder '/nowhere'"),
        ("", ["run", "jobs/demo", "ppo.data.train=/nowhere.jsonl"], "data.train: there is no file '/nowhere.jsonl'"),
        ("", ["init", "nowhere.jsonl"], "data: there is no file 'nowhere.jsonl'"),
        ("torch ray trl transformers datasets", ["validate", JOB], None),
        ("torch ray mlflow trl transformers datasets", ["sft", JOB, "trainer.max_steps=1", "run.report=false", *NO_EVAL], None),
    ],
    ids=lambda value: " ".join([value[0], *value[2:3]]) if isinstance(value, list) else None,
)  # fmt: skip
def test_a_command_imports_only_what_it_needs_and_does_not_start_ray(may_import, arguments, error, tmp_path):
    if arguments[0] != "init":
        arguments = [*arguments, f"run.storage_path={tmp_path}"]
    clean = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, may_import, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=clean,
    )
    assert done.returncode == (2 if error else 0), done.stdout[-2000:] + done.stderr[-2000:]
    assert not error or (done.stderr.startswith(f"error: {error}") and done.stderr.count("\n") == 1), (
        done.stderr
    )
    if "mlflow" in may_import:  # transformers 4 also has the class
        saved = [
            *tmp_path.glob("*/final/adapter/tok*_config.json"),
            *tmp_path.glob("artifacts/**/tok*_config.json"),
        ]
        classes = {json.loads(file.read_text())["tokenizer_class"] for file in saved}
        assert classes == {"PreTrainedTokenizerFast"}, saved
