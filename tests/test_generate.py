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


def test_a_line_is_the_row_and_the_engines_reply(models, storage, tmp_path):
    from pipeline.models.tokenizer import eos_ids
    from pipeline.ppo.rollout import Sampling, TransformersEngine

    rows = prompts(tmp_path / "prompts.jsonl", 11)
    result, lines = generate(storage, "plain", f"data.train={tmp_path}/prompts.jsonl", "trainer.seed=5")
    assert [{k: line[k] for k in ("prompt", "number")} for line in lines] == rows

    shared = shared_base()
    shared.add("policy", folder=models["toy-policy"])
    shared.add("reward", folder=models["toy-rm"], head=True)
    ids = [
        tokenizer().apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]
    how = Sampling(40, tuple(eos_ids(tokenizer(), shared.base.generation_config)), temperature=1.0, seed=5)
    replies = TransformersEngine(shared, "policy", pad=tokenizer().pad_token_id).generate(ids, range(11), how)
    assert [line["completion"] for line in lines] == [
        tokenizer().decode(reply.tokens, skip_special_tokens=True) for reply in replies
    ]
    assert [(line["completion_tokens"], line["ended"]) for line in lines] == [
        (len(r.tokens), r.ended) for r in replies
    ]
    import torch

    whole = torch.tensor([[*ids[0], *replies[0].tokens]])
    score = shared.scores("reward", whole, torch.ones_like(whole)).item()
    assert lines[0]["reward"] == pytest.approx(score, abs=1e-4)
    assert result["rows"] == 11 and result["inputs"]["policy"] == "models:/toy-policy/1"
    assert result["metrics"]["reward"] == pytest.approx(sum(line["reward"] for line in lines) / 11)
    assert not (storage / "plain" / "parts").exists()


def test_batches_change_no_greedy_reply(models, storage, tmp_path):
    rows = [{"prompt": f"What is the capital of {place}?", "completion": place} for place in PLACES * 2]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.train={tmp_path}/rows.jsonl"
    few, many = (
        generate(
            storage,
            f"greedy-{n}",
            data,
            "trainer.temperature=0",
            f"trainer.local_rollout_forward_batch_size={n}",
        )[1]
        for n in (3, 64)
    )
    assert [line["completion"] for line in few] == [line["completion"] for line in many]
    assert len({line["completion"] for line in few}) > 1
    assert [line["reference_completion"] for line in few] == [row["completion"] for row in rows]


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
        r"run\.name: '.*' was begun with other settings \(trainer\.temperature was 1\.0, is 0\.5\)",
        capsys.readouterr().err,
    )
    result, lines = generate(storage, name, *settings, "scaling.num_workers=2")  # that may change
    assert [line["number"] for line in lines] == [row["number"] for row in rows]
    assert 0 < result["rows_done_now"] <= count - 4 * size * (there - 1)
    return lines


def test_killed_in_the_middle_it_goes_on(models, storage, tmp_path, capsys):
    lines = check_kill_and_resume(storage, tmp_path, "killed", 240, 2, [], capsys)
    whole = ["trainer.local_rollout_forward_batch_size=2", f"data.train={tmp_path}/prompts.jsonl"]
    assert lines == generate(storage, "uninterrupted", *whole)[1]


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
        (["policy=models:/toy-policy@gone"], r"policy: models:/toy-policy@gone: no such alias or version.*newest is models:/toy-policy/1"),
        (["policy=models:/nobody/1"], r"policy: models:/nobody/1: no registered model 'nobody'"),
        (["policy=models:/toy-rm/1"], r"policy: models:/toy-rm/1 is a reward adapter"),
        (["reward=models:/toy-policy/1"], r"reward: models:/toy-policy/1 is an adapter without a scalar head"),
        (["reward=python:pipeline.models.demo:gold", "data.train={fine}"], r"asks for `answer`, which the rows of data\.train do not have"),
        (["trainer.temperature=-1"], r"trainer\.temperature: found -1, expected 0 or more"),
        (["trainer.kl_coef=1"], r"trainer\.kl_coef: unknown key"),
        (["trainer.response_length=300"], r"trainer\.response_length: 300 tokens leave no room"),
        (["data.eval=a.jsonl"], r"data\.eval: `generate` holds nothing out"),
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
