"""`Learner`: the part of a PPO trainer that the self-checks read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pipeline.models.adapters import SharedBase
from pipeline.ppo.config import PPOConfig, RolloutConfig
from pipeline.ppo.episodes import Episodes
from pipeline.ppo.losses import RunningMoments
from pipeline.ppo.rewards import Reward
from pipeline.ppo.sampler import Sampler


class Learner(Protocol):
    """A trainer as the self-checks see it; `PPOTrainer` documents the attributes."""

    args: PPOConfig
    rollout_config: RolloutConfig
    shared: SharedBase
    tokenizer: Any
    sampler: Sampler
    rewards: list[Reward]
    prompts: Sequence[dict[str, Any]]
    draws: Callable[[int], Any] | None
    prompts_per_epoch: int
    prompts_per_update: int
    roles: list[str]  # roles that learn
    optimizer: torch.optim.Optimizer
    moments: RunningMoments
    kl_coef: float
    workers: int
    skipped_steps: int

    def logprobs_and_values(self, episodes: Episodes) -> None: ...

    def rewards_and_advantages(self, episodes: Episodes) -> None: ...
