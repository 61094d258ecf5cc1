"""`collect`: the engine's completions of each prompt, scored, and the rows of them that training reads as they are."""

import itertools
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
from pipeline.commands import collect
from pipeline.config import Collect
from pipeline.data.record import plain
from pipeline.data.shapes import KIND, kind_of, parse, shape_of
from pipeline.errors import InputError

MODELS = ["policy=models:/toy-policy@champion", "reward=models:/toy-rm@champion"]
PLACES = ("Peru", "Chile", "Norway", "Spain", "Cuba", "Nepal", "Ghana", "Kenya", "Iran", "Iraq", "Japan")


def sample(text: str, score: float, ended: bool = True) -> dict:
    return {"completion": text, "score": score, "completion_tokens": len(text), "ended": ended}


def pairs(samples: list[dict], **settings) -> list[tuple[str, ...]]:
    return [tuple(one["completion"] for one in row) for row in collect.selected(Collect(**settings), samples)]


# ------------------------------------------------------------------------------------------------------ selection


def test_the_best_and_the_worst():
    samples = [sample("b", 2), sample("a", 3), sample("d", -1), sample("c", 1)]
    assert pairs(samples) == [("a", "d")]
    assert pairs(samples, select="best") == [("a",)]
    assert sorted(pairs(samples, select="pairs")) == [
        ("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d"),
    ]  # fmt: skip
    assert sorted(pairs(samples, select="pairs", min_margin=2)) == [
        ("a", "c"),
        ("a", "d"),
        ("b", "d"),
        ("c", "d"),
    ]
    assert pairs(samples, min_margin=4) == [("a", "d")] and pairs(samples, min_margin=4.1) == []


def test_ties_repeats_and_empty_ones_make_no_pair():
    assert pairs([sample("a", 1), sample("b", 1)]) == []
    assert pairs([sample("a", 1), sample(" a\n", 1)], select="pairs") == []
    assert pairs([sample("a", 1), sample("  ", 0)], select="pairs") == []
    assert pairs([sample(" ", 1)], select="best") == []
    samples = [sample("a", 1), sample("a ", 1), sample("b", 1), sample("", 0), sample("c", 0.5)]
    assert collect.count(Collect(select="pairs", min_margin=1), {"samples": samples}) == {
        "prompts_with_rows": 0, "rows": 0, "completions": 5, "empty": 1, "cut_off": 0, "dialogues": 0, "duplicates": 1, "ties": 1, "close": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["\n\nHuman: hi\n\nAssistant: x", "Human: a\n\nAssistant: b", ' [{"role": "user", "content": "x"}]'],
)
def test_what_would_be_read_as_a_conversation_is_left_out(text):
    samples = [sample(text, 3), sample("b", 2), sample(text, 3), sample("c", 1), sample("", 0)]
    assert pairs(samples) == [("b", "c")] and pairs(samples, select="best") == [("b",)]
    counts = collect.count(Collect(), {"samples": samples})
    assert (counts["dialogues"], counts["duplicates"], counts["empty"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("cut_off", "says"),
    [
        (8, "none of 8 completions ended .*train sft on rows that end"),
        (7, "^7 of 8 completions were cut off"),
    ],
)
def test_a_policy_that_never_ends_gets_advice_that_helps(cut_off, says):
    others = dict.fromkeys(("duplicates", "dialogues", "empty", "ties", "close"), 0)
    assert re.search(says, collect.why_none(Collect(), {**others, "completions": 8, "cut_off": cut_off}))


def test_what_was_cut_off_is_never_the_better_one():
    samples = [sample("a", 3, ended=False), sample("b", 2), sample("c", 1, ended=False)]
    assert pairs(samples) == [("b", "c")] and pairs(samples, select="best") == [("b",)]
    assert pairs(samples, select="pairs") == [("b", "c")]
    assert pairs([sample("a", 3, ended=False)], select="best") == []


def test_figures_of_a_prompt():
    samples = [sample("a", 3), sample("b", 1), sample("a", 3), sample("cc", 1, ended=False)]
    assert collect.measure(Collect(), {"samples": samples}) == {
        "score": 2, "score_best": 3, "score_worst": 1, "completion_tokens": 1.25, "share_cut_off": 0.25,
        "share_duplicates": 0.25, "share_tied": 0, "share_with_rows": 1, "margin": 2,
    }  # fmt: skip


def test_runs_with_one_seed_share_no_prompt_until_all_are_used():
    rounds = [collect.choose(Collect(num_prompts=3, skip_prompts=skip), 7, 10) for skip in (0, 3, 6, 9, 12)]
    used = list(itertools.chain(*rounds))
    assert sorted(used[:10]) == list(range(10))
    assert len(set(used[10:])) == 5 and used[10:] != used[:5]
    assert rounds[0] == collect.choose(Collect(num_prompts=3), 7, 10)
    assert rounds[0] != collect.choose(Collect(num_prompts=3), 8, 10)
    assert list(collect.choose(Collect(), 7, 4)) == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"num_prompts: found 5, but data\.train has 4 prompts"):
        collect.choose(Collect(num_prompts=5), 7, 4)


@pytest.mark.parametrize("prompt", ["Where is Peru?", [{"role": "user", "content": "Where is Peru?"}]])
def test_training_reads_what_was_collected_whatever_else_the_row_has(prompt):
    fields = {name for kind in KIND.values() for shape in kind.shapes.values() for name in shape}
    fields |= {name for kind in KIND.values() for name in kind.further} | {"system", "input"}
    row = dict.fromkeys(sorted(fields), "something else") | {
        "prompt": prompt,
        "completion": "old",
        "answer": "x",
    }
    made = collect.cleaned(row) | collect.origin({"policy": "models:/p/3", "reward.0": "models:/r/1"})
    assert made["reference_completion"] == "old" and made["answer"] == "x"  # for a Python reward
    record = {"row": made, "samples": [sample("In Asia.", 0), sample("In South America.", 2)]}
    (best,) = collect.rows_of(Collect(select="best"), record)
    (pair,) = collect.rows_of(Collect(), record)
    assert (best["completion"], best["score"]) == ("In South America.", 2)
    assert (pair["score_chosen"], pair["score_rejected"]) == (2, 0)
    assert best["version"] == pair["version"] == "models:/p/3" and pair["reward_version"] == "models:/r/1"

    def read(row, stage):
        record = parse(row, kind_of(stage))
        words = [[plain(one) for one in group] for group in record.pairs]
        return record.prompt_content(), words, record.margin, record.labels

    asked = "Where is Peru?"
    assert read(best, "sft") == (asked, [["In South America."]], None, ())
    for verb in ("dpo", "rm"):
        assert read(pair, verb) == (asked, [["In South America.", "In Asia."]], None, ())
    assert read(pair, "kto") == (asked, [["In South America."], ["In Asia."]], None, (True, False))
    for one in (best, pair):
        assert read(one, "ppo")[0] == asked and shape_of(one, kind_of("ppo")) == "prompt"


def test_columns_of_the_prompt_are_kept_whatever_collect_calls_its_own():
    own = {"ended": "in 1821", "completion_tokens": "few", "text": "x", "reference_completion": "by a person"}
    row = collect.cleaned({"prompt": "Where is Peru?", "completion": "old"} | own) | {"seed": 1}
    record = {"row": row, "samples": [sample("In Asia.", 0), sample("In South America.", 2)]}
    for select in ("best", "best_worst", "pairs"):
        (made,) = collect.rows_of(Collect(select=select), record)
        assert {name: made[name] for name in own} == own, select


def test_several_rewards_are_all_named():
    inputs = {"policy": "models:/p/3", "reward.0": "models:/r/1", "reward.1": "python:pipeline.demo:gold"}
    assert collect.origin(inputs)["reward_version"] == ["models:/r/1", "python:pipeline.demo:gold"]
    assert collect.origin({"reward.0": "models:/r/1"}) == {"version": "base", "reward_version": "models:/r/1"}


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def models(storage, embedded_ray):
    return registered(storage)


def collected(storage: Path, name: str, rows: list[dict], *overrides: str, status: int = 0):
    path = storage / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [*MODELS, f"data.train={path}", *overrides]
    result = stage("collect", storage, name, *given, status=status)
    output = storage / name / "rows.jsonl"
    return result, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def by_the_engine(models, rows: list[dict], several: int) -> list[list[dict]]:
    """Completions and scores of all rows, sampled in one batch."""
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
        for _ in range(several)
    ]
    how = Sampling(40, tuple(eos_ids(tokenizer(), shared.base.generation_config)), temperature=1.0, seed=5)
    engine = TransformersEngine(shared, "policy", rows=len(ids), pad=tokenizer().pad_token_id)
    done = engine.generate(ids, range(len(ids)), how)
    samples = Samples(ids, [d.tokens for d in done], [d.ended for d in done], [{}] * len(ids), tokenizer())
    made = [
        sample(text, score, one.ended)
        for text, score, one in zip(
            samples.completions, AdapterReward(shared).score(samples), done, strict=True
        )
    ]
    return [made[start : start + several] for start in range(0, len(made), several)]


def test_rows_are_the_engines_completions_whatever_parts_and_workers(models, storage):
    rows = [{"prompt": f"What is the capital of {place}?", "number": i} for i, place in enumerate(PLACES)]
    settings = ["trainer.seed=5", "trainer.num_generations=3", "trainer.local_rollout_forward_batch_size=6"]
    result, lines = collected(
        storage, "pairs", rows, *settings, "trainer.select=pairs", "scaling.num_workers=2"
    )
    expected = by_the_engine(models, rows, 3)
    selected = [collect.selected(Collect(num_generations=3, select="pairs"), samples) for samples in expected]
    assert [(line["number"], line["chosen"], line["rejected"]) for line in lines] == [
        (i, better["completion"], worse["completion"])
        for i, pairs in enumerate(selected)
        for better, worse in pairs
    ]
    for line in lines:
        assert line["version"] == "models:/toy-policy/1" and line["reward_version"] == "models:/toy-rm/1"
        assert line["seed"] == 5 and line["score_chosen"] > line["score_rejected"]
    assert len(lines) > 11
    assert (result["rows"], result["counts"]["rows"], result["counts"]["completions"]) == (11, len(lines), 33)
    assert result["counts"]["prompts_with_rows"] == len({line["number"] for line in lines})
    scores = [one["score"] for samples in expected for one in samples]
    assert result["metrics"]["score"] == pytest.approx(sum(scores) / 33, abs=1e-4)
    assert not (storage / "pairs" / "parts").exists()


def test_prompts_are_drawn_and_the_best_kept(models, storage):
    rows = [{"prompt": f"Where is {place}?", "answer": place, "number": i} for i, place in enumerate(PLACES)]
    drawn = ["trainer.num_prompts=4", "trainer.skip_prompts=4", "data.seed=3"]
    gold = "python:pipeline.demo:gold"
    settings = ["trainer.select=best", "trainer.num_generations=4", f"reward={gold}", *drawn]
    result, lines = collected(storage, "best", rows, *settings)
    numbers = collect.choose(Collect(num_prompts=4, skip_prompts=4), 3, 11)
    assert [line["number"] for line in lines] == [
        n for n in numbers if n in {line["number"] for line in lines}
    ]
    assert result["rows"] == 4 and result["counts"]["rows"] == len(lines) > 0
    assert result["counts"]["completions"] == 16
    assert result["data"]["digests"].keys() == {"train", "reward"}  # what a run that goes on compares
    assert all(line["reward_version"] == gold and line["answer"] == PLACES[line["number"]] for line in lines)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_to_the_same_rows(models, storage, capsys):
    rows = [{"prompt": f"Question {i}. What is the capital of {PLACES[i % 8]}?"} for i in range(120)]
    settings = ["trainer.num_generations=2", "trainer.local_rollout_forward_batch_size=4"]
    whole = collected(storage, "whole", rows, *settings)[1]
    command = [sys.executable, "-m", "pipeline", "collect", "jobs/demo/collect.yaml", *MODELS, *settings]
    command += [f"run.storage_path={storage}", "run.name=cut", f"data.train={storage}/whole.jsonl"]
    parts = storage / "cut" / "parts"
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and len(list(parts.glob("*.jsonl"))) < 3:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (storage / "cut" / "rows.jsonl").exists()
    given = [*MODELS, *settings, f"data.train={storage}/whole.jsonl"]
    stage("collect", storage, "cut", *given, "trainer.num_generations=3", status=2)
    assert "was begun with trainer.num_generations=2 (now 3)" in capsys.readouterr().err
    result = stage("collect", storage, "cut", *given, "scaling.num_workers=2")
    assert 0 < result["rows_done_now"] < 120
    assert [json.loads(line) for line in (storage / "cut/rows.jsonl").read_text().splitlines()] == whole


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.num_generations=1"], r"trainer\.num_generations: found 1: a pair needs two completions"),
        (["trainer.temperature=0"], r"trainer\.temperature: found 0, with which the 8 completions of a prompt are all the same"),
        (["reward=null"], r"reward: missing; `collect` needs it: reward: models:/rlhf-rm@champion"),
        (["trainer.select=best", "trainer.min_margin=1"], r"trainer\.min_margin: trainer\.select=best makes no pairs"),
        (["trainer.select=worst"], r"trainer\.select: found 'worst', expected one of best, best_worst, pairs"),
        (["trainer.skip_prompts=4"], r"trainer\.skip_prompts: goes with trainer\.num_prompts"),
        (["trainer.num_generations=0"], r"trainer\.num_generations: found 0, expected between 1 and 1024"),
        (["trainer.min_margin=-1"], r"trainer\.min_margin: found -1, expected 0 or more"),
        (["mlflow.registered_model=x"], r"mlflow\.registered_model: `collect` has no use for it"),
    ],
)  # fmt: skip
def test_wrong_input_is_answered_before_anything_starts(overrides, says, tmp_path, capsys, in_root):
    name = [f"run.storage_path={tmp_path}", "run.name=wrong"]
    assert main(["collect", "jobs/demo/collect.yaml", *MODELS, *name, *overrides]) == 2
    errors = capsys.readouterr().err
    assert re.search(says, errors), errors
    assert not (tmp_path / "wrong").exists()
