"""Checks invariants of the first rollout and update of every run, and recomputes their results with independent code.

Most faults of a PPO implementation break an invariant long before a reward curve shows the fault. Examples are active dropout, a
temperature in sampler or trainer only, a shifted mask and the wrong adapter. If sampler and trainer have the same fault, no
invariant breaks. Therefore, log-probs, values and scores are also compared with plain forwards of single rows, and rewards and
advantages with definitions.py. Only the first tokens of some completions go through the model, so the checks take little time
compared with an update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipeline.checks import CheckResult
from pipeline.models.adapters import SharedBase
from pipeline.models.fsdp_sync import all_reduce, gather
from pipeline.models.template import user_header_and_generation_prompt
from pipeline.models.tokenizer import eos_ids
from pipeline.ppo.episodes import Episodes
from pipeline.ppo.rollouts import Versions
from pipeline.ppo.sampler import Chunk, Sampled
from pipeline.ppo.selfcheck import roles
from pipeline.ppo.selfcheck.definitions import (
    MAX_ACTIONS,
    Learner,
    advantages_by_definition,
    logprob_tolerance,
    losses_pull_the_right_way,
    root_mean_square,
)
from pipeline.scoring.rewards import AdapterReward

MAX_TOKENS = 1024  # total number of checked actions
CHECKED_COMPLETIONS = 4  # number of checked completions of rollout workers per update
TAILS = (0.8, 0.9, 0.95, 0.99)  # a tail is all tokens except the most likely ones with this total mass
Z_LIMIT = 5.0  # tolerance in standard deviations below the mean; exceeded once in two million correct runs
MAX_SURPRISAL = 20.0  # upper limit of a surprisal, in nats


def check_first_rollout(trainer: Learner, episodes: Episodes) -> list[CheckResult]:
    """Returns the results of all checks of the first update's episodes. Every rank calls this function."""
    return [
        reference_is_policy(trainer, episodes),
        sampler_agrees(trainer, episodes),
        ends_inside(trainer, episodes),
        only_roles_learn(trainer),
        each_episode_once(trainer, episodes),
        prompts_as_templated(trainer, episodes),
        stops_on_every_eos(trainer),
        logprobs_of_the_model(trainer, episodes),
        drawn_from_the_policy(trainer, episodes),
        values_before_actions(trainer, episodes),
        scores_at_the_end(trainer, episodes),
        advantages_by_definition(trainer, episodes),
        losses_pull_the_right_way(trainer, episodes),
        *roles.check_roles(trainer, episodes),
    ]


def first_ratio(shared: SharedBase, rms: float) -> CheckResult:
    """Checks that every ratio is 1, up to rounding, before the first optimizer step, when the policy *is* the old policy.

    Args:
        rms: root mean square of the log-ratio, over all workers.
    """
    message, holds = f"log-ratios are {rms:.2g} on average", rms <= logprob_tolerance(shared)
    if not holds:
        message += ". Old and new log-probs differ before any step: check for dropout, or another temperature, mask or adapter"
    return CheckResult("the first ratio is 1", message, holds)


def reference_is_policy(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks that the policy starts as a copy of the reference, so that their log-probs are equal and the KL is 0."""
    name = "KL to the reference is 0 before the first step"
    if not trainer.args.check_reference:
        return CheckResult(name, "skipped (check_reference: false)", None)
    rms = root_mean_square(episodes.old_logprobs - episodes.ref_logprobs, episodes.mask)
    message, holds = f"log-probs differ by {rms:.2g} nats", rms <= logprob_tolerance(trainer.shared)
    if not holds:
        message += ". The policy must start as a copy of the reference (the sft adapter); "
        message += "set check_reference=false if the policy starts differently"
    return CheckResult(name, message, holds)


def sampler_agrees(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks that sampler and trainer compute the same log-probs, and so use the same temperature, mask and adapter."""
    rms = root_mean_square(episodes.sampler_logprobs - episodes.old_logprobs, episodes.mask)
    holds = rms <= 3 * logprob_tolerance(trainer.shared)  # a different engine may use different kernels
    return CheckResult("sampler and trainer agree on log-probs", f"log-probs differ by {rms:.2g} nats", holds)


def check_rollout_workers(trainer: Learner, parts: Sequence[tuple[Chunk, Sampled]]) -> list[CheckResult]:
    """Checks the chunks that rollout workers sampled for an update. Returns the results."""
    versions = trainer.rollouts.versions
    assert versions
    complete = chunks_match_requests(versions, parts)
    return [complete, sampled_by_its_version(trainer, versions, parts)] if complete.holds else [complete]


def chunks_match_requests(versions: Versions, parts: Sequence[tuple[Chunk, Sampled]]) -> CheckResult:
    """Checks that each chunk is complete, is the requested one, and comes from a sampler with the requested policy version."""
    name = "rollout workers deliver the requested chunks"
    for chunk, sampled in parts:
        requested = (chunk.key, len(chunk.episodes), chunk.version, versions.digests[chunk.version])
        delivered = (sampled.key, len(sampled.completions), sampled.version, sampled.digest)
        if delivered != requested:
            fields = "(update, rank, number), completions, version and digest of the policy"
            return CheckResult(name, f"requested {requested}, got {delivered}: {fields}", False)
    return CheckResult(name, f"{len(parts)} chunks", True)


def sampled_by_its_version(
    trainer: Learner, versions: Versions, parts: Sequence[tuple[Chunk, Sampled]]
) -> CheckResult:
    """Checks that the log-probs of some completions in a random chunk equal the log-probs of the chunk's policy version.

    An engine may have the right parameters, but still sample from cached states of other parameters.
    """
    name = "rollout workers sample from the requested version"
    generator = np.random.default_rng([trainer.args.seed, trainer.update])
    chunk, sampled = parts[int(generator.integers(len(parts)))]
    episodes = trainer.sampler.episodes(chunk, sampled)
    subset = episodes.take(generator.permutation(len(episodes))[:CHECKED_COMPLETIONS].tolist())
    with versions.use(chunk.version), torch.no_grad():
        logprobs, _ = trainer.sampler.logprobs("policy", subset)
    difference = float((logprobs - subset.sampler_logprobs)[subset.mask].square().mean().sqrt())
    message = f"log-probs of version {chunk.version} differ by {difference:.2g} nats"
    holds = difference <= 3 * logprob_tolerance(trainer.shared)
    if not holds:
        message += f" on chunk {chunk.key}: the rollout worker sampled from "
        message += "other parameters than its own (a cache of another version)"
    return CheckResult(name, message, holds)


def ends_inside(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks that EOS is the last action of a completion that ended, and no other action is EOS."""
    mask, counts = episodes.mask, episodes.counts
    steps = torch.arange(mask.shape[1], device=mask.device)
    positions = (episodes.starts.unsqueeze(-1) + steps).clamp(max=episodes.input_ids.shape[1] - 1)
    ends = torch.tensor(trainer.sampler.sampling.eos, device=mask.device)
    is_end = torch.isin(episodes.input_ids.gather(1, positions), ends) & mask
    is_last = steps == (counts - 1).unsqueeze(-1)
    holds = (is_end == (is_last & episodes.ended.unsqueeze(-1))).all(-1)
    holds &= mask.sum(-1) == counts
    holds &= episodes.ended | (counts == trainer.sampler.sampling.max_new_tokens)
    message = (
        f"in {int(holds.sum())} of {len(episodes)} completions; {int(episodes.ended.sum())} ended with EOS"
    )
    return CheckResult("the end token is inside the mask, as the last action", message, bool(holds.all()))


def only_roles_learn(trainer: Learner) -> CheckResult:
    """Checks that exactly the learning roles are trainable, in fp32 and in the optimizer, and that dropout is off."""
    shared = trainer.shared
    role_ids = {id(p) for role in trainer.roles for p in shared.parameters_of(role)}
    trainable = [p for p in shared.parameters() if p.requires_grad]
    strays = len(role_ids ^ {id(p) for p in trainable})
    forgotten = len(role_ids ^ {id(p) for group in trainer.optimizer.param_groups for p in group["params"]})
    low = sum(p.dtype != torch.float32 for p in [*trainable, *shared.heads.parameters()])
    dropouts = sum(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in shared.modules())
    message = f"{sum(p.numel() for p in trainable):,} parameters learn ({', '.join(trainer.roles)})"
    if strays or forgotten or low or dropouts:
        message += f"; {strays} tensors are trainable or frozen by mistake, {low} are not fp32, {dropouts} dropouts are on, "
        message += f"{forgotten} are in the optimizer or in the roles, but not in both"
    return CheckResult("only adapters and heads learn", message, not (strays or forgotten or low or dropouts))


# ------------------------------------------------------------------------------------------------- after learning


Sums = dict[str, tuple[float, float]]  # role -> sum and sum of squares of its parameters


def sums_of(trainer: Learner) -> Sums:
    """Returns sum and sum of squares of each role's trainable parameters. Changed sums show that the parameters have changed."""
    sums = {}
    for role in trainer.roles:
        parameters = [parameter.detach() for parameter in trainer.shared.parameters_of(role)]
        total = sum(float(p.sum(dtype=torch.float64)) for p in parameters)
        sums[role] = (total, sum(float(p.double().square().sum()) for p in parameters))
    return sums


def ranks_learned_equally(trainer: Learner, before: Sums, metrics: dict[str, float]) -> CheckResult:
    """Checks after the first update that training has changed the adapters, and that they are equal on all workers.

    Args:
        before: result of `sums_of` before the update.
        metrics: result of `Learner.learn`.
    """
    after, trained = sums_of(trainer), trainer.roles
    rates = dict(zip(trained, (group["lr"] for group in trainer.optimizer.param_groups), strict=True))
    moving = [role for role in trained if rates[role] > 0 and metrics.get(f"grad_norm/{role}", 0.0) > 0]
    stuck = [role for role in moving if after[role] == before[role] and not trainer.skipped_steps]
    # The tolerance allows for the order of additions, which differs between types of GPUs.
    is_close = partial(np.allclose, rtol=1e-9, atol=1e-12)
    rank_sums: list[Sums] = gather(after)
    unequal = [role for role in trained if not all(is_close(sums[role], after[role]) for sums in rank_sums)]
    message = f"{', '.join(trained)}; workers: {trainer.workers}"
    if stuck:
        message += (
            f"; {', '.join(stuck)} got a gradient and did not change: the optimizer lacks its parameters"
        )
    if unequal:
        message += (
            f"; {', '.join(unequal)} differs between workers: gradients are not summed over all workers"
        )
    return CheckResult("adapters have changed, and are equal on all workers", message, not (stuck or unequal))


# ------------------------------------------------------------------------------------------- episodes and prompts


def each_episode_once(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks that every episode of the update is on one worker, with the prompt that the seed determines."""
    args, prompts, device = trainer.args, trainer.prompts, episodes.mask.device
    counts = all_reduce(torch.bincount(episodes.indices, minlength=args.batch_size))
    # By definition, each epoch has its own seeded permutation of the prompts.
    size, order = prompts.per_epoch, []
    for epoch in range(-(-args.prompts_per_update // size)):
        indices = range(size) if prompts.draws is None else prompts.draws(epoch)
        order += [int(indices[i]) for i in np.random.default_rng([args.seed, epoch]).permutation(size)]
    mismatches = torch.zeros((), device=device)
    for index, prompt in zip(episodes.indices.tolist(), _prompts(episodes), strict=True):
        expected = prompts.rows[order[index // args.num_generations]]["input_ids"]
        mismatches += prompt != [int(i) for i in expected]
    wrong_prompts = int(all_reduce(mismatches))
    missing, duplicates = int((counts == 0).sum()), int((counts > 1).sum())
    message = f"{args.batch_size} episodes, workers: {trainer.workers}"
    if missing or duplicates or wrong_prompts:
        message += f": {missing} are on no worker, {duplicates} on several workers, {wrong_prompts} have "
        message += "another prompt than the seed determines"
    return CheckResult("each episode is on one worker", message, not (missing or duplicates or wrong_prompts))


def _prompts(episodes: Episodes) -> list[list[int]]:
    """Returns the token ids of each row's prompt."""
    starts = episodes.starts.tolist()
    return [ids[:start] for ids, start in zip(episodes.input_ids.tolist(), starts, strict=True)]


def prompts_as_templated(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks that prompts begin with at most one BOS, and that chats end with the template's generation prompt."""
    tokenizer, prompts = trainer.sampler.tokenizer, _prompts(episodes)
    bos = getattr(tokenizer, "bos_token_id", None)
    double_bos = sum(bos is not None and ids[:2] == [bos, bos] for ids in prompts)
    header, suffix = user_header_and_generation_prompt(tokenizer)
    texts = [tokenizer.decode(ids) for ids in prompts] if header and suffix else []
    chats = [text for text in texts if header in text]
    incomplete = len(chats) * all(not text.rstrip().endswith(suffix) for text in chats)
    message = f"{len(prompts)} prompts"
    if double_bos:
        message += f"; {double_bos} begin with BOS twice (both the template and the tokenizer add one)"
    if incomplete:
        message += f"; {incomplete} do not end with {suffix!r} (the template's generation prompt)"
    name = "prompts have one BOS and end with the generation prompt"
    return CheckResult(name, message, not (double_bos or incomplete))


def stops_on_every_eos(trainer: Learner) -> CheckResult:
    """Checks that sampling stops on every EOS token of tokenizer and base. Llama 3 has two."""
    ends = eos_ids(trainer.sampler.tokenizer)
    message = f"completions end with the token ids {ends}"
    if missing := sorted(set(ends) - set(trainer.sampler.sampling.eos)):
        message += f", but sampling continues after {missing}"
    return CheckResult("sampling stops on every EOS token", message, not missing)


# ------------------------------------------------------------------------------------- the model on single rows


@torch.no_grad()
def plain_logprobs(trainer: Learner, role: str | None, episodes: Episodes, row: int) -> tuple[Tensor, Tensor]:
    """Returns a row's first n actions (n, 1), and a role's log-probs (n, V) from the model's own forward without padding.

    The log-probs are computed with the sampler's temperature and minimum length.
    """
    shared, sampling = trainer.shared, trainer.sampler.sampling
    start = int(episodes.starts[row])
    count = min(int(episodes.counts[row]), MAX_ACTIONS)
    ids = episodes.input_ids[row : row + 1, : start + count]
    precision = torch.autocast(ids.device.type, shared.autocast, enabled=shared.autocast is not None)
    with shared.use(role), precision:
        logits = shared.base(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].float()
    logits = logits / sampling.temperature
    if sampling.min_new_tokens:
        logits[: sampling.min_new_tokens, list(sampling.eos)] = float("-inf")
    return ids[0, start:].unsqueeze(-1), logits.log_softmax(-1)


def logprobs_of_the_model(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Compares old and reference log-probs with the model's own forward of a single row."""
    row = int(episodes.counts.argmin())  # the row with the most padding
    differences = {}
    for role, ours in (("policy", episodes.old_logprobs), (trainer.sampler.reference, episodes.ref_logprobs)):
        actions, logprobs = plain_logprobs(trainer, role, episodes, row)
        expected = logprobs.gather(-1, actions).squeeze(-1)
        difference = (ours[row, : len(expected)] - expected).square().mean().sqrt() if len(expected) else 0.0
        differences[role or "base"] = float(difference)
    message = "; ".join(f"{role} differs by {value:.2g} nats" for role, value in differences.items())
    holds = all(value <= logprob_tolerance(trainer.shared) for value in differences.values())
    if not holds:
        message += ". Padding, position, temperature, minimum length or adapter differ from a plain forward"
    return CheckResult("log-probs are those of the model's own forward", message, holds)


def drawn_from_the_policy(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks that completions are samples from the policy's full distribution, neither sharper (top-k, top-p) nor flatter.

    For a token x drawn from p, the mean of -log p(x) is the entropy H(p). The least likely tokens of p are drawn as often as
    their probability mass implies. The sum of surprisals and the number of least likely tokens are compared with their expected
    values.
    """
    name = "completions are drawn from the policy's whole distribution"
    sums = torch.zeros(1 + len(TAILS), 2, dtype=torch.float64, device=episodes.mask.device)
    total_actions = episodes.counts.clamp(max=MAX_ACTIONS).cumsum(0)
    for row in range(min(int((total_actions < MAX_TOKENS).sum()) + 1, len(episodes))):
        tokens, logprobs = plain_logprobs(trainer, "policy", episodes, row)
        p, surprisal = logprobs.exp().double(), -logprobs.double()
        surprisal = surprisal.where(p > 0, 0.0).clamp(max=MAX_SURPRISAL)
        entropy = (p * surprisal).sum(-1)
        sums[0, 0] += (surprisal.gather(-1, tokens).squeeze(-1) - entropy).sum()
        sums[0, 1] += (p * (surprisal - entropy.unsqueeze(-1)).square()).sum()
        mass_above = (p * (p > p.gather(-1, tokens))).sum(-1)  # total probability of more likely tokens
        ordered = p.sort(descending=True).values
        # Is True at the first of several equally likely tokens, because the check treats equally likely tokens as one token.
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        mass_before = (ordered.cumsum(-1) - ordered).where(is_first, 0.0).cummax(-1).values
        for i, tail in enumerate(TAILS, 1):
            sums[i, 0] += (mass_above >= tail).sum()
            sums[i, 1] += (ordered * (mass_before >= tail)).sum()
    (excess, variance), *tails = all_reduce(sums).tolist()
    if copies := _copied(trainer, episodes):
        return CheckResult(name, copies, False)
    deviations = excess / math.sqrt(max(variance, 1.0))
    message = f"log-probs are {-deviations:+.1f} standard deviations from their expected mean"
    # The sum of surprisals is not normally distributed, because rare tokens have a large surprisal. A correct run exceeds
    # Bernstein's bound with a probability of 1e-6.
    too_sharp = deviations < -Z_LIMIT
    too_flat = excess > 0 and excess**2 > 28 * (variance + MAX_SURPRISAL * excess / 3)
    for tail, (count, expected) in zip(TAILS, tails, strict=True):
        if _improbable(count, expected):
            message += f"; the least likely {1 - tail:.0%} of tokens are drawn {count:.0f} times instead of {expected:.0f}"
            too_sharp, too_flat = too_sharp or count < expected, too_flat or count > expected
    if too_sharp:
        message += ": top-k, top-p or a lower temperature is on"
    elif too_flat:
        message += ": check for a different temperature or a different policy"
    return CheckResult(name, message, not (too_sharp or too_flat))


def _improbable(count: float, expected: float) -> bool:
    """Returns True if the probability of such a deviation from `expected` is below 1e-6 (Chernoff's bound)."""
    if expected == 0:
        return False
    exponent = count - expected - (count * math.log(count / expected) if count else 0.0)
    return exponent < math.log(1e-6)


def _copied(trainer: Learner, episodes: Episodes) -> str:
    """Returns a message if all completions of each prompt are equal although this is improbable, or else ""."""
    n = trainer.args.num_generations
    ids, starts, counts = (x.tolist() for x in (episodes.input_ids, episodes.starts, episodes.counts))
    completions = [
        tuple(row[start : start + count]) for row, start, count in zip(ids, starts, counts, strict=True)
    ]
    groups = [set(completions[i : i + n]) for i in range(0, len(completions), n)]
    surprisal = -float(episodes.old_logprobs[::n][episodes.mask[::n]].sum())
    if n == 1 or any(len(group) > 1 for group in groups) or surprisal < 20.0:
        return ""
    return f"the {n} completions of each prompt are the same: they are sampled with the same random numbers, or greedily"


@torch.no_grad()
def values_before_actions(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Compares two of the critic's values with the head's outputs on the prompt, and on the tokens before the last action."""
    name = "values are read before each action"
    if not trainer.args.uses_critic:
        return CheckResult(name, f"no critic ({trainer.args.advantage_estimator})", None)
    shared, error = trainer.shared, 0.0
    row = int(episodes.counts.argmin())
    start, count = int(episodes.starts[row]), int(episodes.counts[row])
    head = shared.parameters_of("critic")[-1]
    is_new = not head.any()
    if is_new:  # a new head outputs only 0, so the check uses other weights
        head.data.fill_(head.numel() ** -0.5)
        episodes = episodes.take([row])
        trainer.logprobs_and_values(episodes)
        row = 0
    for t in {0, count - 1} if count else ():
        ids = episodes.input_ids[row : row + 1, : start + t]
        value = float(head.float() @ shared.hidden("critic", ids)[0, -1].float())
        value = trainer.moments.raw(value)
        error = max(error, abs(value - float(episodes.values[row, t])) / max(1.0, abs(value)))
    if is_new:
        head.data.zero_()
    message = f"values differ by up to {error:.2g} from the head's output on the tokens before the action"
    spread = float(episodes.values[episodes.mask].std()) if int(episodes.mask.sum()) > 1 else 0.0
    return CheckResult(name, message, error <= logprob_tolerance(shared) * max(1.0, spread))


@torch.no_grad()
def scores_at_the_end(trainer: Learner, episodes: Episodes) -> CheckResult:
    """Checks the scores of two rows against the normalized, weighted, clipped and penalized outputs of the heads."""
    name, args = "scores are read at the last token of the completion", trainer.args
    rewards = [reward for reward in trainer.sampler.rewards if isinstance(reward, AdapterReward)]
    if len(rewards) < len(trainer.sampler.rewards):
        return CheckResult(name, "not checked: one of the rewards is not an adapter on the base", None)
    shared, error, unit = trainer.shared, 0.0, 0.0
    for row in {int(episodes.counts.argmin()), int(episodes.counts.argmax())}:
        ids = episodes.input_ids[row : row + 1, : int(episodes.starts[row] + episodes.counts[row])]
        total = 0.0
        for reward in rewards:
            hidden = shared.hidden(reward.role, ids)[0, -1].float()
            score = float(shared.parameters_of(reward.role)[-1].float() @ hidden)
            score = (score - reward.mean) / reward.std if args.normalize_rewards else score
            total += reward.weight * score
            unit = max(unit, abs(reward.weight) * (1.0 if args.normalize_rewards else reward.std))
        if args.reward_clip is not None:
            total = min(max(total, -args.reward_clip), args.reward_clip)
        if not episodes.ended[row]:
            total -= args.missing_eos_penalty or 0.0
        error = max(error, abs(total - float(episodes.scores[row])))
    message = f"scores differ by up to {error:.2g} from the head's output on the completion alone"
    return CheckResult(name, message, error <= logprob_tolerance(shared) * max(1.0, unit))
