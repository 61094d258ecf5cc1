"""Tests that a run estimates the cost of its judges before it starts, and that its result has the real cost."""

import json
import re

import pytest
from judging import judging
from running import ROOT
from settled import work_of

from pipeline.__main__ import main
from pipeline.job import load_job
from pipeline.run.judging import asked

ROWS = {"train": 100, "eval": 10}
PPO = [
    "trainer.total_episodes=64",
    "trainer.batch_size=16",
    "trainer.num_mini_batches=1",
    "trainer.num_generations=4",
]


@pytest.mark.parametrize(
    ("stage", "overrides", "name", "rows", "completions"),
    [
        ("ppo", PPO, "reward.0", ROWS, (64 + 20, 4)),
        ("ppo", [*PPO, "trainer.eval_steps=2"], "judge", ROWS, (10 * 4, 1)),
        ("ppo", [*PPO, "trainer.advantage_estimator=remax"], "reward.0", ROWS, (64 + 16 + 20, 4)),
        ("evaluate", ["trainer.best_of_n=4"], "judge", {"eval": 10, "pairs": 7}, (60 + 14, 2)),
        ("collect", ["trainer.num_generations=8"], "reward.0", ROWS, (800, 8)),
        ("collect", ["trainer.num_generations=8", "trainer.num_prompts=5"], "reward.0", ROWS, (40, 8)),
        ("score", ["data.train=x.jsonl"], "reward.0", ROWS, (200, 2)),
    ],
)  # fmt: skip
def test_the_number_of_judged_completions(stage, overrides, name, rows, completions, in_root):
    job = load_job(ROOT / f"jobs/demo/{stage}.yaml", overrides, stage)
    assert asked(work_of(job), rows, name) == completions


def test_a_run_reports_the_estimated_and_the_real_cost_of_its_judge(tmp_path, capsys, in_root):
    pairs = [
        {"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "Look it up."} for i in range(5)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    with judging(faults=[500]) as server:
        (tmp_path / "judge.yaml").write_text(
            f"model: wise\nform: score\nendpoint: {server.address}/v1\nconcurrency: 1\nmost_dollars: 3\n"
            "dollars_per_million_input: 10000\ndollars_per_million_output: 1000\n"
        )
        given = [
            f"data.train={tmp_path}/rows.jsonl",
            f"reward={{judge: {tmp_path}/judge.yaml}}",
            f"run.storage_path={tmp_path}",
        ]
        assert main(["score", "jobs/demo/score.yaml", *given, "run.name=one"]) == 1
        assert server.paid.total() == 2, "the budget is kept"
        said = capsys.readouterr()
        assert "its budget for this run is spent (2 answers, $2.02" in said.err, said.err
        (tmp_path / "judge.yaml").write_text(
            (tmp_path / "judge.yaml").read_text().replace("most_dollars: 3", "most_calls: 9")
        )
        capsys.readouterr()
        assert main(["score", "jobs/demo/score.yaml", *given, "run.name=two"]) == 0
        said = capsys.readouterr().out
        assert re.search(
            r"judge \S+/judge\.yaml: at most 10 questions, about \$\d+\.\d\d with the longest answers, less",
            said,
        ), said
        assert "budget: 9 answers" in said
        costs = json.loads((tmp_path / "two/result.json").read_text())["judges"]["reward.0"]
        assert (costs["judged"], costs["from_store"], costs["failed"]) == (8, 2, 0) and costs[
            "dollars"
        ] == 8.08
        assert "judge of reward.0: judged 8  from_store 2  failed 0" in said
        rows = [json.loads(line) for line in (tmp_path / "two/scores.jsonl").read_text().splitlines()]
        assert len(rows) == 5 and set(server.paid.values()) == {1}
