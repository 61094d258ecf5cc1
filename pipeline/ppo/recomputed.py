"""The numbers of the first rollout a second time, row by row, by other code than that which made them.

The checks of checks.py look at invariants; these compare. Rewards and advantages are computed in plain Python from the
episodes of all workers, log-probs by the model's own forward without padding or cache, values from the prompt alone. A
sign, a shift, a mask or a mean over the wrong set shows as a difference. Only the beginnings of some completions go
through the model, so that it costs little beside an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.findings import Finding
from pipeline.models.template import wrapping
from pipeline.models.tokenizer import eos_ids
from pipeline.ppo.batch import Episodes, Totals, all_reduce, prompt_order
from pipeline.ppo.checks import tolerance
from pipeline.ppo.rewards import AdapterReward

if TYPE_CHECKING:
    from pipeline.ppo.trainer import PPOTrainer

ACTIONS = 64  # of a completion, the first so many
TOKENS = 1024  # of the completions that are looked at, together
TAILS = (0.8, 0.9, 0.95, 0.99)  # mass of the tokens before a tail
DEVIATIONS = 5.0  # of a sum of independent numbers: chance exceeds it once in two million runs


def check(
    trainer: PPOTrainer, episodes: Episodes, rewards: Tensor, greedy_scores: Tensor | None
) -> list[Finding]:
    """All comparisons, on the first update's episodes and token rewards (B, R). Every rank calls it.

    Args:
        greedy_scores: (B,) of remax, as `PPOTrainer.greedy_scores` returns them.
    """
    return [
        each_episode_once(trainer, episodes),
        prompts_as_templated(trainer, episodes),
        stops_on_every_end(trainer),
        logprobs_of_the_model(trainer, episodes),
        drawn_from_the_policy(trainer, episodes),
        values_before_actions(trainer, episodes),
        scores_of_whole_completions(trainer, episodes),
        advantages_by_definition(trainer, episodes, rewards, greedy_scores),
        losses_pull_the_right_way(trainer, episodes),
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


def prompts_as_templated(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Prompts begin with at most one begin token, and chats end with what the template asks for a completion with."""
    name, tokenizer = "prompts begin once and end with the call for a completion", trainer.tokenizer
    prompts = [
        ids[:start] for ids, start in zip(episodes.input_ids.tolist(), episodes.starts.tolist(), strict=True)
    ]
    bos = getattr(tokenizer, "bos_token_id", None)
    twice = sum(bos is not None and ids[:2] == [bos, bos] for ids in prompts)
    question, call = wrapping(tokenizer)
    texts = [tokenizer.decode(ids) for ids in prompts] if question and call else []
    chats = [text for text in texts if question in text]
    uncalled = len(chats) * all(not text.rstrip().endswith(call) for text in chats)
    found = f"{len(prompts)} prompts"
    if twice:
        found += (
            f"; {twice} begin with the begin token twice (the template writes one, and so does the tokenizer)"
        )
    if uncalled:
        found += f"; {uncalled} do not end with {call!r} (the template's generation prompt)"
    return Finding(name, found, not (twice or uncalled))


def stops_on_every_end(trainer: PPOTrainer) -> Finding:
    """Sampling stops on all tokens with which tokenizer and base end a completion (Llama 3 has two)."""
    shared, tokenizer, stops = trainer.shared, trainer.tokenizer, trainer.sampling.eos
    ends = [i for i in eos_ids(tokenizer, shared.base.generation_config) if i < shared.vocab_size]
    found = f"completions end with the token ids {ends}"
    if missing := sorted(set(ends) - set(stops)):
        found += f", sampling goes on after {missing}"
    return Finding("sampling stops on every end token", found, not missing)


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


def _some(episodes: Episodes) -> list[int]:
    """The first rows, as many as have TOKENS actions together."""
    ends = episodes.counts.clamp(max=ACTIONS).cumsum(0)
    return list(range(int((ends < TOKENS).sum()) + 1))[: len(episodes)]


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

    For a token x drawn from p, -log p(x) has the mean H(p), the entropy; and the least likely tokens of p are drawn as
    often as their mass says. Both sums over all tokens are compared with what they are on average.
    """
    name = "completions are drawn from the policy's whole distribution"
    sums = torch.zeros(1 + len(TAILS), 2, dtype=torch.float64, device=episodes.mask.device)
    for row in _some(episodes):
        plain = plainly(trainer, "policy", episodes, row)
        p, surprise = plain.logprobs.exp().double(), -plain.logprobs.double()
        surprise = surprise.where(p > 0, 0.0)
        entropy = (p * surprise).sum(-1)
        drawn = plain.actions.unsqueeze(-1)
        sums[0, 0] += (surprise.gather(-1, drawn).squeeze(-1) - entropy).sum()
        sums[0, 1] += (p * (surprise - entropy.unsqueeze(-1)).square()).sum()
        above = (p * (p > p.gather(-1, drawn))).sum(
            -1
        )  # mass of the tokens that are more likely than the drawn one
        ordered = p.sort(descending=True).values
        before = ordered.cumsum(-1) - ordered
        for i, tail in enumerate(TAILS, 1):
            sums[i, 0] += (above >= tail).sum()
            sums[i, 1] += (ordered * (before >= tail)).sum()
    (excess, variance), *tails = all_reduce(sums).tolist()
    if copies := _copied(trainer, episodes):
        return Finding(name, copies, False)
    deviations = excess / math.sqrt(max(variance, 1.0))
    found = f"log-probs are {-deviations:+.1f} standard deviations from their mean"
    sharp, flat = deviations < -DEVIATIONS, deviations > DEVIATIONS
    for tail, (count, expected) in zip(TAILS, tails, strict=True):
        if _improbable(count, expected):
            found += (
                f"; the least likely {1 - tail:.0%} are drawn {count:.0f} times instead of {expected:.0f}"
            )
            sharp, flat = sharp or count < expected, flat or count > expected
    if sharp:
        found += ": top-k, top-p or a lower temperature is on"
    elif flat:
        found += ": another temperature, or another policy"
    return Finding(name, found, not (sharp or flat))


def _improbable(count: float, expected: float) -> bool:
    """Whether chance makes so few, or so many, less often than once in a million: Chernoff's bound for independent events."""
    if expected == 0:
        return False
    exponent = count - expected - (count * math.log(count / expected) if count else 0.0)
    return exponent < math.log(1e-6)


def _copied(trainer: PPOTrainer, episodes: Episodes) -> str:
    """What is said where the completions of each prompt are one and the same, and chance explains that no more; else ""."""
    n = trainer.args.num_generations
    completions = [
        tuple(ids[start : start + count])
        for ids, start, count in zip(
            episodes.input_ids.tolist(), episodes.starts.tolist(), episodes.counts.tolist(), strict=True
        )
    ]
    groups = [set(completions[i : i + n]) for i in range(0, len(completions), n)]
    surprise = -float(episodes.old_logprobs[::n][episodes.mask[::n]].sum())
    if n == 1 or any(len(group) > 1 for group in groups) or surprise < 20.0:
        return ""
    return f"the {n} completions of each prompt are the same: they are sampled with the same random numbers, or greedily"


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
    findings = [_by_definition(trainer, episodes, rewards, greedy_scores)]
    # Before the first step the KL is 0, and its sign and coefficient are invisible: once more, with a reference apart.
    steps = torch.arange(episodes.mask.shape[1], device=episodes.mask.device)
    moved = episodes.ref_logprobs + 0.3 * torch.sin(1.0 + steps + episodes.indices.unsqueeze(-1))
    apart = replace(episodes, ref_logprobs=moved.where(episodes.mask, 0.0))
    findings.append(
        _by_definition(trainer, apart, trainer.rewards_and_advantages(apart, greedy_scores), greedy_scores)
    )
    return next((finding for finding in findings if not finding.holds), findings[0])


def _by_definition(
    trainer: PPOTrainer, episodes: Episodes, rewards: Tensor, greedy_scores: Tensor | None
) -> Finding:
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


# ------------------------------------------------------------------------------------------------------ losses


def losses_pull_the_right_way(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """The losses' gradients by log-probs, entropies and values, which are put in place of the models' for this.

    What paid must become more likely, a policy above the reference less likely where the KL is in the loss, entropy
    larger where it has a bonus, and values must move towards the returns.
    """
    args, wrong = trainer.args, []
    part = episodes.take(_some(episodes))
    old = part.old_logprobs
    if part.learn.any() and part.advantages[part.learn].any():
        same = replace(part, ref_logprobs=old)  # no gradient of the KL
        by_logprob, by_entropy = _policy_gradients(trainer, same)
        if not float((by_logprob * part.advantages)[part.learn].sum()) < 0:
            wrong.append("what paid becomes less likely: the sign of the policy loss or of the advantages")
        if by_entropy is not None and not float(by_entropy[part.learn].sum()) < 0:
            wrong.append("entropy falls where it has a bonus")
    if args.kl_in == "loss" and trainer.kl_coef > 0 and part.learn.any():
        above = replace(part, ref_logprobs=old - 0.5, advantages=torch.zeros_like(part.advantages))
        if not float(_policy_gradients(trainer, above)[0][part.learn].sum()) > 0:
            wrong.append("the policy leaves the reference instead of staying: the sign of the KL in the loss")
    if (
        args.uses_critic
        and part.learn.any()
        and not float(_value_gradients(trainer, part)[part.learn].sum()) > 0
    ):
        wrong.append("values move away from the returns")
    found = "; ".join(wrong) or "policy" + (", values" if args.uses_critic else "")
    return Finding("losses pull the right way", found, not wrong)


def _policy_gradients(trainer: PPOTrainer, part: Episodes) -> tuple[Tensor, Tensor | None]:
    """(B, R) gradients of the policy's loss by log-probs and, where it has a coefficient, by entropies, at the old policy."""
    logprobs = part.old_logprobs.clone().requires_grad_()
    entropy = torch.ones_like(logprobs).requires_grad_() if trainer.args.entropy_coef > 0 else None
    totals = Totals.of(part.learn)
    with _answering(trainer, "logprobs", (logprobs, entropy)):
        loss, _ = trainer.policy_objective(part, totals)
    loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad, None if entropy is None else entropy.grad


def _value_gradients(trainer: PPOTrainer, part: Episodes) -> Tensor:
    """(B, R) gradient of the critic's loss by its values, where they are above the returns, beyond the clip range."""
    moments = trainer.moments
    above = 1.0 + 2 * (part.values - part.returns).abs().max() / moments.std
    values = ((part.returns - moments.mean) / moments.std + above).requires_grad_()
    with _answering(trainer, "values", (values, values[:, 0])):
        loss, _ = trainer.value_objective(part, float(part.learn.sum()))
    loss.backward()
    assert values.grad is not None
    return values.grad


@contextmanager
def _answering(trainer: PPOTrainer, method: str, answer: Any) -> Iterator[None]:
    """The trainer's method returns `answer` within the block."""
    setattr(trainer, method, lambda *args, **keys: answer)
    try:
        yield
    finally:
        delattr(trainer, method)  # the instance's: the method shows again
