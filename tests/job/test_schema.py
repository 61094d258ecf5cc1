"""Tests that schema.json matches the installed libraries and accepts all shipped jobs, and that `rlhf help` prints it."""

import json
import subprocess
import sys

import jsonschema
import pytest
import yaml
from running import ROOT

from pipeline.__main__ import main
from pipeline.job import schema
from pipeline.job.yaml_tree import read_tree

VALIDATOR = jsonschema.Draft7Validator(schema.schema_document())
JOBS = sorted(f for f in (ROOT / "jobs").glob("*/*.yaml") if f.parent.name != "cloud")


def test_the_schema_matches_the_installed_libraries():
    """Generates the schema in another process, because the order of types depends on what this process has imported."""
    program = "from pipeline.job import schema_of; print(schema_of.schema_text(), end='')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout[done.stdout.index("{") :] == schema.FILE.read_text(), (
        "run python -m pipeline.job.schema_of"
    )


@pytest.mark.parametrize("file", JOBS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_job_names_the_schema_and_matches_it(file):
    first = file.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (file.parent / first.partition("=")[2]).resolve() == schema.FILE.resolve()
    if "stage" in yaml.safe_load(file.read_text()):
        VALIDATOR.validate(read_tree(file, []).data)


@pytest.mark.parametrize("key", ["lora_alpha=0", "r=many", "rr=8", "task_type=CAUSAL_LM"])
def test_the_schema_rejects_wrong_keys_and_values(key):
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(read_tree(ROOT / "jobs/demo/sft.yaml", [f"lora.{key}"]).data)


def test_help_explains_a_key(capsys):
    assert main(["help", "data.max_length"]) == 0
    shown = capsys.readouterr().out
    assert "a whole number between 2 and 1048576 or null" in shown and "context length of the model" in shown
    assert main(["help", "kl_coef"]) == 0
    assert "trainer.kl_coef   (ppo)" in (shown := capsys.readouterr().out) and "default  0.05" in shown
    assert main(["help", "lr"]) == 0
    assert "trainer.learning_rate   (" in capsys.readouterr().out
    assert main(["help", "trainer.lerning_rate"]) == 2
    assert "did you mean trainer.learning_rate?" in capsys.readouterr().err


def test_keys_of_the_schema_have_a_description_and_a_valid_default():
    jsonschema.Draft7Validator.check_schema(json.loads(schema.FILE.read_text()))
    for name, one in schema.schema_document()["$defs"].items():
        for key, known in one["properties"].items():
            assert "default" not in known or schema.find_mismatch(known["default"], known) is None, (
                name,
                key,
            )
            ours = name.startswith("pipeline.") and not name.endswith((".job.Job", ".job.Source"))
            assert "description" in known or not ours, (name, key)
