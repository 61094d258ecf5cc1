"""Samples the chunks of an update: completions, their scores, and the reference's log-probs.

A chunk is the unit of sampling and scoring. The split of an update into chunks depends on the job, and not on a worker's memory.
No sum adds numbers from several chunks, so rounding does not depend on how chunks are distributed. The trainer's process and
rollout workers run the same code, each with its own base and frozen roles. All processes therefore compute bit-identical chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.models.adapters import SharedBase
from pipeline.models.fsdp_sync import all_reduce, world
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Episodes, collate
from pipeline.ppo.teacher import Teacher
from pipeline.scoring import forward
from pipeline.scoring.rewards import Reward, Samples, raw_scores
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.memory import GIB, decoding_rows
from pipeline.writing.rows import Completion, Decoder, Sampling, seed_of

Key = tuple[int, int, int]  # update, rank, and number among the rank's chunks of that update


@dataclass(frozen=True)
class Chunk:
    """A subset of one trainer's prompts in an update. One process samples all completions to these prompts."""

    update: int
    rank: int  # rank of the trainer that learns from the chunk
    number: int
    version: int  # version of the policy that samples the chunk: its number of updates
    rows: list[int]  # indices of the chunk's completions in the rank's share
    prompt_ids: list[list[int]]  # token ids of each prompt
    data: list[str]  # JSON text of each prompt's data row
    episodes: list[int]  # each completion's number in the run, which determines its seed; grouped by prompt

    @property
    def key(self) -> Key:
        return (self.update, self.rank, self.number)

    @property
    def generations(self) -> int:  # completions per prompt
        return len(self.episodes) // len(self.prompt_ids)

    @property
    def prompts(self) -> list[list[int]]:  # the prompt of each completion
        return [ids for ids in self.prompt_ids for _ in range(self.generations)]


@dataclass
class Sampled:
    """A sampled chunk. `raw` and `ref_logprobs` are None until they are computed."""

    key: Key
    version: int  # version of the policy that sampled the chunk
    digest: str  # digest of the sampler's parameters
    completions: list[Completion]
    greedy: Sampled | None = None  # one greedy completion per prompt, for remax
    raw: dict[str, list[float]] | None = None  # {name of a reward: its scores of the completions}
    ref_logprobs: Tensor | None = None  # (completions, actions) log-probs of the reference, on the CPU


def split_into_chunks(lengths: Sequence[int], rows: int, generations: int) -> list[list[int]]:
    """Splits prompts into chunks, so that a chunk's prompts have similar lengths. Returns indices into `lengths` (tokens).

    Args:
        rows: maximum number of completions in a chunk. All completions to one prompt are in one chunk.
        generations: completions to each prompt.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    size = max(1, rows // generations)
    return [sorted(order[start : start + size]) for start in range(0, len(order), size)]


@dataclass(frozen=True)
class Roles:
    """The models of a PPO run: roles on one frozen base, and rewards.

    Args:
        shared: has the role `policy`. `shared` has the role `critic`, with a head, if the estimator reads values. If `shared` has
            no role `reference`, the bare base is the reference.
        rewards: the weighted sum of their scores is a completion's score.
        critic_reward: the reward whose adapter and head the critic starts from. Without this reward, the critic's values start at
            0.
        teacher: rates every token of the completions (`teacher_coef`).
    """

    shared: SharedBase
    rewards: Sequence[Reward]
    critic_reward: Reward | None = None
    teacher: Teacher | None = None


class Sampler:
    """Samples and scores chunks with the roles and rewards of a run.

    Args:
        tokenizer: decodes completions for Python rewards. Rows are padded with the tokenizer's pad token.
        decoder: generates the completions. Without a decoder, the base itself generates.
    """

    def __init__(self, roles: Roles, tokenizer: Any, args: PPOConfig, decoder: Decoder | None = None) -> None:
        self.shared, self.rewards = roles.shared, roles.rewards
        self.critic_reward, self.teacher = roles.critic_reward, roles.teacher
        self.tokenizer, self.args, shared = tokenizer, args, roles.shared
        self.reference = "reference" if "reference" in shared.roles else None  # None for the bare base
        self.sampling = Sampling.from_args(args, tokenizer)
        self.pad = tokenizer.pad_token_id or 0
        self.decoder = decoder or SlotDecoder(shared, pad=self.pad)
        # number of completions decoded at once, or None for a full chunk
        self.rows = args.local_rollout_forward_batch_size

    def fit_to_memory(self, chunk: int, longest: int) -> None:
        """Sets from the free memory how many completions of a chunk are decoded at once, unless the job sets the number.

        Every trainer calls this method. All trainers use the smallest number of any trainer, because rounding depends on this
        number.

        Args:
            longest: tokens of the longest prompt.
        """
        longest += self.args.response_length
        if self.rows is not None or not isinstance(self.decoder, SlotDecoder):
            return
        rows, memory = decoding_rows(self.shared, chunk, longest)
        self.rows = int(all_reduce(torch.tensor(rows, device=self.shared.device), dist.ReduceOp.MIN))
        if self.rows < chunk and world()[0] == 0:
            print(
                f"decoding {self.rows} of a chunk's {chunk} completions at once, because more rows of {longest} tokens do not "
                f"fit into half of the free memory ({memory / GIB:.1f} GiB)",
                flush=True,
            )

    def sample_and_score(self, chunk: Chunk, digest: str) -> Sampled:
        """Samples and scores a chunk. Adds the reference's log-probs unless training updates the reference (`sync_ref_model`)."""
        sampled = self.sample(chunk, digest)
        self.score(chunk, sampled)
        if not self.args.sync_ref_model:
            self.reference_logprobs(chunk, sampled)
        return sampled

    def sample(self, chunk: Chunk, digest: str = "") -> Sampled:
        """Samples the chunk's completions, and also greedy completions if the estimator reads greedy scores.

        If the policy has changed, callers must call `decoder.changed` first.
        """
        if isinstance(self.decoder, SlotDecoder):
            self.decoder.max_rows = self.rows
        completions = self.decoder.generate("policy", chunk.prompts, chunk.episodes, self.sampling)
        greedy = None
        if self.args.estimator.needs_greedy:
            greedy_sampling, numbers = replace(self.sampling, temperature=0.0), range(len(chunk.prompt_ids))
            greedy_completions = self.decoder.generate("policy", chunk.prompt_ids, numbers, greedy_sampling)
            greedy = Sampled(chunk.key, chunk.version, digest, greedy_completions)
        return Sampled(chunk.key, chunk.version, digest, completions, greedy)

    def score(self, chunk: Chunk, sampled: Sampled) -> None:
        """Fills `raw` for the completions and the greedy completions."""
        for result in filter(None, (sampled, sampled.greedy)):
            result.raw = raw_scores(self.rewards, self.samples(chunk, result.completions))

    def samples(self, chunk: Chunk, completions: Sequence[Completion]) -> Samples:
        """Returns completions to the chunk's prompts as samples for rewards. Each prompt has the same number of completions.

        The greedy completion to a prompt has the seed of the prompt's first episode.
        """
        per_prompt = len(completions) // len(chunk.prompt_ids)
        prompts = [ids for ids in chunk.prompt_ids for _ in range(per_prompt)]
        rows = [json.loads(row) for row in chunk.data for _ in range(per_prompt)]
        episodes = chunk.episodes[:: chunk.generations // per_prompt]
        seeds = [seed_of(self.args.seed, episode) for episode in episodes]
        return Samples.of(prompts, completions, rows, self.tokenizer, seeds, per_prompt)

    def reference_logprobs(self, chunk: Chunk, sampled: Sampled) -> None:
        """Fills `ref_logprobs` of the chunk."""
        episodes = self.episodes(chunk, sampled)
        self.fill_logprobs(self.reference, episodes, episodes.ref_logprobs)
        sampled.ref_logprobs = episodes.ref_logprobs.cpu()

    @torch.no_grad()
    def fill_logprobs(self, role: str | None, episodes: Episodes, logprobs: Tensor) -> None:
        """Fills `logprobs` (B, R) with a role's log-probs of the episodes, computed by the code of the training forward."""
        for rows, batch in self.parts_of(episodes):
            logprobs[rows, : batch.mask.shape[1]] = self.logprobs(role, batch)[0]

    def parts_of(self, episodes: Episodes) -> Iterator[tuple[list[int], Episodes]]:
        """Yields (row indices, episodes) of each micro-batch of a forward pass without gradients."""
        return forward.parts_of(self.shared, episodes, tokens=self.args.max_tokens_per_micro_batch)

    def episodes(self, chunk: Chunk, sampled: Sampled) -> Episodes:
        """Returns the chunk's padded completions as episodes. Tensors that are computed later are filled with 0."""
        indices = range(len(chunk.episodes))
        return collate(chunk.prompts, sampled.completions, indices, self.pad, self.shared.device)

    def logprobs(
        self, role: str | None, episodes: Episodes, entropy: bool = False, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns a role's log-probs (B, R) of the actions under the sampling settings, and entropies (B, R) if requested.

        Args:
            role: a role, or None for the bare base.
            states: the role's hidden states from `forward.action_states`. If None, this method computes the hidden states.
        """
        states = forward.action_states(self.shared, role, episodes) if states is None else states
        sampling = (self.sampling.temperature, self.sampling.eos, self.sampling.min_new_tokens)
        return self.shared.logprobs(
            role, episodes.input_ids, episodes.starts, episodes.mask, *sampling, entropy, states
        )
