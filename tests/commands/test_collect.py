"""Tests `collect`: which prompts it selects, and which training rows it makes from the completions to these prompts."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import ROOT
from toy_models import registered

from pipeline.commands import collect
from pipeline.data.formats import KINDS, format_of, kind_of, parse_row
from pipeline.data.messages import comparable_text
from pipeline.errors import InputError
from pipeline.job import Collect


def sample(text: str, score: float, ended: bool = True) -> dict:
    return {"completion": text, "score": score, "completion_tokens": len(text), "ended": ended}


def pairs(samples: list[dict], **settings) -> list[tuple[str, ...]]:
    return [
        tuple(one["completion"] for one in row)
        for row in collect.select_samples(Collect(**settings), samples)
    ]


# ------------------------------------------------------------------------------------------------------ selection


def test_selection_takes_the_best_and_the_worst_completion():
    samples = [sample("b", 2), sample("a", 3), sample("d", -1), sample("c", 1)]
    assert pairs(samples) == [("a", "d")]
    assert pairs(samples, select="best") == [("a",)]
    assert sorted(pairs(samples, select="pairs")) == [
        ("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d"),
    ]  # fmt: skip
    wide = pairs(samples, select="pairs", min_margin=2)
    assert sorted(wide) == [("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]
    assert pairs(samples, min_margin=4) == [("a", "d")] and pairs(samples, min_margin=4.1) == []


def test_ties_repeats_and_empty_completions_make_no_pair():
    assert pairs([sample("a", 1), sample("b", 1)]) == []
    assert pairs([sample("a", 1), sample(" a\n", 1)], select="pairs") == []
    assert pairs([sample("a", 1), sample("  ", 0)], select="pairs") == []
    assert pairs([sample(" ", 1)], select="best") == []
    samples = [sample("a", 1), sample("a ", 1), sample("b", 1), sample("", 0), sample("c", 0.5)]
    assert collect.count_samples(Collect(select="pairs", min_margin=1), {"samples": samples}) == {
        "prompts_with_rows": 0, "rows": 0, "completions": 5, "empty": 1, "truncated": 0, "dialogues": 0, "duplicates": 1, "ties": 1, "close": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["\n\nHuman: hi\n\nAssistant: x", "Human: a\n\nAssistant: b", ' [{"role": "user", "content": "x"}]'],
)
def test_text_that_would_be_read_as_a_conversation_is_left_out(text):
    samples = [sample(text, 3), sample("b", 2), sample(text, 3), sample("c", 1), sample("", 0)]
    assert pairs(samples) == [("b", "c")] and pairs(samples, select="best") == [("b",)]
    counts = collect.count_samples(Collect(), {"samples": samples})
    assert (counts["dialogues"], counts["duplicates"], counts["empty"]) == (2, 1, 1)


def test_a_truncated_completion_is_never_the_better_one():
    samples = [sample("a", 3, ended=False), sample("b", 2), sample("c", 1, ended=False)]
    assert pairs(samples) == [("b", "c")] and pairs(samples, select="best") == [("b",)]
    assert pairs(samples, select="pairs") == [("b", "c")]
    assert pairs([sample("a", 3, ended=False)], select="best") == []


def test_the_metrics_of_one_prompt():
    samples = [sample("a", 3), sample("b", 1), sample("a", 3), sample("cc", 1, ended=False)]
    assert collect.measure(Collect(), {"samples": samples}) == {
        "score": 2, "score_best": 3, "score_worst": 1, "completion_tokens": 1.25, "share_truncated": 0.25,
        "share_duplicates": 0.25, "share_tied": 0, "share_with_rows": 1, "margin": 2,
    }  # fmt: skip


def test_runs_with_one_seed_share_no_prompt_until_all_are_used():
    rounds = [
        collect.choose_prompts(Collect(num_prompts=3, skip_prompts=skip), 7, 10) for skip in (0, 3, 6, 9, 12)
    ]
    used = list(itertools.chain(*rounds))
    assert sorted(used[:10]) == list(range(10))
    assert len(set(used[10:])) == 5 and used[10:] != used[:5]
    assert rounds[0] == collect.choose_prompts(Collect(num_prompts=3), 7, 10)
    assert rounds[0] != collect.choose_prompts(Collect(num_prompts=3), 8, 10)
    assert list(collect.choose_prompts(Collect(), 7, 4)) == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"num_prompts: found 5, but data\.train has 4 prompts"):
        collect.choose_prompts(Collect(num_prompts=5), 7, 4)


@pytest.mark.parametrize("prompt", ["Where is Peru?", [{"role": "user", "content": "Where is Peru?"}]])
def test_training_reads_collected_rows_with_any_other_columns(prompt):
    fields = {name for kind in KINDS.values() for name in kind.format_fields}
    fields |= {name for kind in KINDS.values() for name in kind.further} | {"system", "input"}
    row = dict.fromkeys(sorted(fields), "something else")
    row |= {"prompt": prompt, "completion": "old", "answer": "x", "ended": "in 1821", "text": "y"}
    made = collect.without_replaced_columns(row) | collect.versions_of_sampling(
        {"policy": "models:/p/3", "reward.0": "models:/r/1"}
    )
    assert made["reference_completion"] == "old"
    assert (made["answer"], made["ended"], made["text"]) == ("x", "in 1821", "y"), (
        "a Python reward reads them"
    )
    record = {"row": made, "samples": [sample("In Asia.", 0), sample("In South America.", 2)]}
    (best,) = collect.training_rows(Collect(select="best"), record)
    (pair,) = collect.training_rows(Collect(), record)
    assert (best["completion"], best["score"]) == ("In South America.", 2)
    assert (pair["score_chosen"], pair["score_rejected"]) == (2, 0)
    assert best["version"] == pair["version"] == "models:/p/3" and pair["reward_version"] == "models:/r/1"

    def read(row, stage):
        record = parse_row(row, kind_of(stage))
        words = [[comparable_text(one) for one in group] for group in record.pairs]
        return record.prompt_content(), words, record.margin, record.labels

    asked = "Where is Peru?"
    assert read(best, "sft") == (asked, [["In South America."]], None, ())
    assert read(pair, "dpo") == read(pair, "rm") == (asked, [["In South America.", "In Asia."]], None, ())
    assert read(pair, "kto") == (asked, [["In South America."], ["In Asia."]], None, (True, False))
    for one in (best, pair):
        assert read(one, "ppo")[0] == asked and format_of(one, kind_of("ppo")) == "prompt"


# --------------------------------------------------------------------------------------------- jobs/demo/iterate.sh

TINY = {
    "collect": {
        "policy": "models:/toy-policy@champion",
        "reward": "models:/toy-rm@champion",
        "trainer": {"num_generations": 3, "response_length": 12},
    },
    "dpo": {
        "trainer": {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"},
        "data": {"batch_size": 16},
        "mlflow": {"registered_model": "toy-dpo"},
        "run": {"report": False},
    },
    "evaluate": {
        "reward": "models:/toy-rm@champion",
        "judge": None,
        "trainer": {"response_length": 12},
        "run": {"report": False},
    },
}


def rounds(folder: Path, storage: Path, **popen) -> subprocess.Popen:
    """Starts jobs/demo/iterate.sh with tiny jobs in `folder`."""
    for name, job in TINY.items():
        text = json.dumps({"extends": f"{ROOT}/jobs/demo/{name}.yaml", **job})
        (folder / f"{name}.yaml").write_text(text)
    found = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    settings = {"JOBS": str(folder), "RUNS": str(storage), "PROMPTS": "24", "ROUNDS": "2"}
    environment = {**os.environ, "PATH": found, "PYTHONPATH": str(ROOT), **settings}
    script = ["bash", "jobs/demo/iterate.sh", "trainer.beta=0.2"]
    return subprocess.Popen(script, cwd=ROOT, env=environment, start_new_session=True, text=True, **popen)


@pytest.mark.slow
def test_a_killed_script_of_rounds_continues_without_repeating_a_finished_run(storage, tmp_path):
    """If the gate of an evaluation fails, the script ends after this evaluation, and the test accepts this end."""
    registered(storage)
    cut = storage / "loop-1-dpo"
    with (
        open(tmp_path / "log", "w") as log,
        rounds(tmp_path, storage, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        while process.poll() is None and not list(cut.glob("checkpoint_*")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    assert process.returncode == -signal.SIGKILL and not (cut / "result.json").exists(), log
    collected = storage / "loop-1-collect/result.json"
    before = collected.stat().st_mtime_ns

    with rounds(tmp_path, storage, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        said = process.communicate(timeout=280)[0]
    assert "run loop-1-collect is finished" in said and collected.stat().st_mtime_ns == before

    def result(step):
        return json.loads((storage / f"loop-{step}/result.json").read_text())

    first, trained, evaluated = (result(f"1-{step}") for step in TINY)
    version = f"models:/toy-dpo/{trained['version']}"
    assert first["inputs"]["policy"] == trained["inputs"]["policy"] == "models:/toy-policy/1"
    assert (
        trained["job"]["data"]["train"] == first["folder"] + "/rows.jsonl" and trained["alias"] == "candidate"
    )
    assert trained["job"]["trainer"]["beta"] == 0.2
    assert (evaluated["inputs"]["policy"], evaluated["inputs"]["baseline"]) == (
        version,
        "models:/toy-policy/1",
    )
    if not evaluated["alias"]:
        assert (
            process.returncode == 1
            and "round 1 failed its gate; the policy is still models:/toy-policy/1" in said
        )
        return
    second = result("2-collect")
    assert second["inputs"]["policy"] == version and second["job"]["trainer"]["seed"] == 1001
    prompts = [
        {json.loads(line)["prompt"] for line in (storage / f"loop-{number}-collect/rows.jsonl").open()}
        for number in (1, 2)
    ]
    assert prompts[0] and not prompts[0] & prompts[1], "the rounds share prompts"


# --------------------------------------------------------------------------------------------- scores of a judge


def judged(text, score, *orders, ended=True):
    return sample(text, score, ended) | {"orders": list(orders)}


def test_a_pair_that_flips_with_the_order_is_left_out_and_counted():
    samples = [judged("a", 0.75, 1.0, 0.5), judged("b", 0.5, 0.5, 0.5), judged("c", 0.25, 0.0, 1.0)]
    assert pairs(samples, select="pairs") == [("a", "b")]
    counts = collect.count_samples(Collect(select="pairs"), {"samples": samples})
    assert (counts["flips"], counts["rows"]) == (2, 1)
    assert collect.measure(Collect(select="pairs"), {"samples": samples})["order_agreement"] == pytest.approx(
        1 / 3
    )


def test_select_labels_makes_a_row_of_each_completion():
    samples = [sample("a", 0.8), sample("b", 0.5), sample("c", 0.9, ended=False), sample("a ", 0.1)]
    args = Collect(select="labels", good_above=0.5)
    record = {"row": {"prompt": "q", "reward_version": "judge:j.yaml@0123"}, "samples": samples}
    rows = collect.training_rows(args, record)
    assert [(row["completion"], row["label"], row["score"]) for row in rows] == [
        ("a", True, 0.8),
        ("b", False, 0.5),
        ("c", False, 0.9),
    ]
    counts = collect.count_samples(args, record)
    assert (counts["good"], counts["rows"]) == (1, 3)
    read = parse_row(rows[0], kind_of("kto"))
    assert read.labels == (True,) and read.judges == ("judge:j.yaml@0123",)
