"""Tests that jobs with scaling.num_workers=0 run without Ray, in the command's process, with the results of one worker."""

import json
import os
import subprocess
import sys

import pytest
from resumed import assert_equal
from running import NO_EVAL, ROOT, stage

from tests.run.test_resume import SETTINGS


# For rm and ppo, quick cases of test_resume.py compare runs in a worker with runs in this process.
@pytest.mark.slow
@pytest.mark.parametrize("verb", SETTINGS)
def test_no_worker_and_one_worker_give_the_same_bytes(verb, storage, embedded_ray):
    """Two runs in one process have equal results, so the first run does not change random state, threads or precision."""
    first, *others = (
        stage(verb, storage, f"same-{verb}-{name}", *SETTINGS[verb], f"scaling.num_workers={workers}")
        for name, workers in (("here", 0), ("again", 0), ("worker", 1))
    )
    for other in others:
        assert_equal(storage, first, other)


PROBE = """
import json, sys
from pipeline.__main__ import main
for arguments in json.loads(sys.argv[2]):
    status = main(arguments)
    heavy = {name for name in ("torch", "ray", "mlflow", "trl", "transformers", "datasets") if name in sys.modules}
    assert heavy <= set(sys.argv[1].split()), sorted(heavy)
    if "ray" in heavy:
        import ray
        assert not ray.is_initialized()
sys.exit(status)
"""
JOB = "jobs/demo/sft.yaml"


REFUSED = {
    "command line: trainer.learning_rat: unknown key": ["sft", JOB, "trainer.learning_rat=1"],
    "data.train: there is no file '/nowhere.jsonl'": ["run", "jobs/demo", "ppo.data.train=/nowhere.jsonl"],
    "model.name_or_path: there is no folder '/nowhere'": [
        "rm",
        "jobs/demo/rm.yaml",
        "model.name_or_path=/nowhere",
    ],
    "data: there is no file 'nowhere.jsonl'": ["init", "nowhere.jsonl"],
}


def ran(may_import, *commands):
    """Runs commands one after the other in a new process. Returns the exit status of the last command, and stderr."""
    clean = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, may_import, json.dumps(commands)],
        cwd=ROOT, capture_output=True, text=True, env=clean,
    )  # fmt: skip
    print(done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode, done.stderr


def test_a_refusal_imports_nothing_heavy():
    status, said = ran("", *REFUSED.values())
    assert status == 2 and said.count("\n") == len(REFUSED)
    for line, error in zip(said.splitlines(), REFUSED, strict=True):
        assert line.startswith(f"error: {error}"), line


@pytest.mark.parametrize(
    ("may_import", "arguments"),
    [
        ("torch ray trl transformers datasets", ["validate", JOB]),
        ("torch ray mlflow trl transformers datasets", ["sft", JOB, "trainer.max_steps=1", "run.report=false", *NO_EVAL]),
    ],
    ids=["validate", "sft"],
)  # fmt: skip
def test_a_command_imports_only_what_it_needs_and_does_not_start_ray(may_import, arguments, tmp_path):
    assert ran(may_import, [*arguments, f"run.storage_path={tmp_path}"])[0] == 0
    if "mlflow" in may_import:  # checks that the saved tokenizer class also exists in transformers 4
        saved = [
            *tmp_path.glob("*/final/adapter/tok*_config.json"),
            *tmp_path.glob("artifacts/**/tok*_config.json"),
        ]
        classes = {json.loads(file.read_text())["tokenizer_class"] for file in saved}
        assert classes == {"PreTrainedTokenizerFast"}, saved
