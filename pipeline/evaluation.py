"""A policy against a baseline on held-out prompts: reward, win rates, KL, length, endings, and samples side by side.

Both sample one reply to every prompt with the same random numbers; the prompts are shared out over the workers.
"""

import json
import math
from typing import Any

import torch

from pipeline.ppo.rewards import Samples, in_batches, weighted
from pipeline.ppo.rollout import Reply, Sampling, TransformersEngine
from pipeline.worker import Worker

SEED_OFFSET = 1_000_003  # evaluation draws other random numbers than training


def compare(
    worker: Worker,
    shared: Any,
    prompts: Any,
    sampling: Sampling,
    rewards: list[Any],
    judge: Any,
    policy: str | None,
    baseline: str | None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and samples of `policy` (`eval_*`) against `baseline` (`before_*`), the same on every rank.

    Args:
        prompts: rows with `input_ids` (prompt token ids) and `row` (JSON text of the row as the data has it).
        rewards, judge: scorers of pipeline.ppo.rewards; the judge may be None.
        policy, baseline: roles on `shared`; None is the bare base.

    Returns:
        (metrics, samples). eval_reward: weighted reward, raw units. eval_win_rate, eval_judge_win_rate: share of prompts
        on which the policy's reply scores higher, ties counting half. eval_kl: nats per reply, of the policy's replies,
        sum over tokens of log policy - log baseline. eval_eos: share of replies that ended by themselves.
    """
    mine = list(range(worker.rank, len(prompts), worker.world))
    rows = [{"index": i, **_prompt(prompts[i])} for i in mine]
    results: list[dict[str, Any]] = [{"index": r["index"]} for r in rows]
    size = worker.job.trainer.get("local_rollout_forward_batch_size", 64)
    for role, key in ((baseline, "before"), (policy, "eval")):
        engine = TransformersEngine(shared, role, rows=size, pad=worker.tokenizer.pad_token_id)
        replies = (
            engine.generate([r["input_ids"] for r in rows], [r["index"] for r in rows], sampling)
            if rows
            else []
        )
        scored = _score(worker, rows, replies, rewards, judge)
        for result, reply, scores in zip(results, replies, scored, strict=True):
            result[key] = {"length": len(reply.tokens), "eos": float(reply.ended), **scores}
        if key == "eval" and rows:
            divergence = _kl(shared, rows, replies, policy, baseline, sampling, size)
            for result, kl in zip(results, divergence, strict=True):
                result[key]["kl"] = kl
    everything = sorted((r for part in gather(worker, results) for r in part), key=lambda r: r["index"])
    return _metrics(everything), [_sample(r) for r in everything[:8]]


def sampling(worker: Worker, shared: Any, args: Any) -> Sampling:
    """How evaluation samples: as training does, with other random numbers."""
    from pipeline.models.tokenizer import eos_ids

    return Sampling(
        max_new_tokens=args.response_length,
        eos=tuple(eos_ids(worker.tokenizer, shared.base.generation_config)),
        min_new_tokens=args.min_new_tokens,
        temperature=args.temperature,
        seed=args.seed + SEED_OFFSET,
    )


def gather(worker: Worker, mine: Any) -> list[Any]:
    """[what each rank has], on every rank."""
    if worker.world == 1:
        return [mine]
    parts: list[Any] = [None] * worker.world
    torch.distributed.all_gather_object(parts, mine)
    return parts


def pair_accuracy(worker: Worker, shared: Any, role: str, pairs: Any) -> dict[str, float]:
    """Accuracy and mean margin of a reward role on tokenised preference pairs (`chosen_ids`, `rejected_ids`)."""
    mine = pairs.select(range(worker.rank, len(pairs), worker.world))
    size = worker.job.trainer.get("local_rollout_forward_batch_size", 64)

    def score(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return shared.scores(role, ids, lengths=mask.sum(-1))

    sides = [in_batches(mine[side], size, shared.device, score) for side in ("chosen_ids", "rejected_ids")]
    margins = [m for part in gather(worker, [c - r for c, r in zip(*sides, strict=True)]) for m in part]
    return {
        "eval_rm_accuracy": sum(m > 0 for m in margins) / len(margins),
        "eval_rm_margin": sum(margins) / len(margins),
    }


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": list(row["input_ids"]), "row": json.loads(row["row"])}


def _score(
    worker: Worker, rows: list[dict[str, Any]], replies: list[Reply], rewards: list[Any], judge: Any
) -> list[dict[str, Any]]:
    if not rows:
        return []
    samples = Samples(
        prompt_ids=[r["input_ids"] for r in rows],
        completion_ids=[r.tokens for r in replies],
        ended=[r.ended for r in replies],
        rows=[r["row"] for r in rows],
        tokenizer=worker.tokenizer,
    )
    scores: list[dict[str, Any]] = [
        {"prompt": p, "completion": c} for p, c in zip(samples.prompts, samples.completions, strict=True)
    ]
    if rewards:
        total, _ = weighted(rewards, samples, normalize=False)
        for score, value in zip(scores, total, strict=True):
            score["reward"] = value
    if judge is not None:
        for score, value in zip(scores, judge.checked(samples), strict=True):
            score["judge"] = value
    return scores


@torch.no_grad()
def _kl(
    shared: Any,
    rows: list[dict[str, Any]],
    replies: list[Reply],
    policy: str | None,
    baseline: str | None,
    sampling: Sampling,
    size: int,
) -> list[float]:
    """Nats per reply: the k1 estimate of KL(policy || baseline) on the policy's own samples."""
    found: list[float] = []
    for start in range(0, len(rows), size):
        part = list(zip(rows[start : start + size], replies[start : start + size], strict=True))
        width = max(len(row["input_ids"]) + len(reply.tokens) for row, reply in part)
        longest = max(len(reply.tokens) for _, reply in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros(len(part), longest)
        starts = torch.tensor([len(row["input_ids"]) for row, _ in part])
        for i, (row, reply) in enumerate(part):
            tokens = row["input_ids"] + reply.tokens
            ids[i, : len(tokens)] = torch.tensor(tokens)
            mask[i, : len(reply.tokens)] = 1
        batch = [t.to(shared.device) for t in (ids, starts, mask)]
        ours, theirs = (
            shared.logprobs(role, *batch, temperature=sampling.temperature or 1.0)[0]
            for role in (policy, baseline)
        )
        found += (ours - theirs).sum(-1).tolist()
    return found


def _metrics(results: list[dict[str, Any]]) -> dict[str, float]:
    metrics = {}
    for key in ("before", "eval"):
        for name in ("reward", "judge", "length", "eos", "kl"):
            values = [r[key][name] for r in results if name in r[key]]
            if values:
                metrics[f"{key}_{name}"] = sum(values) / len(values)
        texts = [r[key]["completion"] for r in results]
        metrics[f"{key}_distinct"] = len(set(texts)) / max(1, len(texts))
    for name, key in (("reward", "eval_win_rate"), ("judge", "eval_judge_win_rate")):
        if all(name in r["eval"] for r in results):
            wins = [_win(r["eval"][name], r["before"][name]) for r in results]
            metrics[key] = sum(wins) / len(wins)
    return metrics


def _win(ours: float, theirs: float) -> float:
    return 0.5 if math.isclose(ours, theirs, abs_tol=1e-9) else float(ours > theirs)


def _sample(result: dict[str, Any]) -> dict[str, Any]:
    keep = ("completion", "reward", "judge")
    return {
        "prompt": result["eval"]["prompt"],
        "before": {k: result["before"][k] for k in keep if k in result["before"]},
        "after": {k: result["eval"][k] for k in keep if k in result["eval"]},
    }
