"""A seeded random walk over rows, job files and models: for any input, a command ends with status 0 or 2.

Each of the 2,000 cases mutates valid input a few times. A case passes if it ends within 20 seconds, with one message if the
status is 2, without a traceback, and with an unchanged registry.

    make test-all ARGS="tests/test_random_walk.py"      WALK_CASES=100 for a shorter one, WALK_SEED=7 for another
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
import sqlite3
import sys

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from running import ROOT

from pipeline.__main__ import main
from pipeline.config import JOBS, load_job, schema
from pipeline.config.libraries import problem
from pipeline.config.stages import STAGE
from pipeline.errors import InputError

CASES = int(os.environ.get("WALK_CASES", 2000))
SEED = int(os.environ.get("WALK_SEED", 1))
SECONDS = 20
STAGES = ["sft", "rm", "dpo", "kto", "ppo"]

CONTROL = [
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes",
    "</s>",
    "<|begin_of_text|>",
    "<|im_end|>",
]
TEXTS = [
    "", " ", "\n", "\0", "a\0b", "\x1b]0;title\x07\x1b[2J", "\r\n", "\u202etxt", "\ud800", "\udfff\ud800", "\ufeff", "ﷺ" * 50,
    "{{ 7 * 7 }}", "{% for i in range(10 ** 9) %}", "../../etc/passwd", "%20?#'\"\\", "x" * 20_000, "é" * 3000, "null", "NaN",
    "-1", "1e400", "models:/nothing@champion", "models:/a/b/c", "python:os:getcwd", "python:no:thing", "s3://", "file:///", "~",
    "!!python/object:os.system", "&a [*a]", "hf://nobody/none", "$(id)", "`id`", "日本語", "auto", *CONTROL,
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


# ------------------------------------------------------------------------------------------------------ rows


def good_row(stage, number):
    place = random.Random(number).choice(["Peru", "Mali", "Oman", "Cuba"])
    prompt, right, wrong = f"What is the capital of {place}? ({number})", f"It is far from {place}.", "No."
    if stage == "sft":
        return random.Random(number).choice([
            {"prompt": prompt, "completion": right},
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": right}]},
            {"instruction": prompt, "input": "", "output": right},
        ])  # fmt: skip
    if stage == "ppo":
        return {"prompt": prompt}
    if stage == "kto":
        return {"prompt": prompt, "completion": right if number % 2 else wrong, "label": bool(number % 2)}
    return random.Random(number).choice([
        {"prompt": prompt, "chosen": right, "rejected": wrong},
        {"prompt": prompt, "chosen": right, "rejected": wrong, "margin": 0.5},
        {"prompt": prompt, "pos_answers": [right], "neg_answers": [wrong]},
    ])  # fmt: skip


def places(value, path=()):
    """Returns every path into a row: keys and indices."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def mutated(draw, value):
    """Returns `value` (a row, a JSON file, a job) with something changed, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        every = places(value)
        if not every:
            break
        *parents, last = draw(st.sampled_from(every))
        holder = value
        for key in parents:
            holder = holder[key]
        what = draw(st.sampled_from(["set", "set", "set", "drop", "add", "rename", "wrap"]))
        if what == "set":
            holder[last] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        elif what == "wrap":
            holder[last] = draw(st.sampled_from([[holder[last]], {"a": holder[last]}, [holder[last]] * 3]))
        elif what == "drop":
            del holder[last]
        elif isinstance(holder, dict):
            name = draw(
                st.sampled_from(
                    ["label", "tools", "prompt", "margin", "chosen", "", "x" * 300, "a.b", "\ud800"]
                )
            )
            holder[name] = holder.pop(last) if what == "rename" else draw(st.sampled_from(NASTY))
    return value


def as_text(value):
    """Returns JSON as a careless writer writes it: NaN and Infinity, half surrogates, numbers of any size."""
    return json.dumps(value).replace("Infinity", "1e400")


def damaged(draw, content):
    """Returns bytes with a piece cut, added or overwritten."""
    if not content:
        return content
    at = draw(st.integers(0, len(content) - 1))
    what = draw(st.sampled_from(["cut", "flip", "insert", "empty"]))
    if what == "cut":
        return content[:at]
    if what == "flip":
        return content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at + 1 :]
    if what == "insert":
        return (
            content[:at]
            + draw(st.sampled_from([b"\xff\xfe", b"\0" * 9, b"{", b"]", b"\n", b"{}\n[]\n"]))
            + content[at:]
        )
    return b""


def file_of_rows(draw, stage, folder):
    """Writes a file of rows, some of them mutated. Returns overrides."""
    rows = [good_row(stage, number) for number in range(draw(st.integers(2, 6)))]
    for index in draw(st.lists(st.integers(0, len(rows) - 1), max_size=3)):
        rows[index] = mutated(draw, rows[index])
    kind = draw(st.sampled_from(["lines", "lines", "lines", "array"]))
    content = as_text(rows) if kind == "array" else "\n".join(as_text(row) for row in rows)
    data = content.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        data = damaged(draw, data)
    name = draw(st.sampled_from(["rows.jsonl", "rows.jsonl", "a b.json", "%20'?.jsonl", "ä\u202e.jsonl"]))
    if draw(st.integers(0, 5)) == 0:
        data, name = gzip.compress(data, mtime=0), name + ".gz"
        if draw(st.booleans()):
            data = damaged(draw, data)
    path = folder / name
    path.write_bytes(data)
    options = draw(st.lists(st.sampled_from([
        "data.on_error=skip", "data.too_long=drop", "data.too_long=truncate", "data.max_length=24", "data.eval_fraction=0.3",
        "model.chat_template=plain", "data.apply_chat_template=true",
    ]), max_size=3, unique_by=lambda option: option.partition("=")[0]))  # fmt: skip
    return [f"data.train={json.dumps(str(path))}", *options]


# ------------------------------------------------------------------------------------------------- job files

SECTIONS = {
    **{name: f"pipeline.config.job.{name.title()}" for name in ("model", "data", "run")},
    "mlflow": "pipeline.config.job.MLflow",
    "lora": "peft.tuners.lora.config.LoraConfig",
    "scaling": "ray.train.v2.api.config.ScalingConfig",
}
WAITS = {"run.storage_path", "mlflow.tracking_uri"}  # the walk's own
TOP = "policy reward judge baseline gate gate.eval_loss gate.nothing stage nothing data".split()


def keys_of(stage):
    keys = [f"{section}.{key}" for section, dotted in SECTIONS.items() for key in schema.keys(dotted)]
    keys += [f"trainer.{key}" for key in schema.keys(STAGE[stage].trainer)] + TOP
    return sorted(set(keys) - WAITS)


def job_of(draw, stage, folder):
    """Writes a shipped job with keys set to anything. Returns (job file, overrides)."""
    job = yaml.safe_load((ROOT / f"jobs/demo/{stage}.yaml").read_text())
    overrides = []
    for key in draw(st.lists(st.sampled_from(keys_of(stage)), min_size=1, max_size=2)):
        value = draw(st.sampled_from(draw(st.sampled_from([NASTY, PLAUSIBLE]))))
        section, _, name = key.rpartition(".")
        if draw(st.booleans()):
            text = as_text(value)
            overrides.append(f"{key}={value if isinstance(value, str) and draw(st.booleans()) else text}")
        elif section and isinstance(job.setdefault(section, {}), dict):
            job[section][name] = value
        elif not section:
            job[key] = value
    data = yaml.safe_dump(job, allow_unicode=True).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        data = damaged(draw, data)
    path = folder / "job.yaml"
    path.write_bytes(data)
    return str(path), [one.encode("utf-8", "replace").decode() for one in overrides]


# ---------------------------------------------------------------------------------------------------- models


def damage_folder(draw, source, folder):
    """Copies a model or an adapter and corrupts one or two of its files."""
    shutil.copytree(source, folder)
    for _ in range(draw(st.integers(1, 2))):
        victim = draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
        what = draw(st.sampled_from(["json", "json", "json", "bytes", "bytes", "gone"]))
        if what == "gone":
            victim.unlink()
            break
        if what == "json" and victim.suffix == ".json":
            with contextlib.suppress(ValueError, RecursionError):  # corrupted already
                value = json.loads(victim.read_bytes())
                value = value if isinstance(value, dict) else {"": value}  # corrupted already
                small = {k: v for k, v in value.items() if k not in ("model", "added_tokens")}
                changed = mutated(draw, small) if small else {}
                kept = {k: v for k, v in value.items() if k not in small}
                victim.write_bytes(as_text({**kept, **changed}).encode("utf-8", "surrogatepass"))
                continue
        victim.write_bytes(damaged(draw, victim.read_bytes()))
    return folder


# ------------------------------------------------------------------------------------------------------ the walk


class Late(BaseException):
    """Twenty seconds are over."""


def alarm(*_):
    raise Late


def registered(store):
    """Returns the numbers of runs and of versions in a store."""
    if not store.exists():
        return 0, 0
    with contextlib.closing(sqlite3.connect(store)) as database:
        return tuple(
            database.execute(f"select count(*) from {table}").fetchone()[0]
            for table in ("runs", "model_versions")
        )


def verdict(arguments, runs):
    """Runs a command. Returns (exit status, what is wrong with its end or None, what it printed)."""
    out, err = io.StringIO(), io.StringIO()
    before = registered(runs / "mlflow.db")
    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(SECONDS)
    status, wrong = None, None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except Late:
        wrong = f"did not end within {SECONDS} s"
    except BaseException as error:  # the walk is about what escapes
        wrong = f"{type(error).__name__} escaped: {str(error)[:300]}"
    finally:
        signal.alarm(0)
    said = err.getvalue()
    errors = [line for line in said.splitlines() if line.startswith(("error: ", "failed: "))]
    if wrong is None and status not in (0, 2):
        wrong = f"status {status}"
    elif wrong is None and "Traceback" in said + out.getvalue():
        wrong = "a traceback"
    elif wrong is None and status == 2 and len(errors) != 1:
        wrong = f"{len(errors)} messages"
    elif wrong is None and any(ord(c) < 32 and c not in "\n\t" for c in said + out.getvalue()):
        wrong = "control characters on the terminal"
    if wrong is None and registered(runs / "mlflow.db") != before:
        wrong = "something was registered"
    return status, wrong, (out.getvalue() + said)[-1500:]


def walk(cases, make, runs):
    """Runs `cases` cases. Returns [(arguments, what is wrong, what was printed)], and how many ended with 0 and with 2."""
    failures, ended = [], {0: 0, 2: 0}

    @seed(SEED)
    @settings(max_examples=cases, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def one(data):
        arguments = [*make(data.draw), f"run.storage_path={runs}", "run.report=false"]
        status, wrong, said = verdict(arguments, runs)
        if wrong:
            failures.append((arguments, wrong, said))
            print(f"\nWALK {wrong}\n  {arguments!r:.1500}\n  {said}", file=sys.__stdout__, flush=True)
        else:
            ended[status] += 1
        if os.environ.get("WALK_SHOW"):
            print(f"\n{status} {arguments!r:.400}\n  {said.strip()[-300:]}", file=sys.__stdout__, flush=True)

    one()
    return failures, ended


def check(cases, make, runs):
    failures, ended = walk(cases, make, runs)
    assert not failures, f"{len(failures)} of {cases} cases: " + "; ".join(
        sorted({wrong for _, wrong, _ in failures})
    )
    assert ended[0] > cases // 50 and ended[2] > cases // 10, f"the walk is one-sided: {ended}"


def loaded(cases, seed):
    """Returns the accepted jobs of random keys with random values; all others raise an InputError on one line."""
    dice, accepted = random.Random(seed), []
    for _ in range(cases):
        stage = dice.choice(JOBS)
        keys, values = [*schema.keys_of(stage), *TOP], [*NASTY, *PLAUSIBLE]
        given = [f"{dice.choice(keys)}={as_text(dice.choice(values))}" for _ in range(dice.choice((1, 1, 2)))]
        try:
            accepted.append(load_job(f"jobs/demo/{stage}.yaml", given, stage))
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500, (given, str(error))
        except BaseException as error:
            raise AssertionError(f"{stage} {given}: {error!r}") from error
    return accepted


def test_every_key_with_every_value_is_accepted_or_answered(in_root):
    assert 30 < len(loaded(1200, seed=1)) < 400


@pytest.mark.slow
def test_the_libraries_accept_the_rest_or_name_the_key(in_root):
    """TRL and peft build what load_job accepts, or say which key is wrong. A thousand jobs take seconds."""
    accepted = [job for job in loaded(20_000, seed=2) if STAGE[job.stage].trl]
    assert len(accepted) > 300
    for job in accepted:
        refused = problem({"stage": job.stage, "lora": job.lora, "trainer": job.trainer, "use_gpu": True})
        assert refused is None or refused.startswith(("trainer", "lora")), refused


@pytest.fixture(scope="module")
def scene(tmp_path_factory, embedded_ray, adapters):
    """Returns the walk's (scratch folder, storage path)."""
    return tmp_path_factory.mktemp("walk"), tmp_path_factory.mktemp("walked")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, embedded_ray):
    """Returns {stage: folder} of adapters that real stages trained for one step."""
    from running import NO_EVAL, stage

    storage = tmp_path_factory.mktemp("adapters")
    short = ["trainer.max_steps=1", "mlflow.registered_model=null", *NO_EVAL]
    return {name: stage(name, storage, f"one-{name}", *short)["adapter"] for name in ("sft", "rm")}


def fresh(folder):
    """Returns an empty folder for one case."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def given_inputs(stage, adapters):
    named = {
        "dpo": [f"policy={adapters['sft']}"],
        "kto": [f"policy={adapters['sft']}"],
        "ppo": [f"policy={adapters['sft']}", f"reward={adapters['rm']}", "judge=null"],
    }
    return named.get(stage, [])


@pytest.mark.slow
def test_rows(scene, adapters, in_root_for_module):
    folder, runs = scene

    def make(draw):
        stage = draw(st.sampled_from(STAGES))
        rows = file_of_rows(draw, stage, fresh(folder / "rows"))
        held_out = ["data.eval=null", "trainer.eval_strategy=no"] if stage != "ppo" else ["data.eval=null"]
        return ["validate", f"jobs/demo/{stage}.yaml", *given_inputs(stage, adapters), *held_out, *rows]

    check(CASES * 2 // 5, make, runs)


@pytest.mark.slow
def test_job_files(scene, adapters, in_root_for_module):
    folder, runs = scene

    def make(draw):
        stage = draw(st.sampled_from(STAGES))
        job, overrides = job_of(draw, stage, fresh(folder / "jobs"))
        verb = draw(st.sampled_from(["validate", "validate", "plan"]))
        return [verb, job, *given_inputs(stage, adapters), *overrides]

    check(CASES * 2 // 5, make, runs)


@pytest.mark.slow
def test_models_and_adapters(scene, adapters, in_root_for_module):
    folder, runs = scene

    def make(draw):
        shutil.rmtree(folder / "spoilt", ignore_errors=True)
        stage = draw(st.sampled_from(STAGES))
        inputs = given_inputs(stage, adapters)
        if stage in ("sft", "rm") or draw(st.integers(0, 3)) == 0:
            spoilt = [
                f"model.name_or_path={damage_folder(draw, ROOT / 'jobs/demo/model', folder / 'spoilt')}"
            ]
        else:
            key = draw(st.sampled_from(["policy", "reward"] if stage == "ppo" else ["policy"]))
            source = adapters["sft" if key == "policy" else "rm"]
            inputs = [one for one in inputs if not one.startswith(key)]
            spoilt = [f"{key}={damage_folder(draw, source, folder / 'spoilt')}"]
        return ["validate", f"jobs/demo/{stage}.yaml", *inputs, *spoilt]

    check(CASES - 2 * (CASES * 2 // 5), make, runs)


@pytest.fixture(scope="module")
def in_root_for_module():
    before = os.getcwd()
    os.chdir(ROOT)
    yield
    os.chdir(before)
