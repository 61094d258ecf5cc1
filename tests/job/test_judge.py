"""Tests the YAML file of a judge: errors name the line, and the digest covers all keys that change scores."""

import json
import re

import pytest
import yaml

from pipeline.errors import InputError
from pipeline.job import judge, load_job
from pipeline.job.judge import LIMITS, Definition

RIGHT = "model: wise\nform: score\n"


def rubric(*changed):
    """Returns the text of a judge's file with one criterion per mapping. The mapping overrides the criterion's default keys."""
    usual = {"name": "a", "text": "b", "choices": ["bad", "good"]}
    return json.dumps(
        {"model": "wise", "form": "rubric", "criteria": [usual | yaml.safe_load(one) for one in changed]}
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("form: score\n", r"model: missing"),
        (RIGHT + "promt: x\n", r"judge\.yaml:3: promt: unknown key; did you mean prompt\?"),
        ("model: wise\nform: stars\n", r"judge\.yaml:2: form: found 'stars', expected one of score, yes, rank, rubric"),
        (RIGHT + "endpoint: http://there/v1\napi_key_variable: KEY\n", r"endpoint: found http:// with a key"),
        (RIGHT + "endpoint: http://me:secret@there/v1\n", r"judge\.yaml:3: the value looks like a secret"),
        (RIGHT + "prompt: Is it good?\n", r"judge\.yaml:3: prompt: lacks \{completion\}"),
        ("model: wise\nform: rank\nprompt: '{completions} {completion}'\n", r"prompt: shows \{completion\}, which"),
        ("model: wise\nform: rubric\n", r"criteria: `form: rubric` needs criteria"),
        (rubric("{choices: ['A', 'A*']}"), "expected two or more different choices"),
        (rubric("{choices: ['bad, rude', good]}"), "choices, on one line and without commas"),
        (rubric("{name: a_b}", "{name: ab}"), "criteria: 1: .*expected a unique name on one line; case, Markdown"),
        (rubric('{name: "a\\nb"}'), "expected a unique name on one line"),
        (rubric("{weight: 0}"), "expected a weight above 0$"),
        (rubric("{wieght: 1}"), r"expected \{name: NAME, text: TEXT"),
        (RIGHT + "draws: 3\n", r"draws: found 3, but all answers are equal with temperature 0"),
        (RIGHT + "words: [Yes, yes]\n", r"words: found \['Yes', 'yes'\], expected two different words"),
        (RIGHT.replace("score", "yes") + "draws: 3\ntemperature: 1\n", r"draws: found 3, .*and with `form: yes`; use 1"),
        (RIGHT + "low: 10\n", r"high: found 10, the same value as `low`"),
    ],
)  # fmt: skip
def test_a_message_about_a_wrong_file_has_the_line(text, says, tmp_path):
    (tmp_path / "judge.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        judge.read_definition(str(tmp_path / "judge.yaml"))
    assert re.search(says, str(caught.value)), caught.value


def test_the_digest_covers_all_keys_but_limits():
    plain = Definition("wise", "score")
    others = {"model": "other", "form": "yes", "endpoint": "http://x", "system": "s", "prompt": "{completion}", "low": 0.0,
              "words": ["Right", "Wrong"], "body": {"temperature": None}, "high": 5.0, "criteria": [{}], "orders": "both", "draws": 2, "temperature": 1.0, "max_tokens": 9}  # fmt: skip
    limits = {"concurrency": 2, "most_calls": 3, "timeout_s": 1.0, "api_key_variable": "KEY"}
    digests = {
        Definition(**{"model": "wise", "form": "score", key: value}).digest for key, value in others.items()
    }
    assert len(digests | {plain.digest}) == len(others) + 1
    assert Definition("wise", "score", **limits).digest == plain.digest
    assert {*others, *LIMITS} == {*Definition.__dataclass_fields__}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("policy=judge:x.yaml", r"policy: found"),
        ("reward={judge: x.yaml, wieght: 2}", r"reward: found .*expected \{judge: FILE\}"),
        (
            "reward=[{judge: 3}]",
            r"reward\.0: found .*expected \{reward: NAME, weight: NUMBER\} or \{judge: FILE",
        ),
        ("judge={reward: x}", r"judge: found .*expected \{judge: FILE\}"),
    ],
)
def test_a_job_names_a_judge_as_a_mapping(override, says):
    with pytest.raises(InputError) as caught:
        load_job("jobs/demo/ppo.yaml", [override])
    assert re.search(says, str(caught.value)), caught.value


def test_a_pinned_judge_is_rejected_if_its_file_changes(tmp_path):
    file = tmp_path / "judge.yaml"
    file.write_text(RIGHT)
    version = judge.pin_judge(f"judge:{file}")
    assert judge.load_pinned(version) == judge.read_definition(str(file))
    file.write_text(RIGHT + "concurrency: 2\n")
    judge.load_pinned(version)
    file.write_text(RIGHT + "high: 5\n")
    with pytest.raises(InputError, match="has changed since the run began"):
        judge.load_pinned(version)
