"""Makes the optimizer of a PPO run and its learning rate schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from pipeline.models.adapters import SharedBase
from pipeline.ppo.config import PPOConfig


def optimizer_and_schedule(
    args: PPOConfig, shared: SharedBase, roles: Sequence[str], updates: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Returns the AdamW optimizer for the trained roles, and the schedule of their learning rates over a run's updates."""
    critic_rate = args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate
    rates = {"policy": args.learning_rate, "critic": critic_rate}
    # The policy's schedule starts after the critic's warmup. The critic's schedule starts with the run.
    first_updates = {"policy": args.critic_warmup_steps, "critic": 0}
    optimizer = make_adamw(args, [(shared.parameters_of(role), rates[role]) for role in roles])
    factors = [learning_rate_factors(args, rates[role], first_updates[role], updates) for role in roles]
    return optimizer, LambdaLR(optimizer, factors)


def learning_rate_factors(
    args: PPOConfig, learning_rate: float, first_update: int, total: int
) -> Callable[[int], float]:
    """Returns a function from an update, counted from 0, to the factor of a role's learning rate.

    The factor is 0 before the update `first_update`, and then follows transformers' schedule until `total`. In transformers, the
    first update of a warmup has a rate of 0. In this schedule, the n-th of w warmup updates has n / (w + 1) of the full rate.
    """
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=learning_rate)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, total - first_update)
    schedule = scheduler.lr_lambdas[0]

    def factor(update: int) -> float:
        step = update - first_update
        if step < 0:
            return 0.0
        return (step + 1) / (args.warmup_steps + 1) if step < args.warmup_steps else schedule(step)

    return factor


def make_adamw(args: PPOConfig, groups: Sequence[tuple[list[nn.Parameter], float]]) -> torch.optim.Optimizer:
    """Returns the AdamW optimizer of the kind `args.optim`, for groups of parameters, each with its own learning rate."""
    optimizer_class: Any = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True} if args.optim == "adamw_torch_fused" else {}
    if not args.optim.startswith("adamw_torch"):
        import bitsandbytes

        kinds = {
            "adamw_8bit": "AdamW8bit",
            "paged_adamw_32bit": "PagedAdamW32bit",
            "paged_adamw_8bit": "PagedAdamW8bit",
        }
        optimizer_class = getattr(bitsandbytes.optim, kinds[args.optim])
    return optimizer_class(
        [{"params": parameters, "lr": rate} for parameters, rate in groups],
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **options,
    )
