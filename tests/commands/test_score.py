"""`score`: the reward model's own numbers, of a file."""

import json
import re

import pytest
import torch
from running import stage
from toy_models import registered, shared_base, tokenizer

from pipeline.__main__ import main

REWARD = "reward=models:/toy-rm@champion"
QUESTION = "What is the capital of Peru?"
COMPLETIONS = [
    "Lima.",
    "The capital of Peru is Lima. Thank you for asking.",
    "Why ask me?",
    "Peru is in Asia.",
]


@pytest.fixture(scope="module")
def models(storage):
    return registered(storage)


@pytest.fixture(scope="module")
def expected(models):
    """completion -> its score, by the adapter on the shared base, of the text that the chat template makes."""
    shared = shared_base()
    shared.add("reward", folder=models["toy-rm"], head=True)
    scores = {}
    for completion in COMPLETIONS:
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": completion}]
        ids = tokenizer().apply_chat_template(turns, return_dict=False)
        ends = [i for i, token in enumerate(ids) if token in (tokenizer().eos_token_id, 817, 825)]
        ids = torch.tensor([ids[: ends[-1] + 1]])
        scores[completion] = shared.scores("reward", ids, torch.ones_like(ids)).item()
    assert len({round(score, 3) for score in scores.values()}) == len(COMPLETIONS)
    return scores


def score(storage, name, path, rows, *overrides):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = stage("score", storage, name, REWARD, f"data.train={path}", *overrides)
    return result, [json.loads(line) for line in (storage / name / "scores.jsonl").read_text().splitlines()]


def test_completions_pairs_and_several_answers_get_their_scores(
    expected, storage, tmp_path, embedded_ray, capfd
):
    completions = [
        {"prompt": QUESTION, "completion": completion, "id": i} for i, completion in enumerate(COMPLETIONS)
    ]
    order = [(0, 1), (1, 2), (2, 3), (3, 1), (0, 3)]
    pairs = [
        {"prompt": QUESTION, "chosen": COMPLETIONS[a], "rejected": COMPLETIONS[b], "margin": 1.0}
        for a, b in order
    ]
    answers = [{"prompt": QUESTION, "pos_answers": COMPLETIONS[:2], "neg_answers": COMPLETIONS[2:]}]
    for name, rows in (("1-completions", completions), ("2-pairs", pairs), ("3-answers", answers)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = "trainer.local_rollout_forward_batch_size=1"
    result = stage("score", storage, "scored", REWARD, f"data.train={tmp_path}", small)
    lines = [json.loads(line) for line in (storage / "scored" / "scores.jsonl").read_text().splitlines()]

    assert [{k: v for k, v in line.items() if k != "score"} for line in lines[:4]] == completions
    assert [line["score"] for line in lines[:4]] == pytest.approx(
        [expected[r] for r in COMPLETIONS], abs=1e-5
    )
    order += [(0, 2), (1, 3)]
    chosen, rejected = ([expected[COMPLETIONS[pair[side]]] for pair in order] for side in (0, 1))
    assert [line["score_chosen"] for line in lines[4:]] == pytest.approx(chosen, abs=1e-5)
    assert [line["score_rejected"] for line in lines[4:]] == pytest.approx(rejected, abs=1e-5)
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    assert [line["score_margin"] for line in lines[4:]] == pytest.approx(margins, abs=1e-5)
    assert lines[4]["margin"] == 1.0 and [line["pair"] for line in lines[9:]] == [0, 1]
    metrics = result["metrics"]
    assert metrics["score"] == pytest.approx(sum(expected.values()) / 4, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 7)
    assert metrics["margin"] == pytest.approx(sum(margins) / 7, abs=1e-5)
    assert capfd.readouterr().err == ""  # nor a line of Ray's C++, which Python does not see


@pytest.mark.slow
def test_a_rule_can_score_too(storage, tmp_path, embedded_ray, models):
    rows = [{"prompt": QUESTION, "completion": completion, "answer": "Lima"} for completion in COMPLETIONS]
    _, lines = score(storage, "rule", tmp_path / "rows.jsonl", rows, "reward=python:pipeline.demo:gold")
    assert [line["score"] for line in lines] == [0.25, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.train={rows}"], r"rows\.jsonl:1: `completion`: found null"),
        (["reward=null"], r"reward: missing; `score` needs it"),
        (["policy=base"], r"policy: `score` takes no policy"),
    ],
)
def test_wrong_input_is_answered(overrides, says, models, storage, tmp_path, capsys, in_root, embedded_ray):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": QUESTION, "completion": None}))
    given = [one.format(rows=tmp_path / "rows.jsonl") for one in overrides]
    assert (
        main(
            ["score", "jobs/demo/score.yaml", REWARD, f"run.storage_path={storage}", "run.name=wrong", *given]
        )
        == 2
    )
    errors = capsys.readouterr().err
    assert re.search(says, errors), errors
