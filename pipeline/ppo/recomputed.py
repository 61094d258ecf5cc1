"""The numbers of the first rollout a second time, row by row, by other code than that which made them.

The checks of checks.py look at invariants; these compare. Rewards and advantages are computed in plain Python from the
episodes of all workers, log-probs by the model's own forward without padding or cache, values from the prompt alone. A
sign, a shift, a mask or a mean over the wrong set shows as a difference. At most ROWS short prefixes go through the
model, so that it costs little beside an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.findings import Finding
from pipeline.ppo.batch import Episodes, all_reduce, prompt_order
from pipeline.ppo.checks import tolerance
from pipeline.ppo.rewards import AdapterReward, Samples

if TYPE_CHECKING:
    from pipeline.ppo.trainer import PPOTrainer

ROWS = 32  # completions of a worker that are looked at
ACTIONS = 64  # of each, the first so many
DEVIATIONS = 5.0  # of a sum of independent numbers: chance exceeds it once in two million runs


def check(
    trainer: PPOTrainer, episodes: Episodes, samples: Samples, rewards: Tensor, greedy_scores: Tensor | None
) -> list[Finding]:
    """All comparisons, on the first update's episodes, their samples and token rewards (B, R). Every rank calls it.

    Args:
        greedy_scores: (B,) of remax, as `PPOTrainer.greedy_scores` returns them.
    """
    return [
        each_episode_once(trainer, episodes),
        prompts_as_templated(trainer, episodes, samples),
        logprobs_of_the_model(trainer, episodes),
        drawn_from_the_policy(trainer, episodes),
        values_before_actions(trainer, episodes),
        scores_of_whole_completions(trainer, episodes),
        advantages_by_definition(trainer, episodes, rewards, greedy_scores),
    ]


# ------------------------------------------------------------------------------------------------ who has what


def each_episode_once(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Every episode of the update is on one worker, with the prompt that the seed gives it."""
    args = trainer.args
    seen = torch.zeros(args.batch_size, device=episodes.mask.device)
    seen.index_add_(0, episodes.indices, torch.ones(len(episodes), device=seen.device))
    order = prompt_order(0, trainer.prompts_per_update, len(trainer.prompts), args.seed)
    strangers = 0
    for index, ids, start in zip(
        episodes.indices.tolist(), episodes.input_ids.tolist(), episodes.starts.tolist(), strict=True
    ):
        expected = trainer.prompts[order[index // args.num_generations]]["input_ids"]
        strangers += ids[:start] != [int(i) for i in expected]
    seen = all_reduce(seen)
    missing, twice = int((seen == 0).sum()), int((seen > 1).sum())
    strangers = int(all_reduce(torch.tensor(float(strangers), device=seen.device)))
    found = f"{args.batch_size} episodes on {trainer.workers} workers"
    if missing or twice or strangers:
        found += f": {missing} are on none, {twice} on several, {strangers} have another prompt than the seed gives them"
    return Finding("each episode is on one worker", found, not (missing or twice or strangers))


def prompts_as_templated(trainer: PPOTrainer, episodes: Episodes, samples: Samples) -> Finding:
    """Prompts begin with at most one begin token, and chats end with what the template asks for a completion with."""
    name, tokenizer = "prompts begin once and end with the call for a completion", trainer.tokenizer
    prompts = [
        ids[:start] for ids, start in zip(episodes.input_ids.tolist(), episodes.starts.tolist(), strict=True)
    ]
    bos = getattr(tokenizer, "bos_token_id", None)
    twice = sum(bos is not None and ids[:2] == [bos, bos] for ids in prompts)
    chats = [
        ids
        for ids, row in zip(prompts[:ROWS], samples.rows, strict=False)
        if isinstance(row.get("prompt"), list)
    ]
    call = generation_prompt(tokenizer) if chats else ""
    uncalled = sum(not tokenizer.decode(ids).rstrip().endswith(call) for ids in chats)
    found = f"{len(prompts)} prompts"
    if twice:
        found += (
            f"; {twice} begin with the begin token twice (the template writes one, and so does the tokenizer)"
        )
    if uncalled:
        found += f"; {uncalled} do not end with {call!r} (the template's generation prompt)"
    return Finding(name, found, not (twice or uncalled))


def generation_prompt(tokenizer: Any) -> str:
    """What a chat template writes to ask for a completion, without white space around it; "" if it writes nothing."""
    if getattr(tokenizer, "chat_template", None) is None:
        return ""
    question = [{"role": "user", "content": "?"}]
    without, asking = (
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=asks)
        for asks in (False, True)
    )
    return asking[len(without) :].strip() if asking.startswith(without) else ""


# ----------------------------------------------------------------------------------- what the model itself says


@dataclass
class Plain:
    """The first actions of one completion: (n,) ids, and (n, V) log-probs by the model's own forward without padding."""

    row: int  # of the episodes
    actions: Tensor
    logprobs: Tensor

    def of_actions(self) -> Tensor:
        """(n,) log-probs of the actions."""
        return self.logprobs.gather(-1, self.actions.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def plainly(trainer: PPOTrainer, role: str | None, episodes: Episodes, row: int) -> Plain:
    """The log-probs of a row's first actions under a role, with the sampling's temperature and minimum length."""
    shared, sampling = trainer.shared, trainer.sampling
    start = int(episodes.starts[row])
    count = min(int(episodes.counts[row]), ACTIONS)
    ids = episodes.input_ids[row : row + 1, : start + count]
    precision = torch.autocast(ids.device.type, shared.autocast, enabled=shared.autocast is not None)
    with shared.use(role), precision:
        logits = shared.base(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float()
    logits = logits / sampling.temperature
    if sampling.min_new_tokens:
        logits[: sampling.min_new_tokens, list(sampling.eos)] = float("-inf")
    return Plain(row, ids[0, start:], logits.log_softmax(-1))


def logprobs_of_the_model(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Old and reference log-probs are those of the model's own forward on the row alone."""
    name = "log-probs are those of the model's own forward"
    row = int(episodes.counts.argmin())  # padded the most
    differences = {}
    for role, ours in (("policy", episodes.old_logprobs), (trainer.reference, episodes.ref_logprobs)):
        plain = plainly(trainer, role, episodes, row).of_actions()
        difference = (ours[row, : len(plain)] - plain).square().mean().sqrt() if len(plain) else 0.0
        differences[role or "base"] = float(difference)
    found = "; ".join(f"{role} differs by {value:.2g} nats" for role, value in differences.items())
    holds = all(value <= tolerance(trainer.shared) for value in differences.values())
    if not holds:
        found += ". Padding, position, temperature, minimum length or adapter differ from a plain forward's"
    return Finding(name, found, holds)


def drawn_from_the_policy(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Completions are samples of the policy's whole distribution: neither sharper (top-k, top-p) nor flatter.

    For a token x drawn from p, -log p(x) has the mean H(p), the entropy, and a variance that p gives, too. The sum of
    -log p(x) - H(p) over all tokens, in units of its standard deviation, is then a standard normal number.
    """
    name = "completions are drawn from the policy's whole distribution"
    excess, variance = 0.0, 0.0
    for row in range(min(len(episodes), ROWS)):
        plain = plainly(trainer, "policy", episodes, row)
        p, surprise = plain.logprobs.exp().double(), -plain.logprobs.double()
        surprise = surprise.where(p > 0, 0.0)
        entropy = (p * surprise).sum(-1)
        excess += float((-plain.of_actions().double() - entropy).sum())
        variance += float((p * (surprise - entropy.unsqueeze(-1)).square()).sum())
    total = all_reduce(torch.tensor([excess, variance], device=episodes.mask.device))
    excess, variance = total.tolist()
    if variance < 1e-6:
        return Finding(name, "not checked: the policy is certain of every token", None)
    deviations = excess / math.sqrt(variance)
    found = f"log-probs are {-deviations:+.1f} standard deviations from what sampling gives"
    if abs(deviations) > DEVIATIONS:
        found += (
            ". Sampled tokens are more likely than chance makes them: top-k, top-p or a lower temperature is on"
            if deviations < 0
            else ". Sampled tokens are less likely than chance makes them: another temperature, or another policy"
        )
    return Finding(name, found, abs(deviations) <= DEVIATIONS)


@torch.no_grad()
def values_before_actions(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """The value of the first action is the head's output on the prompt alone, that of the last one on all before it."""
    name = "values are read before each action"
    if not trainer.args.uses_critic:
        return Finding(name, f"no critic ({trainer.args.advantage_estimator})", None)
    shared, largest = trainer.shared, 0.0
    row = int(episodes.counts.argmin())
    start, count = int(episodes.starts[row]), int(episodes.counts[row])
    head = shared.parameters_of("critic")[-1]
    for t in {0, count - 1} if count else ():
        ids = episodes.input_ids[row : row + 1, : start + t]
        value = float(head.float() @ shared.hidden("critic", ids)[0, -1].float())
        value = value * trainer.moments.std + trainer.moments.mean
        largest = max(largest, abs(value - float(episodes.values[row, t])))
    found = f"they differ by up to {largest:.2g} from the head's output on what stands before the action"
    spread = float(episodes.values[episodes.mask].std()) if int(episodes.mask.sum()) > 1 else 0.0
    return Finding(name, found, largest <= tolerance(shared) * max(1.0, spread))


@torch.no_grad()
def scores_of_whole_completions(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """The score is the reward heads' output at the last token of a row alone, normalised, weighted, clipped, penalised."""
    name, args = "scores are read at the last token of the completion", trainer.args
    rewards = [reward for reward in trainer.rewards if isinstance(reward, AdapterReward)]
    if len(rewards) < len(trainer.rewards):
        return Finding(name, "not checked: a reward is no adapter on the base", None)
    shared, largest, unit = trainer.shared, 0.0, 0.0
    for row in {int(episodes.counts.argmin()), int(episodes.counts.argmax())}:
        ids = episodes.input_ids[row : row + 1, : int(episodes.starts[row] + episodes.counts[row])]
        total = 0.0
        for reward in rewards:
            last = shared.hidden(reward.role, ids)[0, -1].float()
            score = float(shared.parameters_of(reward.role)[-1].float() @ last)
            score = (score - reward.mean) / reward.std if args.normalize_rewards else score
            total += reward.weight * score
            unit = max(unit, abs(reward.weight) * (1.0 if args.normalize_rewards else reward.std))
        if args.reward_clip is not None:
            total = min(max(total, -args.reward_clip), args.reward_clip)
        if not episodes.ended[row]:
            total -= args.missing_eos_penalty or 0.0
        largest = max(largest, abs(total - float(episodes.scores[row])))
    found = f"they differ by up to {largest:.2g} from the head's output on the completion alone"
    return Finding(name, found, largest <= tolerance(shared) * max(1.0, unit))


# ------------------------------------------------------------------------------- rewards and advantages, in Python


@dataclass
class Row:
    """One completion: lists have one number for each action."""

    index: int
    score: float
    ended: bool
    bootstrap: float
    learns: bool
    greedy: float
    old: list[float]
    reference: list[float]
    sampler: list[float]
    values: list[float]
    rewards: list[float]  # as the trainer computed them
    advantages: list[float]  # as the trainer computed them


def advantages_by_definition(
    trainer: PPOTrainer, episodes: Episodes, rewards: Tensor, greedy_scores: Tensor | None
) -> Finding:
    """Token rewards and advantages equal those that plain Python computes from the rows of all workers together."""
    args = trainer.args
    mine = _rows(episodes, rewards, greedy_scores)
    parts: list[Any] = [mine]
    if trainer.workers > 1:
        parts = [None] * trainer.workers
        dist.all_gather_object(parts, mine)
    rows: list[Row] = sorted(chain(*parts), key=lambda row: row.index)
    paid = [_token_rewards(args, trainer.kl_coef, row) for row in rows]
    if args.whiten_rewards:
        paid = _whitened(paid, [True] * len(rows), shift=False)
    expected = _advantages(args, rows, paid)
    if args.whitens_advantages:
        expected = _whitened(expected, [row.learns for row in rows])
    if args.use_vllm and args.vllm_importance_sampling_clip_max:
        limit = args.vllm_importance_sampling_clip_max
        for row, values in zip(rows, expected, strict=True):
            for t, (old, sampler) in enumerate(zip(row.old, row.sampler, strict=True)):
                values[t] *= min(math.exp(min(old - sampler, 50.0)), limit)
    wrong_rewards = sum(not _close(row.rewards, ours) for row, ours in zip(rows, paid, strict=True))
    wrong = sum(
        row.learns and not _close(row.advantages, ours) for row, ours in zip(rows, expected, strict=True)
    )
    found = f"{len(rows)} completions of {trainer.workers} workers, {args.advantage_estimator}"
    if wrong_rewards:
        found += f"; token rewards of {wrong_rewards} differ: the KL's sign or coefficient, or where the score is paid"
    elif wrong:
        found += (
            f"; advantages of {wrong} differ: gamma, lambda, the values, what follows the last action, or whitening over "
            "other rows than those of all workers together"
        )
    return Finding("rewards and advantages are as defined", found, not (wrong_rewards or wrong))


def _rows(episodes: Episodes, rewards: Tensor, greedy_scores: Tensor | None) -> list[Row]:
    counts = episodes.counts.tolist()

    def lists(tensor: Tensor) -> list[list[float]]:
        return [values[:count] for values, count in zip(tensor.tolist(), counts, strict=True)]

    greedy = torch.zeros(len(counts)) if greedy_scores is None else greedy_scores
    columns = [
        episodes.indices.tolist(),
        episodes.scores.tolist(),
        episodes.ended.tolist(),
        episodes.bootstrap.tolist(),
        episodes.learn.any(-1).tolist(),
        greedy.tolist(),
        *map(lists, (episodes.old_logprobs, episodes.ref_logprobs, episodes.sampler_logprobs)),
        *map(lists, (episodes.values, rewards, episodes.advantages)),
    ]
    return [Row(*values) for values in zip(*columns, strict=True)]


KL: dict[str, Callable[[float], float]] = {  # of d = log p_policy - log p_reference
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(min(-d, 20.0)) - 1 + d,
    "abs": abs,
}


def _token_rewards(args: Any, kl_coef: float, row: Row) -> list[float]:
    coefficient = kl_coef if args.kl_in == "reward" else 0.0
    kl = KL[args.kl_estimator]
    rewards = [-coefficient * kl(a - b) for a, b in zip(row.old, row.reference, strict=True)]
    if rewards and (row.ended or not args.bootstrap_truncated):
        rewards[-1] += row.score
    return rewards


def _advantages(args: Any, rows: list[Row], rewards: list[list[float]]) -> list[list[float]]:
    """Advantages before whitening, by the estimator's definition (see config.py for the papers)."""
    if args.advantage_estimator == "gae":
        return [_gae(args, row, paid) for row, paid in zip(rows, rewards, strict=True)]
    if args.advantage_estimator in ("remax", "reinforce_plus_plus"):
        baseline = args.advantage_estimator == "remax"
        return [
            [value - row.greedy * baseline for value in _to_go(paid, args.gamma)]
            for row, paid in zip(rows, rewards, strict=True)
        ]
    n, advantages = args.num_generations, []
    totals = [sum(paid) for paid in rewards]
    for i, paid in enumerate(rewards):
        group = totals[i // n * n : i // n * n + n]
        if args.advantage_estimator == "rloo":
            value = totals[i] - (sum(group) - totals[i]) / (n - 1)
        else:
            mean = sum(group) / n
            value = totals[i] - mean
            if args.scale_rewards:
                value /= math.sqrt(sum((total - mean) ** 2 for total in group) / (n - 1)) + 1e-4
        advantages.append([value] * len(paid))
    return advantages


def _gae(args: Any, row: Row, rewards: list[float]) -> list[float]:
    later = row.bootstrap if args.bootstrap_truncated and not row.ended else 0.0
    advantage, advantages = 0.0, []
    for reward, value in zip(reversed(rewards), reversed(row.values), strict=True):
        advantage = reward + args.gamma * later - value + args.gamma * args.lam * advantage
        later = value
        advantages.append(advantage)
    return advantages[::-1]


def _to_go(rewards: list[float], gamma: float) -> list[float]:
    total, totals = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        totals.append(total)
    return totals[::-1]


def _whitened(rows: list[list[float]], counts: list[bool], shift: bool = True) -> list[list[float]]:
    """All rows scaled by mean and deviation of those that count."""
    values = list(chain(*(row for row, counted in zip(rows, counts, strict=True) if counted)))
    mean = sum(values) / max(len(values), 1)
    scale = 1.0
    if len(values) > 1:
        scale = 1 / math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) + 1e-8)
    return [[(value - mean) * scale + (0.0 if shift else mean) for value in row] for row in rows]


def _close(ours: list[float], plain: list[float]) -> bool:
    return all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-3 * max(1.0, *map(abs, plain)))
        for a, b in zip(ours, plain, strict=True)
    )
