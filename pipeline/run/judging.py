"""Estimates the cost of judges before a run, and reads their actual cost at the end of the run."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.job import judge
from pipeline.job.judge import Definition
from pipeline.scoring.judges.client import CHARACTERS
from pipeline.scoring.judges.store import Store, answers_folder
from pipeline.settle.work import Work
from pipeline.statistics import mean
from pipeline.system import prices

SAMPLED = 100  # number of rows whose prompt lengths the estimate uses


def estimate_costs(work: Work, rows: Mapping[str, Any], counts: Mapping[str, int]) -> Iterator[str]:
    """Yields a line for each judge of a run: the maximum number of questions, their cost in dollars, and the judge's budget.

    Args:
        rows: {split: token rows}.
        counts: {split: number of rows}.
    """
    for name, config in _judges(work).items():
        completions, group = count_judged(work, counts, name)
        batch = group if config.form == "rank" else 1
        orders = 2 if config.form == "rank" and config.orders == "both" else 1
        questions = -(-completions // batch) * orders * config.draws
        dataset = next(iter(rows.values()))
        sample = dataset.slice(0, SAMPLED).to_pylist() if hasattr(dataset, "slice") else dataset.take(SAMPLED)
        prompt = mean([len(row.get("input_ids") or row.get("prompt_ids") or ()) for row in sample])
        sent = len(config.asks) / CHARACTERS + prompt + batch * getattr(work.args, "response_length", prompt)
        dollars = questions * config.dollars(sent, config.longest)
        budgets = [f"{config.most_calls:,} answers"] if config.most_calls else []
        budgets += [prices.in_dollars(config.most_dollars)] if config.most_dollars else []
        cost = f", about {prices.in_dollars(dollars)} with the longest answers" if dollars else ""
        yield (
            f"judge {judge.at_version(work.inputs[name].version)[0]}: at most {questions:,} questions{cost}, minus the "
            f"answers that are already stored; budget: {' and '.join(budgets) or 'no limit'}"
        )


def count_judged(work: Work, rows: Mapping[str, int], name: str) -> tuple[int, int]:
    """Returns the number of completions that the judge `name` scores in a run, and the number of completions per prompt.

    Args:
        rows: {split: number of rows}.
    """
    args, stage, held_out = work.args, work.identity.stage, rows.get("eval", 0)
    if stage == "ppo":
        updates = args.total_updates(rows["train"])
        evaluations = sum(args.evaluates(update, updates) for update in range(1, updates + 1))
        eval_completions = held_out * (2 + evaluations)  # also before and after training
        if name == "judge":
            return eval_completions, 1
        greedy = updates * args.batch_size // args.num_generations * args.estimator.needs_greedy
        return updates * args.batch_size + greedy + eval_completions, args.num_generations
    if stage == "evaluate":
        return held_out * (2 + args.best_of_n) + 2 * rows.get("pairs", 0), 2
    if stage == "collect":
        return (args.num_prompts or rows["train"]) * args.num_generations, args.num_generations
    return rows["train"] * (2 if stage == "score" else 1), 2


def read_costs(work: Work) -> dict[str, dict[str, float]]:
    """Returns {input: number of its judge's answers, and their cost in dollars, over all attempts at the run}."""
    run = work.identity
    judges = _judges(work).items()
    return {name: Store(answers_folder(run.storage_path, d), run.name).costs(d) for name, d in judges}


def _judges(work: Work) -> dict[str, Definition]:
    """Returns {input: definition} of the run's judges."""
    return {name: job_input.definition for name, job_input in work.inputs.items() if job_input.definition}
