"""AdamW of the learning adapters, in the kinds that transformers names; bitsandbytes is imported where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipeline.ppo.config import PPOConfig


def adamw(args: PPOConfig, groups: Sequence[tuple[list[nn.Parameter], float]]) -> torch.optim.Optimizer:
    """The optimizer of `args.optim` for groups of parameters, each with its learning rate.

    Raises:
        ModuleNotFoundError: for an 8-bit or paged one without bitsandbytes.
    """
    kinds = {
        "adamw_8bit": "AdamW8bit",
        "paged_adamw_32bit": "PagedAdamW32bit",
        "paged_adamw_8bit": "PagedAdamW8bit",
    }
    make: Any = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True} if args.optim == "adamw_torch_fused" else {}
    if args.optim in kinds:
        import bitsandbytes

        make = getattr(bitsandbytes.optim, kinds[args.optim])
    return make(
        [{"params": parameters, "lr": rate} for parameters, rate in groups],
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **options,
    )
