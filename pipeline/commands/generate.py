"""Samples a completion for each prompt of a file, and writes JSON Lines: one line for each prompt, in the order of the prompts.

    make generate    or    python -m pipeline generate jobs/demo/generate.yaml data.train=prompts.jsonl [section.key=value ...]

Each line is the prompt's row with `completion`, `completion_tokens`, `ended` (false if truncated at trainer.response_length) and,
if the job has a reward, `reward`. If the row already has a `completion`, this column is renamed to `reference_completion`. To
resume a killed run, set the same run.name.
"""

import json
from collections.abc import Callable
from typing import Any

from pipeline.job import Job
from pipeline.models.tokenizer import warn_of_endless
from pipeline.run.model_host import ModelHost
from pipeline.run.parts import Answer, Record, RowRecipe, launch_rows
from pipeline.run_folder import Result


def run(job: Job) -> Result:
    result = launch_rows(job, RowRecipe("completions.jsonl", load, measure))
    warn_of_endless(result["metrics"].get("ended", 1.0), "the completions")
    return result


def load(host: ModelHost) -> Answer:
    sample = make_sampler(host, 1)

    def answer(rows: list[dict[str, Any]], first_row: int) -> list[Record]:
        records = []
        for row, [result] in sample(rows, first_row):
            if "completion" in row:
                row["reference_completion"] = row.pop("completion")
            if "score" in result:
                result["reward"] = result.pop("score")
            records.append(row | result)
        return records

    return answer


def make_sampler(host: ModelHost, count: int) -> Callable[..., list[tuple[Record, list[Record]]]]:
    """Loads policy and rewards. Returns a function that samples and scores `count` completions per prompt.

    The function's arguments are tokenized rows and the number of the first row. Sampling seeds depend on the row numbers. The
    function returns each row with its samples. A sample contains completion, completion_tokens, ended, and a score if the job has
    rewards. If a judge compared the samples, `orders` contains the scores for each order in which the judge saw the samples.
    """
    from pipeline.run import roles
    from pipeline.scoring.rewards import Samples, weighted_scores
    from pipeline.writing.rows import Sampling, seed_of

    shared = roles.shared_base(host)
    role = roles.add_frozen(host, shared, "policy", "policy")
    rewards = roles.add_rewards(host, shared)
    decoder = roles.make_decoder(host, shared, [role])
    sampling = Sampling.from_args(host.args, host.tokenizer)

    def sample(rows: list[dict[str, Any]], first_row: int) -> list[tuple[Record, list[Record]]]:
        prompts = [row["input_ids"] for row in rows for _ in range(count)]
        keys = range(first_row * count, (first_row + len(rows)) * count)
        completions = decoder.generate(role, prompts, keys, sampling)
        originals = [json.loads(row["row"]) for row in rows]
        sources = [row for row in originals for _ in range(count)]
        seeds = [seed_of(sampling.seed, key) for key in keys]
        samples = Samples.of(prompts, completions, sources, host.tokenizer, seeds, count)
        entries: list[Record] = [
            {"completion": text, "completion_tokens": len(completion.tokens), "ended": completion.ended}
            for text, completion in zip(samples.completions, completions, strict=True)
        ]
        if rewards:
            for entry, score in zip(entries, weighted_scores(rewards, samples, normalize=False), strict=True):
                entry["score"] = score
        for notes in samples.notes.values():
            for entry, note in zip(entries, notes, strict=True):
                if note["orders"]:
                    entry["orders"] = [place_and_score[1] for place_and_score in note["orders"]]
        return [(row, entries[count * i : count * (i + 1)]) for i, row in enumerate(originals)]

    return sample


def measure(record: Record) -> dict[str, float]:
    return {name: float(record[name]) for name in ("completion_tokens", "ended", "reward") if name in record}
