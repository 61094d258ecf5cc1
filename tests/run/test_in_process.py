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
for may_import, arguments, expected in json.loads(sys.argv[1]):
    status = main(arguments)
    assert status == expected, arguments
    heavy = {name for name in ("torch", "ray", "mlflow", "trl", "transformers", "datasets") if name in sys.modules}
    assert heavy <= set(may_import.split()), (arguments, sorted(heavy))
    if "ray" in heavy:
        import ray
        assert not ray.is_initialized()
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


def test_a_command_imports_only_what_it_needs_and_does_not_start_ray(tmp_path):
    """A refusal imports nothing heavy. The commands run one after the other in a new process."""
    place = f"run.storage_path={tmp_path}"
    commands = [
        *(("", arguments, 2) for arguments in REFUSED.values()),
        ("torch ray trl transformers datasets", ["validate", JOB, place], 0),
        (
            "torch ray mlflow trl transformers datasets",
            ["sft", JOB, place, "trainer.max_steps=1", "run.report=false", *NO_EVAL],
            0,
        ),
    ]
    clean = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    program = [sys.executable, "-c", PROBE, json.dumps(commands)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for line, error in zip(done.stderr.splitlines(), REFUSED, strict=True):
        assert line.startswith(f"error: {error}"), line
    # The class of the saved tokenizer also exists in transformers 4.
    saved = [
        *tmp_path.glob("*/final/adapter/tok*_config.json"),
        *tmp_path.glob("artifacts/**/tok*_config.json"),
    ]
    classes = {json.loads(file.read_text())["tokenizer_class"] for file in saved}
    assert classes == {"PreTrainedTokenizerFast"}, saved
