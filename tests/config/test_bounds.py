"""Job files that were written to hurt: bombs, depths, endless files, odd keys, and every key with every kind of value.

All of it is answered by one message within a second, before anything heavy is imported.
"""

import os
import random
import sys
import time

import pytest

from pipeline.__main__ import main
from pipeline.config import JOBS, load_job, schema
from pipeline.config.library_keys import REFUSED
from pipeline.config.stages import STAGE
from pipeline.errors import InputError

GOOD = "stage: sft\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\n"
NINE = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
MERGES = "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30))
CHAIN = "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))
FILES = {
    "alias bomb": (GOOD + f"a0: &a0 [lol, lol]\n{NINE}", r":\d+:\d+: .*more than 100,000 values, aliases written out"),
    "merge bomb": (GOOD + f"a0: &a0 {{x: 1}}\n{MERGES}", "more than 100,000 values"),
    "chain of aliases": (GOOD + f"a0: &a0 [1]\n{CHAIN}", "more than 32 levels"),
    "deep lists": (GOOD + "x: " + "[" * 10_000 + "]" * 10_000, r"job\.yaml:4:\d+: .*more than 32 levels"),
    "deep maps": (GOOD + "x: " + "{a: " * 10_000, "more than 32 levels"),
    "deep blocks": (GOOD + "x:\n" + "- " * 10_000 + "a\n", "more than 32 levels"),
    "cyclic alias": (GOOD + "x: &x [*x]\n", "an alias refers to the node around it"),
    "cyclic merge": (GOOD + "x: &x {<<: *x}\n", "an alias refers to the node around it"),
    "megabytes": (GOOD + "#" * 5_000_000, "found more than 128 KiB"),
    "thousands of keys": (GOOD + "trainer:\n" + "".join(f"  k{i}: 1\n" for i in range(8000)), r"trainer\.k0: unknown key"),
    "a long key": (GOOD + f"'{'k' * 900}': 1\n", "found the key 'kkk.*expected a short one"),
    "an empty key": (GOOD + "'': 1\n", "found the key ''"),
    "a coloured key": (GOOD + 'trainer: {"\\e[31mred": 1}\n', r"trainer: found the key '\\x1b\[31mred'"),
    "a long text": (GOOD + f"run: {{name: {'n' * 5000}}}\n", "a text of 5,000 characters, expected at most 4,096"),
    "a huge number": (GOOD + f"trainer: {{seed: {'1' * 5000}}}\n", r"trainer\.seed: found inf"),
    "half a surrogate pair": (GOOD + 'run: {name: "\\ud800"}\n', r"run\.name: found a byte that is not UTF-8"),
    "NUL": (GOOD + "x: 'a\0b'\n", "unacceptable character #x0000"),
    "tabs": ("stage: sft\nmodel:\n\tname_or_path: m\n", r":3:1: not valid YAML"),
    "two documents": (GOOD + "---\nstage: rm\n", r":4:1: not valid YAML: but found another document"),
    "UTF-16": (GOOD.encode("utf-16"), "not UTF-8 text"),
    **{
        f"tag {tag}": (GOOD + f"x: {tag}\n", r":4:4: not valid YAML: found a tag .*write the value without it")
        for tag in ("!!python/object/new:os.system [ls]", "!!binary a", "!!set {a}", "!!omap [a: 1]", "!!timestamp x",
                    "!!int ''", "!!float ''", "!!bool maybe", "!own x")
    },
    **{
        f"key {key}": (GOOD + f"{key}: 1\n", "a key is not text; put it in quotes")
        for key in ("1", "1.5", "true", "~", "? [a]\n", "? {a: b}\n")
    },
    "scalar": ("hello\n", "found 'hello', expected sections"),
    "null": ("~\n", "found null, expected sections"),
}  # fmt: skip


def refused(capsys, *arguments: str) -> str:
    """The one message of a command that is answered with status 2, at once."""
    started = time.process_time()
    assert main(list(arguments)) == 2
    seconds = time.process_time() - started  # whatever else the machine has to do
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert len(printed.err) < 1500 and printed.err.rstrip("\n").isprintable(), printed.err
    assert seconds < 2  # the most that any of them takes is half a second
    return printed.err


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_at_once(name, tmp_path, capsys):
    import re

    content, says = FILES[name]
    path = tmp_path / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    assert re.search(says, refused(capsys, "sft", str(path)))


def test_what_is_no_file_is_not_opened(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    assert "is a pipe, a socket or a device" in refused(capsys, "sft", str(tmp_path / "pipe"))
    assert "is a pipe, a socket or a device" in refused(capsys, "sft", "/dev/zero")
    assert "cannot be read (File name too long)" in refused(capsys, "sft", "n" * 300)
    assert "cannot be read (embedded null byte)" in refused(capsys, "sft", "a\0b")
    assert "no such job file" in refused(capsys, "sft", "\udcff.yaml")


def test_aliases_and_a_byte_order_mark_are_fine(tmp_path):
    path = tmp_path / "job.yaml"
    text = "stage: sft\nmodel: {name_or_path: &m m}\ndata: {train: *m}\nlora: &l {r: 4}\nrun: {name: !!str 2026}\n"
    path.write_text("\ufeff" + text, encoding="utf-8")
    job = load_job(path)
    assert (job.data.train, job.lora, job.run.name) == ("m", {"r": 4}, "2026")


OVERRIDES = [
    "a.b=" + "[" * 50_000,
    "trainer.seed=" + "[" * 50_000 + "]" * 50_000,
    "run.name=" + "x" * 100_000,
    "trainer.x=" + "y" * 200_000,
    "trainer=5",
    "trainer.seed.x=1",
    "gate.eval_loss=" + ">" * 60_000,
    "trainer." + "k" * 60_000 + "=1",
    ".".join(["a"] * 1000) + "=1",
    "trainer." + ".".join(["a"] * 20) + "=1",
    "=5",
    "trainer",
    "trainer..seed=1",
    "run.name=\udcff",
    "run.n\udcffame=1",
    "gate.eval_loss=\udcff",
    "run.name=a\0b",
    "run.storage_path=\x1b[31mred",
    "\x1b[31m",
    "run.name=!!python/name:os.system",
    "trainer.seed=1\n---\n2",
    "trainer={a: &a [1,1,1,1,1,1,1,1,1,1], b: &b [" + ",".join(["*a"] * 10) + "], c: &c [" + ",".join(["*b"] * 99)
    + "], d: &d [" + ",".join(["*c"] * 99) + "], e: [" + ",".join(["*d"] * 99) + "]}",
    "stage=[sft]",
    "lora={<<: 5}",
]  # fmt: skip


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: ascii(text[:24])[1:-1])
def test_a_hostile_override_is_refused_at_once(override, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    refused(capsys, "sft", str(path), override)


# ---------------------------------------------------------------------------------------------- every key, every value

NASTY = [
    "null", "true", "''", "' '", "[]", "{}", "-1", "0", "1", "0.5", "1.5", "1e400", ".nan", "9223372036854775808",
    "999999999999999999", "1e308", "5e-324", "-0.0", "text", "[null]", "[[]]", "[{}]", "{a: {b: {c: 1}}}", "[1, 2]", "[a, b]",
    "{a: 1}", "{a: null}", "{'': 1}", "x" * 3000, "é", "'nan'", "'1'", "models:/a@b", "python:a:b", "'*'", "'('", "'%00'",
]  # fmt: skip


def base_of(stage: str) -> str:
    data = (
        "{eval: a.jsonl}"
        if stage == "evaluate"
        else "{}"
        if stage in ("export", "serve")
        else "{train: a.jsonl}"
    )
    inputs = [name for name, needed in STAGE[stage].inputs.items() if needed]
    inputs += ["policy"] * (stage in ("evaluate", "export"))
    trainer = "trainer: {use_cpu: true}\n" if STAGE[stage].trl else ""
    given = "".join(f"{name}: models:/a@b\n" for name in inputs)
    given += "serve: {policies: {a: models:/a@b}}\n" * (stage == "serve")
    return f"stage: {stage}\nmodel: {{name_or_path: jobs/demo/model}}\ndata: {data}\n{trainer}{given}"


def keys_of(stage: str) -> list[str]:
    """All keys of a job, the sections themselves, and some that lie deeper."""
    sections = ("model", "lora", "data", "trainer", "scaling", "run", "mlflow")
    keys = [
        f"{section}.{key}"
        for section in sections
        for key in schema.keys(schema.class_of(section, stage))
        if key not in REFUSED.get(section, {})
    ]
    deeper = (
        "lora.rank_pattern.q",
        "scaling.resources_per_worker.CPU",
        "scaling.resources_per_worker.memory",
    )
    return [
        *keys,
        *sections,
        *deeper,
        "policy",
        "reward",
        "baseline",
        "judge",
        "gate",
        "gate.eval_loss",
        "source",
    ]


def walk(folder, cases: int, seed: int) -> list:
    """Jobs that were accepted, of random keys with random values; all others are refused by an InputError on one line."""
    dice, accepted = random.Random(seed), []
    stages = {stage: folder / f"{stage}.yaml" for stage in JOBS}
    for stage, path in stages.items():
        path.write_text(base_of(stage))
        load_job(path, [], stage)
    for _ in range(cases):
        stage = dice.choice(JOBS)
        given = [f"{dice.choice(keys_of(stage))}={dice.choice(NASTY)}" for _ in range(dice.choice((1, 1, 2)))]
        try:
            accepted.append(load_job(stages[stage], given, stage))
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500, (given, str(error))
        except BaseException as error:
            raise AssertionError(f"{stage} {given}: {error!r}") from error
    return accepted


def test_every_key_with_every_value_is_taken_or_refused(tmp_path):
    accepted = walk(tmp_path, 1200, seed=1)
    assert 30 < len(accepted) < 300


@pytest.mark.slow
def test_what_is_taken_the_libraries_take_or_refuse_by_name(tmp_path):
    """Seconds of work for each thousand: what load_job takes is built by TRL and peft, and never fails otherwise."""
    from pipeline.config.libraries import problem

    accepted = walk(tmp_path, 20_000, seed=2)
    assert len(accepted) > 500
    for job in accepted:
        if not STAGE[job.stage].trl:
            continue
        refused = problem({"stage": job.stage, "lora": job.lora, "trainer": job.trainer, "use_gpu": True})
        assert refused is None or refused.startswith(("trainer", "lora")), refused


def test_pythons_limits_are_not_what_is_met(tmp_path, capsys):
    """A process that recurses less deeply, as in a thread of a debugger, answers alike."""
    path = tmp_path / "job.yaml"
    path.write_text(GOOD + "x: " + "[" * 31 + "]" * 31)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(__import__("inspect").stack()) + 400)
    try:
        assert "x: unknown section" in refused(capsys, "sft", str(path))
    finally:
        sys.setrecursionlimit(limit)
