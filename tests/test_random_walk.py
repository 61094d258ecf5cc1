"""Runs `validate` on random rows, and loads random jobs. Any input must be accepted, or rejected with one message.

Each of the 1,000 seeded cases of `validate` mutates valid rows a few times. A case passes if it ends with status 0 or 2 within
20 seconds, with one message if the status is 2, and without a traceback.

    make test-all ARGS="tests/test_random_walk.py"      WALK_CASES=100 for fewer cases, WALK_SEED=7 for others
"""

import contextlib
import copy
import gzip
import io
import json
import math
import os
import random
import shutil
import signal
import sys
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from running import ROOT

from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.job import ALL_STAGES, load_job, schema
from pipeline.job.libraries import check_with_libraries
from pipeline.job.stages import STAGE_SPECS

CASES = int(os.environ.get("WALK_CASES", 1000))
SEED = int(os.environ.get("WALK_SEED", 1))
SECONDS = 20
# {stage: its rows in jobs/demo/data}
FILES = {
    "sft": "demonstrations",
    "rm": "preferences",
    "dpo": "preferences",
    "kto": "thumbs",
    "ppo": "prompts",
}
# {stage: overrides for inputs that need no earlier run}
INPUTS = {
    "dpo": ["policy=base"],
    "kto": ["policy=base"],
    "ppo": ["policy=base", "reward=python:pipeline.demo:gold", "judge=null"],
}

TEXTS = [
    "", " ", "\n", "\0", "a\0b", "\x1b]0;title\x07\x1b[2J", "\r\n", "\u202etxt", "\ud800", "\udfff\ud800", "\ufeff", "ﷺ" * 50,
    "{{ 7 * 7 }}", "{% for i in range(10 ** 9) %}", "../../etc/passwd", "%20?#'\"\\", "x" * 20_000, "é" * 3000, "null", "NaN",
    "-1", "1e400", "models:/nothing@champion", "models:/a/b/c", "python:os:getcwd", "python:no:thing", "s3://", "file:///", "~",
    "!!python/object:os.system", "&a [*a]", "hf://nobody/none", "$(id)", "`id`", "日本語", "auto",
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes", "</s>", "<|begin_of_text|>", "<|im_end|>",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 0.5, -0.0, 1e-30, 1e30, 1e400, -1e400, math.nan, 2**31, 2**32, 2**63, 2**64, 10**400, 3.7, 256, 100_000,
]  # fmt: skip
OTHERS = [
    None, True, False, [], {}, [None], [[]], [1, "a"], {"a": None}, {"": 1}, [{"role": "user"}], {"text": "x"}, [[[[[[1]]]]]],
]  # fmt: skip
PLAUSIBLE = [
    0, 1, 2, 8, 64, 0.1, 0.5, 1e-4, 1.5, True, False, None, "auto", "no", "steps", "cosine", "plain", [1, 2], ["q_proj"],
]  # fmt: skip
NASTY = [*TEXTS, *NUMBERS, *OTHERS]
NAMES = ["label", "tools", "prompt", "margin", "chosen", "", "x" * 300, "a.b", "\ud800"]


# ------------------------------------------------------------------------------------------------------ rows


def places(value, path=()):
    """Returns every path into a row: keys and indices."""
    paths = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        paths += places(item, (*path, key))
    return paths


def mutated(draw, value):
    """Returns a copy of a row with one to three random changes."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        paths = places(value)
        if not paths:
            break
        *parents, last = draw(st.sampled_from(paths))
        parent = value
        for key in parents:
            parent = parent[key]
        change = draw(st.sampled_from(["set", "set", "set", "drop", "add", "rename", "wrap"]))
        if change == "set":
            parent[last] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        elif change == "wrap":
            parent[last] = draw(st.sampled_from([[parent[last]], {"a": parent[last]}, [parent[last]] * 3]))
        elif change == "drop":
            del parent[last]
        elif isinstance(parent, dict):
            name = draw(st.sampled_from(NAMES))
            parent[name] = parent.pop(last) if change == "rename" else draw(st.sampled_from(NASTY))
    return value


def as_text(value):
    """Returns JSON text. The text may contain NaN, half surrogate pairs, and numbers of any size."""
    return json.dumps(value).replace("Infinity", "1e400")


def damaged(draw, content):
    """Returns the bytes after cutting out, inserting or overwriting a random part."""
    if not content:
        return content
    index = draw(st.integers(0, len(content) - 1))
    junk = st.sampled_from([b"\xff\xfe", b"\0" * 9, b"{", b"]", b"\n", b"{}\n[]\n"])
    change = draw(st.sampled_from(["cut", "flip", "insert", "empty"]))
    if change == "flip":
        return content[:index] + draw(st.binary(min_size=1, max_size=8)) + content[index + 1 :]
    if change == "insert":
        return content[:index] + draw(junk) + content[index:]
    return content[:index] if change == "cut" else b""


def rarely(draw, one_in):
    return draw(st.integers(1, one_in)) == 1


def wrong_rows(draw, kind, folder):
    """Returns a command that reads a file of rows with random changes."""
    lines = (ROOT / f"jobs/demo/data/{FILES[kind]}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: draw(st.integers(2, 6))]]
    for index in draw(st.lists(st.integers(0, len(rows) - 1), max_size=3)):
        rows[index] = mutated(draw, rows[index])
    array = rarely(draw, 4)
    content = as_text(rows) if array else "\n".join(as_text(row) for row in rows)
    data = content.encode("utf-8", "surrogatepass")
    if rarely(draw, 5):
        data = damaged(draw, data)
    name = draw(st.sampled_from(["rows.jsonl", "rows.jsonl", "a b.json", "%20'?.jsonl", "ä\u202e.jsonl"]))
    if rarely(draw, 6):
        data, name = gzip.compress(data, mtime=0), name + ".gz"
        if draw(st.booleans()):
            data = damaged(draw, data)
    (folder / name).write_bytes(data)
    options = draw(st.lists(st.sampled_from([
        "data.on_error=skip", "data.overlong=drop", "data.overlong=truncate", "data.max_length=24", "data.eval_fraction=0.3",
        "model.chat_template=plain", "data.apply_chat_template=true",
    ]), max_size=3, unique_by=lambda option: option.partition("=")[0]))  # fmt: skip
    held_out = ["data.eval=null", *(["trainer.eval_strategy=no"] if kind != "ppo" else [])]
    rows = f"data.train={json.dumps(str(folder / name))}"
    return ["validate", f"jobs/demo/{kind}.yaml", *INPUTS.get(kind, []), *held_out, rows, *options]


class Late(BaseException):
    """Raised to end a command that takes longer than SECONDS."""


def alarm(*_):
    raise Late


def verdict(arguments):
    """Runs a command. Returns the exit status, a description of the error in how the command ended (or None), and the output."""
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(SECONDS)
    status, escaped = None, None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except Late:
        escaped = f"did not end within {SECONDS} s"
    except BaseException as error:  # the command must not raise any exception
        escaped = f"{type(error).__name__} escaped: {str(error)[:300]}"
    finally:
        signal.alarm(0)
    output = out.getvalue() + err.getvalue()
    messages = [line for line in err.getvalue().splitlines() if line.startswith(("error: ", "failed: "))]
    problems = {
        escaped: escaped is not None,
        f"status {status}": status not in (0, 2),
        "a traceback": "Traceback" in output,
        f"{len(messages)} messages": status == 2 and len(messages) != 1,
        "control characters on the terminal": any(ord(c) < 32 and c not in "\n\t" for c in output),
    }
    return status, next((problem for problem, occurred in problems.items() if occurred), None), output[-1500:]


def check(cases, make, runs):
    """Runs random cases. Each case must end with status 0 or 2, and each status must occur often."""
    failures, counts = [], {0: 0, 2: 0}

    @seed(SEED)
    @settings(max_examples=cases, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def one(data):
        arguments = [*make(data.draw), f"run.storage_path={runs}", "run.report=false"]
        status, problem, output = verdict(arguments)
        if problem:
            failures.append(problem)
        else:
            counts[status] += 1
        if problem or os.environ.get("WALK_SHOW"):
            print(f"\n{problem or status} {arguments!r:.1500}\n  {output}", file=sys.__stdout__, flush=True)

    one()
    assert not failures, f"{len(failures)} of {cases} cases: {sorted(set(failures))}"
    assert counts[0] > cases // 50 and counts[2] > cases // 10, f"the walk is one-sided: {counts}"


# ------------------------------------------------------------------------------------------------- job files

TOP = "policy reward judge baseline gate gate.eval_loss gate.nothing stage nothing data lora.task_type trainer.output_dir".split()


def loaded(cases, seed):
    """Loads jobs with random keys and values. Returns the accepted jobs. All other jobs must raise an InputError on one line."""
    dice, accepted = random.Random(seed), []
    for _ in range(cases):
        kind = dice.choice(ALL_STAGES)
        keys, values = [*schema.keys_of(kind), *TOP], [*NASTY, *PLAUSIBLE]
        texts = [f"{dice.choice(keys)}={as_text(dice.choice(values))}" for _ in range(dice.choice((1, 1, 2)))]
        try:
            accepted.append(load_job(f"jobs/demo/{kind}.yaml", texts, kind))
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500, (texts, str(error))
        except BaseException as error:
            raise AssertionError(f"{kind} {texts}: {error!r}") from error
    return accepted


def test_every_key_with_every_value_is_accepted_or_answered(in_root):
    assert 10 < len(loaded(400, seed=1)) < 130


@pytest.mark.slow
def test_the_libraries_accept_the_rest_or_name_the_key(in_root):
    """TRL and peft must accept the jobs that load_job accepts, or name the wrong key. A thousand jobs take seconds."""
    accepted = [job for job in loaded(20_000, seed=2) if STAGE_SPECS[job.stage].trl]
    assert len(accepted) > 300
    for job in accepted:
        try:
            check_with_libraries(replace(job, source="job", scaling={"use_gpu": True}))
        except InputError as error:
            assert str(error).startswith(("job: trainer", "job: lora")), error


@pytest.mark.slow
def test_rows_end_validate_with_status_0_or_2(tmp_path, in_root):
    def make(draw):
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        (tmp_path / "case").mkdir()
        kind = draw(st.sampled_from(sorted(FILES)))
        return wrong_rows(draw, kind, tmp_path / "case")

    check(CASES, make, tmp_path / "runs")
