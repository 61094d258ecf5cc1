"""Completions of a file of prompts: JSON Lines out, a line a prompt, in the order of the prompts.

    make generate    or    python -m pipeline generate jobs/demo/generate.yaml data.train=prompts.jsonl [section.key=value ...]

A line is the row with `completion`, `completion_tokens`, `ended` (false: cut off at trainer.response_length) and, if the
job names one, the `reward`. A `completion` that the row had is kept as `reference_completion`. The same run.name
continues a run that was killed.
"""

import json
from typing import Any

from pipeline.config import Job
from pipeline.models.tokenizer import warn_of_endless
from pipeline.runtime.host import Host
from pipeline.runtime.inference import Answer, Record, Verb, launch


def run(job: Job) -> dict[str, Any]:
    result = launch(job, Verb("completions.jsonl", load, measure))
    warn_of_endless(result["metrics"].get("ended", 1.0), "the completions")
    return result


def load(host: Host) -> Answer:
    from pipeline.ppo.engine import Sampling
    from pipeline.ppo.rewards import Samples, weighted
    from pipeline.runtime import roles

    shared = roles.shared_base(host)
    role = roles.add_frozen(host, shared, "policy", "policy")
    rewards = roles.add_rewards(host, shared)
    engine = roles.engines(host, shared, [role])(role)
    how = Sampling.of(host.job.args, host.tokenizer, shared)

    def answer(rows: list[dict[str, Any]], first: int) -> list[Record]:
        prompts = [row["input_ids"] for row in rows]
        # A row's index among the kept ones is the key of its stream of random numbers.
        completions = engine.generate(prompts, range(first, first + len(rows)), how)
        given = [json.loads(row["row"]) for row in rows]
        tokens, ended = [one.tokens for one in completions], [one.ended for one in completions]
        samples = Samples(prompts, tokens, ended, given, host.tokenizer)
        records = []
        for row, text, one in zip(given, samples.completions, completions, strict=True):
            if "completion" in row:
                row = {**row, "reference_completion": row.pop("completion")}
            records.append(
                {**row, "completion": text, "completion_tokens": len(one.tokens), "ended": one.ended}
            )
        if rewards:
            for record, score in zip(records, weighted(rewards, samples, normalize=False)[0], strict=True):
                record["reward"] = score
        return records

    return answer


def measure(record: Record) -> dict[str, float]:
    return {name: float(record[name]) for name in ("completion_tokens", "ended", "reward") if name in record}
