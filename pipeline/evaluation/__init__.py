"""A policy against a baseline on held-out prompts: reward, win rates, KL, length, diversity, and samples side by side.

Policy and baseline sample one completion to every prompt, with the same random numbers. The workers share the prompts.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pipeline.evaluation import policies
from pipeline.figures import distinct, mean, repetition, wilson
from pipeline.inference.decoder import SlotDecoder
from pipeline.inference.rows import Completion, Decoder, Sampling, seed_of
from pipeline.models.adapters import SharedBase
from pipeline.ppo import forward
from pipeline.ppo.config import PLANNED_ROWS
from pipeline.ppo.episodes import collate_ids
from pipeline.ppo.rewards import Samples, weighted
from pipeline.runtime.inference import in_parts
from pipeline.runtime.worker import Worker
from pipeline.system import console

SEED_OFFSET = 1_000_003  # evaluation draws other random numbers than training
WIN_RATES = {"reward": "eval_win_rate", "judge": "eval_judge_win_rate"}


class Comparison:
    """Compares policies with a baseline on held-out prompts. The baseline's completions are sampled only once.

    Args:
        prompts: rows with `input_ids` (prompt token ids) and `row` (JSON text of the row as the data has it).
        rewards, judge: scorers of pipeline.ppo.rewards; the judge may be None.
        baseline: a frozen role on `shared`; None is the bare base.
        decoder: writes the completions. None: the base itself.
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
        self.worker, self.shared, self.rewards, self.judge = worker, shared, rewards, judge
        sampling = Sampling.from_args(worker.job.args, worker.tokenizer, shared)
        self.baseline, self.sampling = baseline, replace(sampling, seed=sampling.seed + SEED_OFFSET)
        self.prompts = prompts
        # In a PPO job, null becomes a constant, because free memory may differ after a resume and would change the numbers.
        self.size = worker.job.args.local_rollout_forward_batch_size or PLANNED_ROWS
        self.decoder = decoder or SlotDecoder(shared, self.size, worker.tokenizer.pad_token_id)
        self.before: list[dict[str, Any]] | None = None
        self.results: list[dict[str, Any]] = []  # from the last call of `of`, in the order of the prompts

    def of(self, policy: str | None) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns metrics and samples of `policy` (`eval_*`; None is the bare base) and of the baseline (`before_*`).

        Every rank must call it, and every rank gets the same.

        Returns:
            (metrics, samples). eval_reward: weighted reward, raw units. eval_win_rate, eval_judge_win_rate: share of prompts
            on which the policy's completion scores higher, ties counting half, with *_low and *_high, the ends of the 95 %
            interval. eval_kl: nats per completion, of the policy's completions, sum over tokens of log policy - log baseline.
            eval_eos: share of completions that ended by themselves. eval_distinct: share of distinct completions; _1, _2: of
            distinct tokens and bigrams in all completions; eval_repetition: share of a completion's 4-grams that repeat an
            earlier one.
            eval_perplexity: per token, of the rows' reference completions.
        """
        count = len(self.prompts)
        with console.waiting(f"sampling completions to {count} held-out prompts"):
            if self.before is None:
                answer = partial(self._answer, self.baseline, compared=False)
                self.before = self._of_all("baseline-", count, answer)
            after = self._of_all("policy-", count, partial(self._answer, policy, compared=True))
        self.results = results = [
            {"before": before, "eval": completion}
            for before, completion in zip(self.before, after, strict=True)
        ]
        return _metrics(results), [_sample(result) for result in results[:8]]

    def best_of(self, policy: str | None, n: int) -> list[dict[str, float]]:
        """Returns the best-of-n curve of `policy`: n completions of each prompt, ranked by the reward, rated by the judge.

        Without a judge the reward rates its own choice. Every rank must call it, and every rank gets the same.
        """
        sampling = replace(self.sampling, seed=self.sampling.seed + SEED_OFFSET)

        def answer(numbers: range) -> list[tuple[float, float]]:
            rows = [_prompt(self.prompts[number // n]) for number in numbers]
            scored = self._sampled(policy, rows, numbers, sampling)[1]
            return [(one["reward"], one.get("judge", one["reward"])) for one in scored]

        count = len(self.prompts)
        with console.waiting(f"sampling {n} completions to each of {count} held-out prompts"):
            found = self._of_all("best-of-n-", count * n, answer)
        groups = [found[start : start + n] for start in range(0, count * n, n)]
        proxies, golds = ([[one[k] for one in group] for group in groups] for k in (0, 1))
        return policies.best_of_curve(proxies, golds)

    def length_controlled(self) -> dict[str, float]:
        """Returns the length-controlled win rates, with intervals, of the completions that `of` sampled last."""
        metrics: dict[str, float] = {}
        longer = [len(r["eval"]["completion"]) - len(r["before"]["completion"]) for r in self.results]
        for name, key in WIN_RATES.items():
            if all(name in r["eval"] for r in self.results):
                wins = [_win(r["eval"][name], r["before"][name]) for r in self.results]
                ends = policies.length_controlled(wins, longer)
                metrics |= dict(zip((f"{key}_lc", f"{key}_lc_low", f"{key}_lc_high"), ends, strict=True))
        return metrics

    def _of_all(self, of: str, count: int, answer: Callable[[range], list[Any]]) -> list[Any]:
        """Returns the record of each of `count` rows, in order, on every rank. A killed `evaluate` resumes."""
        if self.worker.job.stage == "evaluate":
            return list(in_parts(self.worker, of, count, answer))
        world = self.worker.world
        parts = self.worker.gather(answer(range(self.worker.rank, count, world)))
        return [parts[i % world][i // world] for i in range(count)]

    def _answer(self, role: str | None, numbers: range, compared: bool) -> list[dict[str, Any]]:
        """Returns one completion of a role to each of some prompts: its tokens, scores and figures.

        Args:
            compared: with the baseline, by their log-probabilities.
        """
        rows = [_prompt(self.prompts[number]) for number in numbers]
        if not rows:
            return []
        completions, scored = self._sampled(role, rows, numbers, self.sampling)
        records = [
            {
                "length": len(completion.tokens),
                "eos": float(completion.ended),
                "repetition": repetition(completion.tokens),
                "tokens": completion.tokens,
                **scores,
            }
            for completion, scores in zip(completions, scored, strict=True)
        ]
        for index, nll, tokens in _reference_nll(self.worker, self.shared, role, rows, self.size):
            records[index] |= {"reference_nll": nll, "reference_tokens": tokens}
        if compared:
            token_ids = [(row["input_ids"], one.tokens) for row, one in zip(rows, completions, strict=True)]
            of_policy, of_baseline = (
                logprobs(self.shared, one, token_ids, self.size, self.sampling)
                for one in (role, self.baseline)
            )
            for record, ours, theirs in zip(records, of_policy, of_baseline, strict=True):
                record["kl"] = ours - theirs
        return records

    def _sampled(
        self, role: str | None, rows: list[dict[str, Any]], numbers: range, sampling: Sampling
    ) -> tuple[list[Completion], list[dict[str, Any]]]:
        """Returns a completion to each row, and for each its text and scores."""
        completions = self.decoder.generate(role, [row["input_ids"] for row in rows], numbers, sampling)
        samples = Samples(
            prompt_ids=[r["input_ids"] for r in rows],
            completion_ids=[r.tokens for r in completions],
            ended=[r.ended for r in completions],
            rows=[r["row"] for r in rows],
            tokenizer=self.worker.tokenizer,
            seeds=[seed_of(self.worker.job.args.seed, number) for number in numbers],
        )
        scores: list[dict[str, Any]] = [
            {"prompt": p, "completion": c} for p, c in zip(samples.prompts, samples.completions, strict=True)
        ]
        if self.rewards:
            total, _ = weighted(self.rewards, samples, normalize=False)
            for score, value in zip(scores, total, strict=True):
                score["reward"] = value
        if self.judge is not None:
            for score, value in zip(scores, self.judge.checked(samples), strict=True):
                score["judge"] = value
        return completions, scores


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": list(row["input_ids"]), "row": json.loads(row["row"])}


@torch.no_grad()
def logprobs(
    shared: SharedBase,
    role: str | None,
    token_ids: list[tuple[list[int], list[int]]],
    size: int,
    sampling: Sampling | None = None,
) -> list[float]:
    """Returns the log-probability in nats of the completion of each (prompt ids, completion ids), summed over its tokens.

    Args:
        size: rows of one forward, at most.
        sampling: temperature and barred ends as they were sampled with (greedy: as with temperature 1); None: the model's own.
    """
    temperature = (sampling.temperature if sampling else 0.0) or 1.0
    early = sampling.min_new_tokens if sampling else 0
    barred = sampling.eos if sampling and early else ()
    if not token_ids:
        return []
    prompts, completions = zip(*token_ids, strict=True)
    episodes, sums = collate_ids(prompts, completions, shared.device), torch.zeros(len(token_ids))
    for rows, part in forward.parts_of(shared, episodes, size):
        given = (part.input_ids, part.starts, part.mask, temperature, barred, early)
        sums[rows] = shared.logprobs(role, *given)[0].sum(-1).cpu()
    return sums.tolist()


def _reference_nll(
    worker: Worker, shared: SharedBase, role: str | None, rows: list[dict[str, Any]], size: int
) -> list[tuple[int, float, int]]:
    """Returns (index into `rows`, -log-probability in nats, tokens) of the rows' reference completions."""
    from pipeline.data.encode import Encoder, Example
    from pipeline.data.shapes import kind_of, parse
    from pipeline.models.template import text_as_chat
    from pipeline.models.tokenizer import eos_ids

    room = worker.work.base["context_length"] or 1 << 20
    ends = eos_ids(worker.tokenizer, shared.base.generation_config)
    special = worker.job.data.special_tokens
    apply = text_as_chat(worker.tokenizer, worker.job.data.apply_chat_template)
    encoder = Encoder(worker.tokenizer, kind_of("score"), room, "truncate", apply, ends, special)
    indices, token_ids = [], []
    for index, row in enumerate(rows):
        if not row["row"].get("completion"):
            continue
        reference = {"prompt": row["row"]["prompt"], "completion": row["row"]["completion"]}
        [[example]] = encoder.encode([parse(reference, encoder.kind)])
        if isinstance(example, Example):
            indices.append(index)
            token_ids.append((example.columns["prompt_ids"], example.columns["chosen_ids"]))
    sums = logprobs(shared, role, token_ids, size)
    return [
        (index, -total, len(completion))
        for index, total, (_, completion) in zip(indices, sums, token_ids, strict=True)
    ]


def _metrics(results: list[dict[str, Any]]) -> dict[str, float]:
    metrics = {}
    for key in ("before", "eval"):
        for name in ("reward", "judge", "length", "eos", "kl", "repetition"):
            if values := [r[key][name] for r in results if name in r[key]]:
                metrics[f"{key}_{name}"] = mean(values)
        texts, tokens = ([r[key][name] for r in results] for name in ("completion", "tokens"))
        metrics[f"{key}_distinct"] = len(set(texts)) / max(1, len(texts))
        for n in (1, 2):
            if (share := distinct(tokens, n)) is not None:
                metrics[f"{key}_distinct_{n}"] = share
        if counted := [r[key] for r in results if "reference_tokens" in r[key]]:
            nats, tokens_in_all = (
                sum(one[name] for one in counted) for name in ("reference_nll", "reference_tokens")
            )
            metrics[f"{key}_perplexity"] = math.exp(nats / tokens_in_all)
    for name, key in WIN_RATES.items():
        if all(name in r["eval"] for r in results):
            wins = [_win(r["eval"][name], r["before"][name]) for r in results]
            metrics[key] = mean(wins)
            metrics[f"{key}_low"], metrics[f"{key}_high"] = wilson(wins)
    return metrics


def _win(ours: float, theirs: float) -> float:
    # Scores of equal completions differ by fp32 rounding if their batches differ.
    return 0.5 if math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-5) else float(ours > theirs)


def _sample(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("completion", "reward", "judge")
    return {
        "prompt": result["eval"]["prompt"],
        "before": {k: result["before"][k] for k in keys if k in result["before"]},
        "after": {k: result["eval"][k] for k in keys if k in result["eval"]},
    }
