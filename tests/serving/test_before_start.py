"""Tests the checks that `serve` makes before it starts the server, and the commands in docs/serving.md."""

import re
import shlex

import pytest
from running import ROOT

from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.job import load_job

TEXT = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
OVERRIDES = re.findall(r"make (serve|kto|rm)(?: ARGS=\"(.*?)\")", TEXT)


@pytest.mark.parametrize(("verb", "overrides"), OVERRIDES)
def test_the_commands_have_valid_keys(verb, overrides, in_root):
    job = load_job(f"jobs/demo/{verb}.yaml", shlex.split(overrides), verb)
    if verb != "serve":
        assert not job.gate, "without eval rows, a gate would fail"


def test_completions_that_leave_no_space_for_prompts_are_reported_before_the_start(tmp_path, capsys, in_root):
    given = ["serve.policies={p: base}", "serve.rewards={}", "serve.port=0", f"run.storage_path={tmp_path}"]
    assert main(["serve", "jobs/demo/serve.yaml", *given, "trainer.response_length=250"]) == 2
    printed = capsys.readouterr()
    message = "is more than the model's context of 256 tokens less trainer.response_length=250; use data.max_length=6"
    assert message in printed.err and "starting Ray" not in printed.out


def test_feedback_cannot_be_stored_in_a_bucket(in_root):
    bucket, folder = "run.storage_path=s3://bucket", "serve.feedback_path=feedback"
    for given in (["serve.feedback_path=s3://bucket/feedback"], [bucket]):
        with pytest.raises(InputError, match=r"serve\.feedback_path: .*set serve.feedback_path=FOLDER$"):
            load_job("jobs/demo/serve.yaml", given, "serve")
    load_job("jobs/demo/serve.yaml", [bucket, folder], "serve")


@pytest.mark.parametrize("profile", ["demo", "own", "llama3-8b", "llama3-70b-qlora"])
def test_the_stages_of_a_profile_accept_the_longest_feedback_of_its_server(profile, in_root):
    job = load_job(f"jobs/{profile}/serve.yaml", [], "serve")
    for stage in ("kto", "rm", "dpo", "sft"):
        most = load_job(f"jobs/{profile}/{stage}.yaml", [], stage).data.max_length
        assert job.data.max_length + job.args.response_length <= most, stage
