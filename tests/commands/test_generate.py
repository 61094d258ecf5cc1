"""`generate`: every prompt once, in order, the engine's own text, whatever the batches and workers and however often killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import ROOT, stage
from toy_models import registered, shared_base, tokenizer

from pipeline.__main__ import main
from pipeline.runtime.claim import claim

pytestmark = pytest.mark.usefixtures("embedded_ray")
MODELS = ["policy=models:/toy-policy@champion", "reward=models:/toy-rm@champion"]
PLACES = ("Peru", "Chile", "Norway", "Spain", "Cuba", "Nepal", "Ghana", "Kenya")


@pytest.fixture(scope="module")
def models(storage):
    return registered(storage)


def prompts(path: Path, count: int) -> list[dict]:
    rows = [
        {"prompt": f"Question {i}. What is the capital of {PLACES[i % 8]}?", "number": i}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def generate(storage: Path, name: str, *overrides: str, status: int = 0) -> tuple[dict, list[dict]]:
    result = stage("generate", storage, name, *MODELS, *overrides, status=status)
    path = storage / name / "completions.jsonl"
    return result, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_the_engine(models, rows: list[dict], temperature: float) -> tuple[list, list[float]]:
    """The completions that the policy's engine gives to all rows in one batch, and their rewards."""
    from pipeline.models.tokenizer import eos_ids
    from pipeline.ppo.engine import Sampling, TransformersEngine
    from pipeline.ppo.rewards import AdapterReward, Samples

    shared = shared_base()
    shared.add("policy", folder=models["toy-policy"])
    shared.add("reward", folder=models["toy-rm"], head=True)
    ids = [
        tokenizer().apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]
    ends = tuple(eos_ids(tokenizer(), shared.base.generation_config))
    how = Sampling(40, ends, temperature=temperature, seed=5)
    engine = TransformersEngine(shared, "policy", rows=len(rows), pad=tokenizer().pad_token_id)
    completions = engine.generate(ids, range(len(rows)), how)
    samples = Samples(ids, [r.tokens for r in completions], [r.ended for r in completions], rows, tokenizer())
    return completions, AdapterReward(shared).score(samples)


def text(completion) -> str:
    return tokenizer().decode(completion.tokens, skip_special_tokens=True)


def test_a_line_is_the_row_and_the_engines_completion_whatever_the_batch(models, storage, tmp_path, capsys):
    rows = [
        {"prompt": f"What is the capital of {place}?", "completion": place} for place in PLACES + PLACES[:3]
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["trainer.temperature=0", "trainer.local_rollout_forward_batch_size=2"]
    result, lines = generate(storage, "plain", f"data.train={tmp_path}/rows.jsonl", *settings)
    completions, rewards = by_the_engine(models, rows, 0.0)
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in rows]
    assert [line["reference_completion"] for line in lines] == [row["completion"] for row in rows]
    assert [line["completion"] for line in lines] == [text(completion) for completion in completions]
    assert len({line["completion"] for line in lines}) > 1
    assert [(line["completion_tokens"], line["ended"]) for line in lines] == [
        (len(r.tokens), r.ended) for r in completions
    ]
    assert [line["reward"] for line in lines] == pytest.approx(rewards, abs=1e-4)
    assert result["rows"] == 11 and result["inputs"]["policy"] == "models:/toy-policy/1"
    assert result["metrics"]["reward"] == pytest.approx(sum(rewards) / 11, abs=1e-4)
    assert not (storage / "plain" / "parts").exists()
    capsys.readouterr()
    assert generate(storage, "plain", f"data.train={tmp_path}/rows.jsonl", *settings) == (result, lines)
    assert "run plain is finished" in capsys.readouterr().out


def killed(storage: Path, name: str, overrides: list[str], parts: int) -> int:
    """Runs `generate` in a process of its own and kills it once `parts` parts are there; how many were."""
    folder = storage / name / "parts"
    command = [sys.executable, "-m", "pipeline", "generate", "jobs/demo/generate.yaml", *MODELS, *overrides]
    command += [f"run.storage_path={storage}", f"run.name={name}"]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        for _ in range(60_000):
            if len(list(folder.glob("*.jsonl"))) >= parts or process.poll() is not None:
                break
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    return len(list(folder.glob("*.jsonl")))


def check_kill_and_resume(storage, tmp_path, name, count, size, settings, capsys):
    rows = prompts(tmp_path / "prompts.jsonl", count)
    settings = [
        f"data.train={tmp_path}/prompts.jsonl",
        f"trainer.local_rollout_forward_batch_size={size}",
        *settings,
    ]
    there = killed(storage, name, settings, parts=3)
    assert not (storage / name / "completions.jsonl").exists()
    _, nothing = generate(storage, name, *settings, "trainer.temperature=0.5", status=2)
    assert nothing == []
    assert re.search(
        r"run\.name: '.*' was begun with trainer\.temperature=1\.0 \(now 0\.5\); what it left cannot be continued",
        capsys.readouterr().err,
    )
    result, lines = generate(storage, name, *settings, "scaling.num_workers=2")  # that may change
    assert [line["number"] for line in lines] == [row["number"] for row in rows]
    assert 0 < result["rows_done_now"] <= count - 4 * size * (there - 1)
    return lines


def test_killed_in_the_middle_it_goes_on(models, storage, tmp_path, capsys):
    lines = check_kill_and_resume(storage, tmp_path, "killed", 160, 2, ["trainer.seed=5"], capsys)
    # as if nothing had happened: sampled by row number, whatever the parts, the batches and the workers
    assert [line["completion"] for line in lines] == [text(r) for r in by_the_engine(models, lines, 1.0)[0]]


def test_two_of_one_name_do_not_share_their_parts(models, storage, tmp_path, capsys):
    prompts(tmp_path / "prompts.jsonl", 4)
    with claim(str(storage / "taken")):
        generate(storage, "taken", f"data.train={tmp_path}/prompts.jsonl", status=2)
    assert "another process is running" in capsys.readouterr().err
    assert not (storage / "taken" / "job.json").exists()


def test_a_failure_is_noted(models, storage, tmp_path):
    prompts(tmp_path / "prompts.jsonl", 4)
    given = [f"data.train={tmp_path}/prompts.jsonl", "reward=python:bad_rewards:raises"]
    generate(storage, "failing", *given, status=1)
    failure = json.loads((storage / "failing" / "failed.json").read_text())
    assert "KeyError" in failure["traceback"]
    assert not (storage / "failing" / "result.json").exists()


@pytest.mark.slow
def test_ten_thousand_prompts_with_a_kill(models, storage, tmp_path, capsys):
    short = ["trainer.response_length=8", "scaling.num_workers=2"]
    lines = check_kill_and_resume(storage, tmp_path, "ten-thousand", 10_000, 64, short, capsys)
    assert len(lines) == 10_000


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.train={rows}"], r"data\.train: 1 of 2 rows cannot be used.*\n.*rows\.jsonl:2: found .*expected one JSON object"),
        (["data.train=/nowhere.jsonl"], r"data\.train: there is no file '/nowhere\.jsonl'"),
        (["policy=models:/toy-policy@gone"], r"policy: models:/toy-policy@gone: no such alias or version.*newest is models:/toy-policy/\d"),
        (["policy=models:/nobody/1"], r"policy: models:/nobody/1: no registered model 'nobody'"),
        (["policy=models:/toy-rm/1"], r"policy: models:/toy-rm/1 is a reward adapter"),
        (["reward=models:/toy-policy/1"], r"reward: models:/toy-policy/1 is an adapter without a scalar head"),
        (["reward=python:pipeline.demo:gold", "data.train={fine}"], r"asks for `answer`, which the rows of data\.train do not have"),
        (["trainer.temperature=-1"], r"trainer\.temperature: found -1, expected 0 or more"),
        (["trainer.kl_coef=1"], r"trainer\.kl_coef: unknown key"),
        (["trainer.response_length=300"], r"trainer\.response_length: 300 tokens leave no room"),
        (["data.eval=a.jsonl"], r"data\.eval: `generate` has no use for it: it holds nothing out"),
        (["data.train=null"], r"data\.train: missing; `generate` needs rows to work on"),
    ],
)  # fmt: skip
def test_wrong_input_is_answered(overrides, says, models, storage, tmp_path, capsys, in_root):
    good = json.dumps({"prompt": "What is the capital of Peru?"})
    (tmp_path / "rows.jsonl").write_text(good + "\n{oh no\n")
    (tmp_path / "fine.jsonl").write_text(good)
    given = [one.format(rows=tmp_path / "rows.jsonl", fine=tmp_path / "fine.jsonl") for one in overrides]
    name = [f"run.storage_path={storage}", "run.name=wrong"]
    assert main(["generate", "jobs/demo/generate.yaml", *MODELS, *name, *given]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and re.search(says, errors), errors
    assert not (storage / "wrong").exists()
