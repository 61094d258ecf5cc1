"""Compares a policy with a baseline on eval prompts: reward, win rates, KL, length, diversity, and samples.

Policy and baseline each sample one completion for every prompt, with the same random numbers. Each worker samples completions for
its share of the prompts.
"""

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pipeline.data.encode import Encoder, Example
from pipeline.data.formats import kind_of, parse_row
from pipeline.models.adapters import SharedBase
from pipeline.models.template import text_as_chat
from pipeline.ppo.config import PLANNED_ROWS
from pipeline.run.parts import in_parts, share_rows
from pipeline.run.worker import Worker
from pipeline.scoring import forward
from pipeline.scoring.rewards import Samples, weighted_scores
from pipeline.stages import policies
from pipeline.statistics import mean, ngrams, repetition, wilson_interval
from pipeline.system import console
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Completion, Decoder, Sampling, seed_of

SEED_OFFSET = 1_000_003  # added to seeds, so that evaluation and training draw different random numbers
WIN_RATES = {"reward": "eval_win_rate", "judge": "eval_judge_win_rate"}
THE_MODELS_OWN = Sampling(0, ())  # log-probabilities at temperature 1, with all end tokens allowed
SAMPLES = 8  # number of completions in result.json, one for each of the first distinct prompts


class Completions:
    """Collects what the metrics need from one policy's completions: numbers, distinct texts, n-grams and the first samples."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.numbers: dict[str, array[float]] = defaultdict(lambda: array("d"))  # values in prompt order
        self.samples: dict[str, dict[str, Any]] = {}  # {prompt: completion with its scores}
        self.texts: set[int] = set()  # hashes of the completions
        self.ngrams: dict[int, set[tuple[int, ...]]] = {1: set(), 2: set()}
        self.total: Counter[int] = Counter()  # {n: number of n-grams}
        for record in records:
            if len(self.samples) < SAMPLES and record["prompt"] not in self.samples:
                sample = {
                    key: value for key, value in record.items() if key in ("completion", "words", *WIN_RATES)
                }
                self.samples[record["prompt"]] = sample
            self.texts.add(hash(record["completion"]))
            for n, distinct in self.ngrams.items():
                grams = ngrams(record["tokens"], n)
                distinct.update(grams)
                self.total[n] += len(grams)
            self.numbers["characters"].append(len(record["completion"]))
            for key, value in record.items():
                if isinstance(value, int | float):
                    self.numbers[key].append(value)

    def metrics(self) -> dict[str, float]:
        """Returns means and shares over all completions. The names of the metrics have no prefix."""
        numbers = self.numbers
        metrics: dict[str, float] = {}
        for name in ("reward", "judge", "length", "eos_rate", "kl", "repetition"):
            if name in numbers:
                metrics[name] = mean(numbers[name])
        metrics["unique_fraction"] = len(self.texts) / max(1, len(numbers["characters"]))
        metrics |= {f"distinct_{n}": len(grams) / self.total[n] for n, grams in self.ngrams.items() if grams}
        if "reference_tokens" in numbers:
            metrics["perplexity"] = math.exp(sum(numbers["reference_nll"]) / sum(numbers["reference_tokens"]))
        return metrics


class Comparison:
    """Compares policies with a baseline on eval prompts. The baseline samples its completions only once.

    Args:
        prompts: rows with `input_ids` (token ids of a prompt) and `row` (JSON text of the row in the data).
        rewards, judge: from pipeline.scoring.rewards; the judge may be None.
        baseline: a frozen role on `shared`, or None for the bare base.
        decoder: samples the completions. Without a decoder, the base itself samples.
    """

    def __init__(
        self,
        worker: Worker,
        shared: SharedBase,
        prompts: Any,
        rewards: list[Any],
        judge: Any,
        baseline: str | None,
        decoder: Decoder | None = None,
    ) -> None:
        self.worker, self.shared, self.prompts = worker, shared, prompts
        # Leaves out rewards that compare completions, because each completion is scored alone here.
        self.rewards = [reward for reward in rewards if not reward.compares]
        self.judge, self.baseline = judge, baseline
        sampling = Sampling.from_args(worker.args, worker.tokenizer)
        self.sampling = replace(sampling, seed=sampling.seed + SEED_OFFSET)
        # In a PPO job, null becomes a constant here, because a size that depends on free memory could change results after a
        # resume.
        self.size = worker.args.local_rollout_forward_batch_size or PLANNED_ROWS
        self.decoder = decoder or SlotDecoder(shared, self.size, worker.tokenizer.pad_token_id)
        self.before: Completions | None = None
        self.after: Completions | None = None  # result of the last call of `of`

    def of(self, policy: str | None) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns metrics and samples of `policy` (`eval_*`) and of the baseline (`initial_*`).

        docs/evaluate.md explains the metrics. Every rank must call this method, and gets the same result.

        Args:
            policy: a role, or None for the bare base.
        """
        count = len(self.prompts)
        with console.print_if_slow(f"sampling completions to {count} held-out prompts"):
            if self.before is None:
                answer = partial(self._answer, self.baseline, compared=False)
                self.before = Completions(self._of_all("baseline-", count, answer))
            answer = partial(self._answer, policy, compared=True)
            self.after = completions = Completions(self._of_all("policy-", count, answer))
        metrics = {f"initial_{name}": value for name, value in self.before.metrics().items()}
        metrics |= {f"eval_{name}": value for name, value in completions.metrics().items()}
        for name, key in WIN_RATES.items():
            if wins := self._wins(name):
                metrics[key] = mean(wins)
                metrics[f"{key}_low"], metrics[f"{key}_high"] = wilson_interval(wins)
        baseline_samples = self.before.samples
        return metrics, [
            {"prompt": prompt, "before": baseline_samples[prompt], "after": sample}
            for prompt, sample in completions.samples.items()
        ]

    def _wins(self, name: str) -> list[float]:
        """Returns for each prompt 1 if the policy's completion scores higher than the baseline's, 0.5 for a tie, and 0 if lower.

        Args:
            name: `reward` or `judge`.
        """
        assert self.before and self.after
        scores = (completions.numbers.get(name, ()) for completions in (self.after, self.before))
        # Counts close scores as a tie, because scores of equal completions in different batches differ by fp32 rounding.
        return [
            0.5 if math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-5) else float(ours > theirs)
            for ours, theirs in zip(*scores, strict=True)
        ]

    def best_of(self, policy: str | None, n: int) -> list[dict[str, float]]:
        """Returns the best-of-n curve of `policy`. The reward ranks n completions per prompt, and the judge scores them.

        Without a judge, the reward also scores the completions. Every rank must call this method, and gets the same result.
        """
        sampling = replace(self.sampling, seed=self.sampling.seed + SEED_OFFSET)

        def answer(numbers: range) -> list[tuple[float, float]]:
            rows = [_prompt(self.prompts[number // n]) for number in numbers]
            scored = self._sampled(policy, rows, numbers, sampling)[1]
            return [(sample["reward"], sample.get("judge", sample["reward"])) for sample in scored]

        count = len(self.prompts)
        proxy, gold = array("d"), array("d")
        with console.print_if_slow(f"sampling {n} completions to each of {count} held-out prompts"):
            for reward, judge in self._of_all("best-of-n-", count * n, answer):
                proxy.append(reward)
                gold.append(judge)
        starts = range(0, count * n, n)
        return policies.best_of_curve(*([x[start : start + n] for start in starts] for x in (proxy, gold)))

    def length_controlled(self) -> dict[str, float]:
        """Returns the length-controlled win rates, with intervals, for the completions from the last call of the method `of`."""
        metrics: dict[str, float] = {}
        assert self.before and self.after
        lengths = (completions.numbers["characters"] for completions in (self.after, self.before))
        differences = [ours - theirs for ours, theirs in zip(*lengths, strict=True)]
        for name, key in WIN_RATES.items():
            if wins := self._wins(name):
                rates = policies.length_controlled(wins, differences)
                metrics |= dict(zip((f"{key}_lc", f"{key}_lc_low", f"{key}_lc_high"), rates, strict=True))
        return metrics

    def _of_all(self, prefix: str, count: int, answer: Callable[[range], list[Any]]) -> Iterable[Any]:
        """Returns the records of `count` rows, in order, on every rank. `evaluate` stores the records, and resumes from them."""
        if not self.worker.work.spec.learns:
            return in_parts(self.worker, prefix, count, answer)
        return share_rows(self.worker, count, answer)

    def _answer(self, role: str | None, numbers: range, compared: bool) -> list[dict[str, Any]]:
        """Samples one completion from a role for each prompt in `numbers`. Returns the completions' tokens, scores and metrics.

        Args:
            compared: whether to add the difference between the role's and the baseline's log-probability of the completion.
        """
        rows = [_prompt(self.prompts[number]) for number in numbers]
        if not rows:
            return []
        completions, scored = self._sampled(role, rows, numbers, self.sampling)
        records = [
            {
                "length": len(completion.tokens),
                "eos_rate": float(completion.ended),
                "repetition": repetition(completion.tokens),
                "tokens": completion.tokens,
                **scores,
            }
            for completion, scores in zip(completions, scored, strict=True)
        ]
        references = self._references(rows)
        sums = completion_logprobs(self.shared, role, list(references.values()), self.size)
        for (index, (_, reference)), total in zip(references.items(), sums, strict=True):
            records[index] |= {"reference_nll": -total, "reference_tokens": len(reference)}
        if compared:
            token_ids = [(row["input_ids"], c.tokens) for row, c in zip(rows, completions, strict=True)]
            policy_sums, baseline_sums = (
                completion_logprobs(self.shared, name, token_ids, self.size, self.sampling)
                for name in (role, self.baseline)
            )
            for record, ours, theirs in zip(records, policy_sums, baseline_sums, strict=True):
                record["kl"] = ours - theirs
        return records

    def _sampled(
        self, role: str | None, rows: list[dict[str, Any]], numbers: range, sampling: Sampling
    ) -> tuple[list[Completion], list[dict[str, Any]]]:
        """Returns a completion for each row, with its text and scores."""
        prompts, data_rows = [row["input_ids"] for row in rows], [row["row"] for row in rows]
        completions = self.decoder.generate(role, prompts, numbers, sampling)
        seeds = [seed_of(self.worker.args.seed, number) for number in numbers]
        samples = Samples.of(prompts, completions, data_rows, self.worker.tokenizer, seeds)
        scores: list[dict[str, Any]] = [
            {"prompt": p, "completion": c} for p, c in zip(samples.prompts, samples.completions, strict=True)
        ]
        if self.rewards:
            totals = weighted_scores(self.rewards, samples, normalize=False)
            for score, value in zip(scores, totals, strict=True):
                score["reward"] = value
        if self.judge is not None:
            for score, value in zip(scores, self.judge.checked(samples), strict=True):
                score["judge"] = value
        for notes in samples.notes.values():
            for score, note in zip(scores, notes, strict=True):
                score["words"] = "\n".join(filter(None, (score.get("words"), *note["words"])))
        return completions, scores

    def _references(self, rows: list[dict[str, Any]]) -> dict[int, tuple[list[int], list[int]]]:
        """Returns {index into `rows`: (prompt ids, completion ids)} for the rows with a reference completion."""
        worker, data, references = self.worker, self.worker.work.data, {}
        apply = text_as_chat(worker.tokenizer, data.apply_chat_template)
        settings = (worker.work.context, "truncate", apply, self.sampling.eos, data.parse_special_tokens)
        encoder = Encoder(worker.tokenizer, kind_of("score"), *settings)
        for index, row in enumerate(row["row"] for row in rows):
            if row.get("completion"):
                names = ("prompt", "completion", "tools", "chat_template_kwargs")
                reference = {name: row.get(name) for name in names}
                [[example]] = encoder.encode([parse_row(reference, encoder.kind)])
                if isinstance(example, Example):
                    references[index] = example.columns["prompt_ids"], example.columns["chosen_ids"]
        return references


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": list(row["input_ids"]), "row": json.loads(row["row"])}


@torch.no_grad()
def completion_logprobs(
    shared: SharedBase,
    role: str | None,
    token_ids: list[tuple[list[int], list[int]]],
    size: int,
    sampling: Sampling = THE_MODELS_OWN,
) -> list[float]:
    """Returns the log-probability in nats of each completion, summed over its tokens.

    Args:
        token_ids: (prompt ids, completion ids) of each completion.
        size: maximum rows of one forward.
        sampling: temperature, and minimum tokens before an end token. For greedy sampling, uses temperature 1.
    """
    if not token_ids:
        return []
    settings = (sampling.temperature or 1.0, sampling.eos, sampling.min_new_tokens)
    prompts, completions = zip(*token_ids, strict=True)
    sequences, sums = forward.collate_ids(prompts, completions, shared.device), torch.zeros(len(token_ids))
    for rows, batch in forward.parts_of(shared, sequences, size):
        inputs = (batch.input_ids, batch.starts, batch.mask, *settings)
        sums[rows] = shared.logprobs(role, *inputs)[0].sum(-1).cpu()
    return sums.tolist()
