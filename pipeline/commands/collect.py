"""Makes training rows from a policy's completions: samples several completions per prompt, and selects rows by score.

    make collect    or    python -m pipeline collect jobs/demo/collect.yaml [section.key=value ...]

`trainer.select` chooses the rows: `best` writes the best completion, for sft (rejection sampling). For dpo, rm and kto,
`best_worst` writes a pair of the best and the worst completion, and `pairs` writes all pairs whose scores differ. `labels` writes
each completion with a label, good or bad, for kto. Each row has its scores, the `version` of the policy that wrote it, the
`reward_version` that scored it, and the seed. To resume a killed run, set the same run.name.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from operator import itemgetter
from random import Random
from typing import Any

from pipeline.commands.generate import make_sampler
from pipeline.data.messages import repeats_prompt, unpack_messages
from pipeline.data.values import RowError
from pipeline.errors import InputError
from pipeline.job import Collect, Job
from pipeline.run.model_host import ModelHost
from pipeline.run.parts import Answer, Record, RowRecipe, launch_rows
from pipeline.run_folder import Result

# Columns that are removed from a prompt's row. Training would read these columns in addition to, or instead of, the completions.
REPLACED = """messages conversations system completion chosen rejected pos_answers neg_answers label kto_tag margin score
    score_chosen score_rejected version reward_version seed""".split()
Sample = dict[str, Any]  # a dict with the keys completion, score, completion_tokens and ended
SCORE = itemgetter("score")


def run(job: Job) -> Result:
    args = Collect(**job.trainer)
    recipe = RowRecipe(
        "rows.jsonl",
        load,
        measure=functools.partial(measure, args),
        lines=functools.partial(training_rows, args),
        count=functools.partial(count_samples, args),
        choose=functools.partial(choose_prompts, args, job.data.seed),
    )
    result = launch_rows(job, recipe)
    if not result["counts"]["rows"]:
        print(f"warning: no rows were written: {why_none(args, result['counts'])}", flush=True)
    return result


def load(host: ModelHost) -> Answer:
    sample = make_sampler(host, host.args.num_generations)
    provenance = versions_of_sampling(host.work.versions) | {"seed": host.args.seed}

    def answer(rows: list[dict[str, Any]], first_row: int) -> list[Record]:
        return [
            {"row": without_replaced_columns(row) | provenance, "samples": samples}
            for row, samples in sample(rows, first_row)
        ]

    return answer


def versions_of_sampling(inputs: Mapping[str, str]) -> dict[str, Any]:
    """Returns {"version": policy's version, "reward_version": reward's version, or a list of versions for several rewards}."""
    rewards = [source for name, source in sorted(inputs.items()) if name.startswith("reward.")]
    scored_by = rewards[0] if len(rewards) == 1 else rewards
    return {"version": inputs.get("policy", "base"), "reward_version": scored_by}


def without_replaced_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a prompt's row without the columns in REPLACED. Renames the column `completion` to `reference_completion`."""
    columns = {name: value for name, value in row.items() if name not in REPLACED}
    return ({"reference_completion": row["completion"]} if "completion" in row else {}) | columns


# -------------------------------------------------------------------------------------------------- which prompts


def choose_prompts(args: Collect, seed: int, count: int) -> list[int] | range:
    """Chooses which of `count` prompts to use. Returns their numbers.

    If each run skips the prompts of earlier runs with the same seed, no prompt is used twice before all prompts are used.

    Raises InputError if the job wants more than `count` prompts.
    """
    if args.num_prompts is None:
        return range(count)
    if args.num_prompts > count:
        raise InputError(
            f"found {args.num_prompts:,}, but data.train has {count:,} prompts; set at most {count}, or null for all prompts",
            key="trainer.num_prompts",
        )
    return list(
        itertools.islice(random_order(seed, count), args.skip_prompts, args.skip_prompts + args.num_prompts)
    )


def random_order(seed: int, count: int) -> Iterator[int]:
    """Yields the numbers from 0 to `count` - 1 in random order, then again in a different random order, and so on forever."""
    for epoch in itertools.count():
        order = list(range(count))
        Random(f"{seed}-{epoch}").shuffle(order)
        yield from order


# --------------------------------------------------------------------------------------------------- which rows


def training_rows(args: Collect, record: Record) -> list[dict[str, Any]]:
    """Returns the training rows that are made from a prompt and its samples."""
    row, selection = record["row"], select_samples(args, record["samples"])
    if args.select in ("best", "labels"):
        return [
            {**row, "completion": sample["completion"], "score": sample["score"]}
            | ({"label": is_good_sample(args, sample)} if args.select == "labels" else {})
            for (sample,) in selection
        ]
    return [
        {
            **row,
            "chosen": best["completion"],
            "rejected": worst["completion"],
            "score_chosen": best["score"],
            "score_rejected": worst["score"],
        }
        for best, worst in selection
    ]


def select_samples(args: Collect, samples: list[Sample]) -> list[tuple[Sample, ...]]:
    """Returns the best sample, all samples, or pairs of a better and a worse sample, depending on `select`.

    Leaves out a pair if the judge's preference depends on the order in which the judge sees the two samples. A truncated
    completion is never the better sample, because it would teach the policy to stop in the middle of a sentence.
    """
    candidates = distinct_samples(samples)
    finished = [sample for sample in candidates if sample["ended"]]
    if args.select == "best":
        return [(max(finished, key=SCORE),)] if finished else []
    if args.select == "labels":
        return [(sample,) for sample in candidates]
    pairs: list[tuple[Sample, ...]] = [
        (better, worse)
        for better, worse in itertools.product(finished, candidates)
        if better["score"] > worse["score"] and better["score"] - worse["score"] >= args.min_margin
        if not depends_on_order(better, worse)
    ]
    if args.select == "best_worst":
        return [max(pairs, key=lambda pair: (SCORE(pair[0]), -SCORE(pair[1])))] if pairs else []
    return pairs


def depends_on_order(first: Sample, second: Sample) -> bool:
    """Returns True if the order in which a judge sees two samples decides which sample the judge prefers."""
    differences = [a - b for a, b in zip(first.get("orders", ()), second.get("orders", ()), strict=True)]
    return min(differences, default=0.0) < 0 < max(differences, default=0.0)


def is_good_sample(args: Collect, sample: Sample) -> bool:
    """Returns True if a sample should be labeled good. A truncated completion is never labeled good."""
    return sample["ended"] and sample["score"] > args.good_above


def distinct_samples(samples: list[Sample]) -> list[Sample]:
    """Returns the samples without empty completions, duplicates, and completions that look like a conversation."""
    by_text: dict[str, Sample] = {}
    for sample in samples:
        by_text.setdefault(sample["completion"].strip(), sample)
    return [sample for text, sample in by_text.items() if text and not is_dialogue(sample["completion"])]


def is_dialogue(completion: str) -> bool:
    """Returns True if the data loader would parse this completion as a conversation, or reject it."""
    try:
        return repeats_prompt(completion) or unpack_messages("completion", completion) is not completion
    except RowError:
        return True


# ------------------------------------------------------------------------------------------------------ metrics


def count_samples(args: Collect, record: Record) -> dict[str, int]:
    """Counts a prompt's samples and pairs, and the reasons for which samples and pairs are left out of the training rows.

    `ties` are pairs of different completions with equal scores. `close` are pairs whose scores differ by less than min_margin.
    `flips` are pairs whose preferred completion depends on the order in which a judge sees the two completions.
    """
    samples = record["samples"]
    rows, texts = len(select_samples(args, samples)), [sample["completion"].strip() for sample in samples]
    counts = {
        "prompts_with_rows": int(rows > 0),
        "rows": rows,
        "completions": len(samples),
        "empty": texts.count(""),
        "truncated": sum(not sample["ended"] for sample in samples),
        "dialogues": sum(is_dialogue(sample["completion"]) for sample in samples),
        "duplicates": len(list(filter(None, texts))) - len({*texts} - {""}),
    }
    if args.select == "labels":
        return counts | {"good": sum(is_good_sample(args, s) for (s,) in select_samples(args, samples))}
    if args.select == "best":
        return counts
    pairs = list(itertools.combinations(distinct_samples(samples), 2))
    margins = [abs(SCORE(a) - SCORE(b)) for a, b in pairs]
    if any("orders" in sample for sample in samples):
        counts["flips"] = sum(itertools.starmap(depends_on_order, pairs))
    return counts | {
        "ties": margins.count(0),
        "close": sum(0 < margin < args.min_margin for margin in margins),
    }


def measure(args: Collect, record: Record) -> dict[str, float]:
    """Returns a prompt's metrics: scores, completion length, shares of truncated and duplicate samples, and the pairs' margin."""
    samples = record["samples"]
    scores, counts, count = [*map(SCORE, samples)], count_samples(args, record), len(samples)
    metrics = {
        "score": sum(scores) / count,
        "score_best": max(scores),
        "score_worst": min(scores),
        "completion_tokens": sum(sample["completion_tokens"] for sample in samples) / count,
        "share_truncated": counts["truncated"] / count,
        "share_duplicates": counts["duplicates"] / count,
        "share_tied": float(max(scores) == min(scores)),  # samples with equal scores form no pair
        "share_with_rows": float(counts["rows"] > 0),
    }
    if "flips" in counts and (pair_count := math.comb(len(distinct_samples(samples)), 2)):
        metrics["order_agreement"] = 1 - counts["flips"] / pair_count
    if args.select in ("best_worst", "pairs") and (pairs := select_samples(args, samples)):
        metrics["margin"] = sum(SCORE(better) - SCORE(worse) for better, worse in pairs) / len(pairs)
    return metrics


def why_none(args: Collect, counts: Mapping[str, int]) -> str:
    """Returns a message with the most frequent reason why there are no rows, and the key to change."""
    if counts["truncated"] == counts["completions"]:
        return (
            f"none of {counts['completions']} completions ended within trainer.response_length={args.response_length}; raise this "
            "key if your rows are longer. Otherwise, train sft on rows with an end token until its eos_accuracy is high"
        )
    completions = f"of {counts['completions']} completions"
    reasons = {
        "truncated": f"{completions} were truncated; use a larger trainer.response_length",
        "duplicates": f"{completions} repeat another completion; use a higher trainer.temperature",
        "dialogues": f"{completions} look like conversations; use model.chat_template=plain or another policy",
        "empty": f"{completions} are empty; use trainer.min_new_tokens=1",
        "ties": "pairs have equal scores; use a higher trainer.num_generations, or another reward",
        "flips": "pairs get a different preference if the judge sees them in reverse order; use a different judge",
        "close": f"pairs differ by less than trainer.min_margin={args.min_margin:g}; lower this key",
    }
    name = max(reasons, key=lambda name: counts.get(name, 0))
    return f"{counts.get(name)} {reasons[name]}"
