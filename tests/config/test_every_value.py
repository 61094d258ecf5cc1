"""Every key with every kind of value: the job is accepted, or one message on one line says why not."""

import random

import pytest

from pipeline.config import JOBS, load_job, schema
from pipeline.config.libraries import problem
from pipeline.config.stages import STAGE
from pipeline.errors import InputError

VALUES = [
    "null", "true", "''", "' '", "[]", "{}", "-1", "0", "1", "0.5", "1.5", "1e400", ".nan", "9223372036854775808",
    "999999999999999999", "1e308", "5e-324", "-0.0", "text", "[null]", "[[]]", "[{}]", "{a: {b: {c: 1}}}", "[1, 2]", "[a, b]",
    "{a: 1}", "{a: null}", "x" * 3000, "é", "'nan'", "'1'", "models:/a@b", "python:a:b", "'*'", "'('", "'%00'",
]  # fmt: skip
# Keys that lie deeper, and the sections themselves.
OTHERS = """model lora data trainer scaling run mlflow lora.rank_pattern.q scaling.resources_per_worker.CPU
    scaling.resources_per_worker.memory policy reward baseline judge gate gate.eval_loss source""".split()


def base_of(stage: str) -> str:
    rows = {"evaluate": "{eval: a.jsonl}", "export": "{}", "serve": "{}"}
    inputs = [name for name, needed in STAGE[stage].inputs.items() if needed]
    inputs += ["policy"] * (stage in ("evaluate", "export"))
    trainer = "trainer: {use_cpu: true}\n" if STAGE[stage].trl else ""
    given = "".join(f"{name}: models:/a@b\n" for name in inputs)
    given += "serve: {policies: {a: models:/a@b}}\n" * (stage == "serve")
    data = rows.get(stage, "{train: a.jsonl}")
    return f"stage: {stage}\nmodel: {{name_or_path: jobs/demo/model}}\ndata: {data}\n{trainer}{given}"


def keys_of(stage: str) -> list[str]:
    sections = ("model", "lora", "data", "trainer", "scaling", "run", "mlflow")
    return OTHERS + [
        f"{section}.{key}"
        for section in sections
        for key, one in schema.keys(schema.class_of(section, stage)).items()
        if "not" not in one
    ]


def walk(folder, cases: int, seed: int) -> list:
    """Returns the accepted jobs of random keys with random values; all others raise an InputError on one line."""
    dice, accepted = random.Random(seed), []
    stages = {stage: folder / f"{stage}.yaml" for stage in JOBS}
    for stage, path in stages.items():
        path.write_text(base_of(stage))
        load_job(path, [], stage)
    for _ in range(cases):
        stage = dice.choice(JOBS)
        given = [
            f"{dice.choice(keys_of(stage))}={dice.choice(VALUES)}" for _ in range(dice.choice((1, 1, 2)))
        ]
        try:
            accepted.append(load_job(stages[stage], given, stage))
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500, (given, str(error))
        except BaseException as error:
            raise AssertionError(f"{stage} {given}: {error!r}") from error
    return accepted


def test_every_key_with_every_value_is_accepted_or_answered(tmp_path):
    assert 30 < len(walk(tmp_path, 1200, seed=1)) < 300


@pytest.mark.slow
def test_the_libraries_accept_the_rest_or_name_the_key(tmp_path):
    """TRL and peft build what load_job accepts, or say which key is wrong. A thousand jobs take seconds."""
    accepted = walk(tmp_path, 20_000, seed=2)
    assert len(accepted) > 500
    for job in accepted:
        if not STAGE[job.stage].trl:
            continue
        refused = problem({"stage": job.stage, "lora": job.lora, "trainer": job.trainer, "use_gpu": True})
        assert refused is None or refused.startswith(("trainer", "lora")), refused
