"""Recomputes the first rollout's numbers row by row, with code independent of the trainer's, and compares.

The checks of checks.py look at invariants, which a fault on both sides keeps. Here log-probs are those of the model's own
forward without padding or cache, values those of the prompt alone, rewards and advantages those of their definitions
(definitions.py). Only the beginnings of some completions go through the model: it costs little beside an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pipeline.findings import Finding
from pipeline.models.template import user_header_and_generation_prompt
from pipeline.models.tokenizer import eos_ids
from pipeline.ppo.batch import Episodes, all_reduce
from pipeline.ppo.checks import tolerance
from pipeline.ppo.definitions import advantages_by_definition
from pipeline.ppo.gradients import losses_pull_the_right_way
from pipeline.ppo.rewards import AdapterReward

if TYPE_CHECKING:
    from pipeline.ppo.trainer import PPOTrainer

ACTIONS = 64  # of a completion, the first so many
TOKENS = 1024  # of the completions that are looked at, together
TAILS = (0.8, 0.9, 0.95, 0.99)  # mass of the tokens before a tail
DEVIATIONS = 5.0  # below the mean: chance exceeds it once in two million runs
SURPRISE = 20.0  # nats: less likely tokens count as if they were as likely as this


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
        stops_on_every_eos(trainer),
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
    order = _prompts_by_definition(trainer)
    wrong_prompts = 0
    for index, ids, start in zip(
        episodes.indices.tolist(), episodes.input_ids.tolist(), episodes.starts.tolist(), strict=True
    ):
        expected = trainer.prompts[order[index // args.num_generations]]["input_ids"]
        wrong_prompts += ids[:start] != [int(i) for i in expected]
    seen = all_reduce(seen)
    missing, twice = int((seen == 0).sum()), int((seen > 1).sum())
    wrong_prompts = int(all_reduce(torch.tensor(float(wrong_prompts), device=seen.device)))
    found = f"{args.batch_size} episodes, workers: {trainer.workers}"
    if missing or twice or wrong_prompts:
        found += f": {missing} are on none, {twice} on several, {wrong_prompts} have another prompt than the seed gives them"
    return Finding("each episode is on one worker", found, not (missing or twice or wrong_prompts))


def _prompts_by_definition(trainer: PPOTrainer) -> list[int]:
    """Returns the indices of the first update's prompts: one seeded permutation of each epoch's prompts after another."""
    seed, size, order = trainer.args.seed, trainer.prompts_per_epoch, []
    for epoch in range(-(-trainer.prompts_per_update // size)):
        drawn = range(size) if trainer.draws is None else trainer.draws(epoch)
        order += [int(drawn[i]) for i in np.random.default_rng([seed, epoch]).permutation(size)]
    return order[: trainer.prompts_per_update]


def prompts_as_templated(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Prompts begin with at most one BOS, and chats end with the template's generation prompt."""
    name, tokenizer = "prompts have one BOS and end with the generation prompt", trainer.tokenizer
    prompts = [
        ids[:start] for ids, start in zip(episodes.input_ids.tolist(), episodes.starts.tolist(), strict=True)
    ]
    bos = getattr(tokenizer, "bos_token_id", None)
    twice = sum(bos is not None and ids[:2] == [bos, bos] for ids in prompts)
    question, asks = user_header_and_generation_prompt(tokenizer)
    texts = [tokenizer.decode(ids) for ids in prompts] if question and asks else []
    chats = [text for text in texts if question in text]
    uncalled = len(chats) * all(not text.rstrip().endswith(asks) for text in chats)
    found = f"{len(prompts)} prompts"
    if twice:
        found += f"; {twice} begin with BOS twice (the template writes one, and so does the tokenizer)"
    if uncalled:
        found += f"; {uncalled} do not end with {asks!r} (the template's generation prompt)"
    return Finding(name, found, not (twice or uncalled))


def stops_on_every_eos(trainer: PPOTrainer) -> Finding:
    """Sampling stops on all tokens with which tokenizer and base end a completion (Llama 3 has two)."""
    shared, tokenizer, stops = trainer.shared, trainer.tokenizer, trainer.sampling.eos
    ends = [i for i in eos_ids(tokenizer, shared.base.generation_config) if i < shared.vocab_size]
    found = f"completions end with the token ids {ends}"
    if missing := sorted(set(ends) - set(stops)):
        found += f", sampling goes on after {missing}"
    return Finding("sampling stops on every EOS token", found, not missing)


# ----------------------------------------------------------------------------------- what the model itself says


@dataclass
class RowLogprobs:
    """The first actions of one completion: (n,) ids, and (n, V) log-probs by the model's own forward without padding."""

    row: int  # of the episodes
    actions: Tensor
    logprobs: Tensor

    def of_actions(self) -> Tensor:
        """(n,) log-probs of the actions."""
        return self.logprobs.gather(-1, self.actions.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def plain_logprobs(trainer: PPOTrainer, role: str | None, episodes: Episodes, row: int) -> RowLogprobs:
    """The log-probs of a row's first actions under a role, with the sampling's temperature and minimum length."""
    shared, sampling = trainer.shared, trainer.sampling
    start = int(episodes.starts[row])
    count = min(int(episodes.counts[row]), ACTIONS)
    ids = episodes.input_ids[row : row + 1, : start + count]
    precision = torch.autocast(ids.device.type, shared.autocast, enabled=shared.autocast is not None)
    with shared.use(role), precision:
        logits = shared.base(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].float()
    logits = logits / sampling.temperature
    if sampling.min_new_tokens:
        logits[: sampling.min_new_tokens, list(sampling.eos)] = float("-inf")
    return RowLogprobs(row, ids[0, start:], logits.log_softmax(-1))


def _some(episodes: Episodes) -> list[int]:
    """The first rows, as many as have TOKENS actions together."""
    ends = episodes.counts.clamp(max=ACTIONS).cumsum(0)
    return list(range(int((ends < TOKENS).sum()) + 1))[: len(episodes)]


def logprobs_of_the_model(trainer: PPOTrainer, episodes: Episodes) -> Finding:
    """Old and reference log-probs are those of the model's own forward on the row alone."""
    name = "log-probs are those of the model's own forward"
    row = int(episodes.counts.argmin())  # padded the most
    differences = {}
    for role, ours in (("policy", episodes.old_logprobs), (trainer.sampler.reference, episodes.ref_logprobs)):
        plain = plain_logprobs(trainer, role, episodes, row).of_actions()
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
        plain = plain_logprobs(trainer, "policy", episodes, row)
        p, surprise = plain.logprobs.exp().double(), -plain.logprobs.double()
        surprise = surprise.where(p > 0, 0.0).clamp(max=SURPRISE)
        entropy = (p * surprise).sum(-1)
        drawn = plain.actions.unsqueeze(-1)
        sums[0, 0] += (surprise.gather(-1, drawn).squeeze(-1) - entropy).sum()
        sums[0, 1] += (p * (surprise - entropy.unsqueeze(-1)).square()).sum()
        above = (p * (p > p.gather(-1, drawn))).sum(
            -1
        )  # mass of the tokens that are more likely than the drawn one
        ordered = p.sort(descending=True).values
        first = torch.ones_like(ordered, dtype=torch.bool)  # of equally likely tokens, which count alike
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        before = (ordered.cumsum(-1) - ordered).where(first, 0.0).cummax(-1).values
        for i, tail in enumerate(TAILS, 1):
            sums[i, 0] += (above >= tail).sum()
            sums[i, 1] += (ordered * (before >= tail)).sum()
    (excess, variance), *tails = all_reduce(sums).tolist()
    if copies := _copied(trainer, episodes):
        return Finding(name, copies, False)
    deviations = excess / math.sqrt(max(variance, 1.0))
    found = f"log-probs are {-deviations:+.1f} standard deviations from their mean"
    # Rare tokens have a large surprise, and its sum no normal distribution: Bernstein's inequality, once in a million.
    sharp = deviations < -DEVIATIONS
    flat = excess > 0 and excess**2 > 28 * (variance + SURPRISE * excess / 3)
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
    """Whether a count so far from its mean has a probability below 1e-6 (Chernoff's bound, independent events)."""
    if expected == 0:
        return False
    exponent = count - expected - (count * math.log(count / expected) if count else 0.0)
    return exponent < math.log(1e-6)


def _copied(trainer: PPOTrainer, episodes: Episodes) -> str:
    """A message if all completions of each prompt are the same, more often than chance explains; else ""."""
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
    with _not_zero(head) as new:
        if new:  # all its values are 0, wherever they are read: look at those of another
            episodes = episodes.take([row])
            trainer.logprobs_and_values(episodes)
            row = 0
        for t in {0, count - 1} if count else ():
            ids = episodes.input_ids[row : row + 1, : start + t]
            value = float(head.float() @ shared.hidden("critic", ids)[0, -1].float())
            value = value * trainer.moments.std + trainer.moments.mean
            largest = max(largest, abs(value - float(episodes.values[row, t])) / max(1.0, abs(value)))
    found = f"they differ by up to {largest:.2g} from the head's output on what stands before the action"
    spread = float(episodes.values[episodes.mask].std()) if int(episodes.mask.sum()) > 1 else 0.0
    return Finding(name, found, largest <= tolerance(shared) * max(1.0, spread))


@contextmanager
def _not_zero(head: Tensor) -> Iterator[bool]:
    """A head of zeros is one of equal entries within the block, with values of order 1. Yields whether it is."""
    new = not head.any()
    if new:
        head.data.fill_(head.numel() ** -0.5)
    try:
        yield new
    finally:
        if new:
            head.data.zero_()


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
