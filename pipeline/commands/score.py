"""Scores a file of completions or pairs with a reward model. Reports how often the reward model prefers the chosen completion.

    make score    or    python -m pipeline score jobs/demo/score.yaml data.train=rows.jsonl [section.key=value ...]

`score` reads every format of preferences and demonstrations. Each line of scores.jsonl is a row with its `score`, or, for a pair,
with `score_chosen`, `score_rejected` and `score_margin`. To resume a killed run, set the same run.name.
"""

import json
from typing import Any

from pipeline.job import Job
from pipeline.run.model_host import ModelHost
from pipeline.run.parts import Answer, Record, RowRecipe, launch_rows
from pipeline.run_folder import Result


def run(job: Job) -> Result:
    return launch_rows(job, RowRecipe("scores.jsonl", load, measure))


def load(host: ModelHost) -> Answer:
    from pipeline.models.tokenizer import eos_ids
    from pipeline.run import roles
    from pipeline.stages.pairs import score_columns, score_rows

    shared = roles.shared_base(host)
    rewards = roles.add_rewards(host, shared)
    ends = set(eos_ids(host.tokenizer))

    def answer(rows: list[dict[str, Any]], first_row: int) -> list[Record]:
        scored = score_rows(rewards, rows, first_row, host.tokenizer, ends)
        return [
            json.loads(row["row"]) | score_columns(scores) for row, scores in zip(rows, scored, strict=True)
        ]

    return answer


def measure(record: Record) -> dict[str, float]:
    if "score" in record:
        return {"score": record["score"]}
    margin = record["score_margin"]
    return {"accuracy": float(margin > 0), "margin": margin}
