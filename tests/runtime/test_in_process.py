"""Jobs that run in the process of their command (scaling.num_workers=0): the bits of one worker, and no Ray."""

import os
import subprocess
import sys

import pytest
from resumed import assert_equal
from running import NO_EVAL, ROOT, stage

from tests.runtime.test_resume import SETTINGS


# Of rm and ppo the quick cases of test_resume.py show it: they begin in one place and end in the other.
@pytest.mark.slow
@pytest.mark.parametrize("verb", SETTINGS)
def test_no_worker_and_one_end_with_the_same_bytes(verb, storage, embedded_ray):
    """Twice in one process, too: no stage leaves random numbers, threads or a precision behind."""
    first, *others = (
        stage(verb, storage, f"same-{verb}-{name}", *SETTINGS[verb], f"scaling.num_workers={workers}")
        for name, workers in (("here", 0), ("again", 0), ("worker", 1))
    )
    for other in others:
        assert_equal(storage, first, other)


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
