"""Tests that `generate`, `collect` and `score` write each result of the inference engine once and in order."""

import json
import re
from pathlib import Path

import pytest
from running import stage
from toy_models import tokenizer

from pipeline.commands import collect, generate
from pipeline.job import Collect
from pipeline.scoring.rewards import AdapterReward, Samples

POLICY, REWARD = "policy=models:/toy-policy@champion", "reward=models:/toy-rm@champion"
pytestmark = pytest.mark.usefixtures("embedded_ray")
PLACES = ("Peru", "Chile", "Norway", "Spain", "Cuba", "Nepal", "Ghana", "Kenya", "Iran", "Iraq", "Japan")
OUTPUT = {"generate": "completions.jsonl", "collect": "rows.jsonl", "score": "scores.jsonl"}


def run(verb: str, storage: Path, name: str, rows: list[dict], *overrides: str) -> tuple[dict, list[dict]]:
    """Runs a command on the given rows. Returns the content of result.json, and the lines of the output."""
    path = storage / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [REWARD, f"data.train={path}", *([POLICY] if verb != "score" else []), *overrides]
    result = stage(verb, storage, name, *given)
    assert not (storage / name / "parts").exists()
    return result, [json.loads(line) for line in (storage / name / OUTPUT[verb]).read_text().splitlines()]


def by_the_engine(engine, rows: list[dict], several: int, temperature: float) -> list[list[dict]]:
    """Returns the samples of each row. The inference engine samples and scores all rows in one batch."""
    ids = [engine.ids(row["prompt"]) for row in rows for _ in range(several)]
    done = engine.sample(ids, 40, temperature=temperature, seed=5)
    samples = Samples(ids, [d.tokens for d in done], [d.ended for d in done], [{}] * len(ids), tokenizer())
    scores = AdapterReward(engine.shared).score(samples)
    made = [
        {"completion": text, "score": score, "completion_tokens": len(one.tokens), "ended": one.ended}
        for text, score, one in zip(samples.completions, scores, done, strict=True)
    ]
    return [made[start : start + several] for start in range(0, len(made), several)]


def test_generate_writes_the_row_and_the_engines_completion(engine, storage, capsys):
    rows = [{"prompt": f"What is the capital of {place}?", "completion": place} for place in PLACES]
    settings = ["trainer.temperature=0", "trainer.local_rollout_forward_batch_size=2"]
    result, lines = run("generate", storage, "plain", rows, *settings)
    expected = [one for [one] in by_the_engine(engine, rows, 1, 0.0)]
    for line, row, one in zip(lines, rows, expected, strict=True):
        assert (line["prompt"], line["reference_completion"]) == (row["prompt"], row["completion"])
        for key in ("completion", "completion_tokens", "ended"):
            assert line[key] == one[key]
        assert line["reward"] == pytest.approx(one["score"], abs=1e-4)
    assert len({line["completion"] for line in lines}) > 1
    assert result["rows"] == 11 and result["inputs"]["policy"] == "models:/toy-policy/1"
    assert result["metrics"]["reward"] == pytest.approx(sum(one["score"] for one in expected) / 11, abs=1e-4)
    capsys.readouterr()
    assert run("generate", storage, "plain", rows, *settings) == (result, lines)
    assert "run plain is finished" in capsys.readouterr().out


def by_an_error(folder, given, monkeypatch):
    """Runs `generate`, and makes the command fail when its folder has three files of completed rows."""
    load = generate.load

    def loads(host):
        answer = load(host)

        def fails(rows, first):
            if len(list(folder.glob("parts/*.jsonl"))) == 3:
                raise MemoryError
            return answer(rows, first)

        return fails

    with monkeypatch.context() as patch:
        patch.setattr(generate, "load", loads)
        stage("generate", folder.parent, folder.name, *given, status=1)


def test_an_interrupted_command_continues_to_the_same_rows(engine, storage, monkeypatch, capsys):
    name, count = "interrupted", 40
    asked = "Question {}. What is the capital of {}?".format
    rows = [{"prompt": asked(i, PLACES[i % 8]), "number": i} for i in range(count)]
    settings = ["trainer.seed=5", "trainer.local_rollout_forward_batch_size=2"]
    (storage / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [POLICY, REWARD, *settings, f"data.train={storage}/{name}.jsonl"]
    by_an_error(storage / name, given, monkeypatch)
    done = len(list((storage / name / "parts").glob("*.jsonl")))
    assert not (storage / name / "completions.jsonl").exists()
    stage("generate", storage, name, *given, "trainer.temperature=0.5", status=2)
    says = rf"'{name}' began with trainer\.temperature=1\.0 \(now 0\.5\)"
    assert re.search(says, capsys.readouterr().err)
    result, lines = run("generate", storage, name, rows, *settings)
    assert [line["number"] for line in lines] == list(range(count))
    assert 0 < result["rows_done_now"] <= count - 8 * (done - 1)
    expected = by_the_engine(engine, rows, 1, 1.0)
    assert [line["completion"] for line in lines] == [one["completion"] for [one] in expected]


def test_collect_selects_from_the_engines_completions(engine, storage, capfd):
    rows = [{"prompt": f"What is the capital of {place}?", "number": i} for i, place in enumerate(PLACES)]
    settings = ["trainer.seed=5", "trainer.num_generations=3", "trainer.local_rollout_forward_batch_size=6"]
    pairs = ["trainer.select=pairs", "scaling.num_workers=2"]
    result, lines = run("collect", storage, "pairs", rows, *settings, *pairs)
    expected = by_the_engine(engine, rows, 3, 1.0)
    selected = [
        collect.select_samples(Collect(num_generations=3, select="pairs"), samples) for samples in expected
    ]
    numbered = [(i, *pair) for i, pairs in enumerate(selected) for pair in pairs]
    assert [(line["number"], line["chosen"], line["rejected"]) for line in lines] == [
        (i, better["completion"], worse["completion"]) for i, better, worse in numbered
    ]
    for line in lines:
        assert line["version"] == "models:/toy-policy/1" and line["reward_version"] == "models:/toy-rm/1"
        assert line["seed"] == 5 and line["score_chosen"] > line["score_rejected"]
    assert (result["rows"], result["counts"]["rows"], result["counts"]["completions"]) == (11, len(lines), 33)
    assert len(lines) > 11
    assert capfd.readouterr().err == ""  # capfd also captures what Ray's C++ code prints
    assert result["counts"]["prompts_with_rows"] == len({line["number"] for line in lines})
    scores = [one["score"] for samples in expected for one in samples]
    assert result["metrics"]["score"] == pytest.approx(sum(scores) / 33, abs=1e-4)


def test_collect_draws_prompts_and_takes_a_function_as_reward(models, storage):
    rows = [{"prompt": f"Where is {place}?", "answer": place, "number": i} for i, place in enumerate(PLACES)]
    drawn = ["trainer.num_prompts=4", "trainer.skip_prompts=4", "data.seed=3"]
    gold = "python:pipeline.demo:gold"
    settings = ["trainer.select=best", "trainer.num_generations=4", f"reward={gold}", *drawn]
    result, lines = run("collect", storage, "best", rows, *settings)
    numbers = collect.choose_prompts(Collect(num_prompts=4, skip_prompts=4), 3, 11)
    found = {line["number"] for line in lines}
    assert [line["number"] for line in lines] == [n for n in numbers if n in found]
    assert result["rows"] == 4 and result["counts"]["rows"] == len(lines) > 0
    assert result["counts"]["completions"] == 16
    # a resumed run compares the digests of its files
    assert result["data"]["digests"].keys() == {"train", "reward"}
    assert all(line["reward_version"] == gold and line["answer"] == PLACES[line["number"]] for line in lines)


QUESTION = "What is the capital of Peru?"
ANSWERS = ["Lima.", "The capital of Peru is Lima. Thank you for asking.", "Why ask me?", "Peru is in Asia."]


def test_score_reads_completions_pairs_and_several_answers(engine, storage, tmp_path):
    expected = {text: engine.score(QUESTION, text) for text in ANSWERS}
    assert len({round(score, 3) for score in expected.values()}) == len(ANSWERS)
    completions = [{"prompt": QUESTION, "completion": text, "id": i} for i, text in enumerate(ANSWERS)]
    order = [(0, 1), (1, 2), (2, 3), (3, 1), (0, 3)]
    pairs = [
        {"prompt": QUESTION, "chosen": ANSWERS[a], "rejected": ANSWERS[b], "margin": 1.0} for a, b in order
    ]
    answers = [{"prompt": QUESTION, "pos_answers": ANSWERS[:2], "neg_answers": ANSWERS[2:]}]
    for name, rows in (("1-completions", completions), ("2-pairs", pairs), ("3-answers", answers)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = "trainer.local_rollout_forward_batch_size=1"
    result, lines = run("score", storage, "scored", [], f"data.train={tmp_path}", small)

    assert [{k: v for k, v in line.items() if k != "score"} for line in lines[:4]] == completions
    assert [line["score"] for line in lines[:4]] == pytest.approx([expected[r] for r in ANSWERS], abs=1e-5)
    order += [(0, 2), (1, 3)]
    chosen, rejected = ([expected[ANSWERS[pair[side]]] for pair in order] for side in (0, 1))
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    for key, values in (("score_chosen", chosen), ("score_rejected", rejected), ("score_margin", margins)):
        assert [line[key] for line in lines[4:]] == pytest.approx(values, abs=1e-5)
    assert lines[4]["margin"] == 1.0 and [line["pair"] for line in lines[9:]] == [0, 1]
    metrics = result["metrics"]
    assert metrics["score"] == pytest.approx(sum(expected.values()) / 4, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 7)
    assert metrics["margin"] == pytest.approx(sum(margins) / 7, abs=1e-5)
