"""Tests that a run estimates the cost of its LLM judges before it starts, and that result.json has the actual cost."""

import json
import re

import pytest
from judging import judging
from running import ROOT
from settled import work_of
from toy_data import write

from pipeline.__main__ import main
from pipeline.job import load_job
from pipeline.run.judging import count_judged

ROWS = {"train": 100, "eval": 10}
PPO = [
    "trainer.total_episodes=64", "trainer.batch_size=16", "trainer.num_mini_batches=1",
    "trainer.num_generations=4",
]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "overrides", "name", "rows", "completions"),
    [
        ("ppo", PPO, "reward.0", ROWS, (64 + 20, 4)),
        ("ppo", [*PPO, "trainer.eval_steps=2"], "judge", ROWS, (10 * 3, 1)),
        ("ppo", [*PPO, "trainer.advantage_estimator=remax"], "reward.0", ROWS, (64 + 16 + 20, 4)),
        ("evaluate", ["trainer.best_of_n=4"], "judge", {"eval": 10, "pairs": 7}, (60 + 14, 2)),
        ("collect", ["trainer.num_generations=8"], "reward.0", ROWS, (800, 8)),
        ("collect", ["trainer.num_generations=8", "trainer.num_prompts=5"], "reward.0", ROWS, (40, 8)),
        ("score", ["data.train=x.jsonl"], "reward.0", ROWS, (200, 2)),
    ],
)  # fmt: skip
def test_the_number_of_judged_completions(stage, overrides, name, rows, completions, in_root):
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml", overrides, stage)
    assert count_judged(work_of(job), rows, name) == completions


def test_a_run_reports_the_estimated_and_the_real_cost_of_its_judge(tmp_path, capsys, in_root):
    rows, definition = tmp_path / "rows.jsonl", tmp_path / "judge.yaml"
    pair = {"chosen": "It is so.", "rejected": "Look it up."}
    write(rows, [{"prompt": f"What is {i}?", **pair} for i in range(5)])
    with judging(faults=[500]) as server:
        definition.write_text(
            f"model: wise\nform: score\nendpoint: {server.address}/v1\nconcurrency: 1\nmost_dollars: 3\n"
            "dollars_per_million_input: 10000\ndollars_per_million_output: 1000\n"
        )
        given = [f"data.train={rows}", f"reward={{judge: {definition}}}", f"run.storage_path={tmp_path}"]
        assert main(["score", "jobs/demo/score.yaml", *given, "run.name=one"]) == 1
        assert server.paid.total() == 2, "the budget is kept"
        said = capsys.readouterr()
        assert "the budget for this run is spent (2 answers, $2.02" in said.err, said.err
        definition.write_text(definition.read_text().replace("most_dollars: 3", "most_calls: 9"))
        assert main(["score", "jobs/demo/score.yaml", *given, "run.name=two"]) == 0
        said = capsys.readouterr().out
        estimate = r"judge \S+/judge\.yaml: at most 10 questions, about \$\d+\.\d\d with .* budget: 9 answers"
        assert re.search(estimate, said), said
        costs = json.loads((tmp_path / "two/result.json").read_text())["judges"]["reward.0"]
        assert (costs["judged"], costs["from_store"], costs["failed"]) == (8, 2, 0)
        assert costs["dollars"] == 8.08
        assert "judge of reward.0: judged 8  from_store 2  failed 0" in said
        assert len((tmp_path / "two/scores.jsonl").read_text().splitlines()) == 5
        assert set(server.paid.values()) == {1}
