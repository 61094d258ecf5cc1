"""Completions by vLLM, beside the base on the same device: `rollout.engine: vllm`. Needs the extra `vllm`.

It holds a second copy of the base, and pays where decoding is most of the time: large models, long completions. Only
adapters are sent to it; in ppo that of the policy, before each rollout.

vLLM uses other kernels than the trainer, so its log-probs differ slightly. Old log-probs are the trainer's all the same
(the first ratio stays 1), and functional.off_policy_weights corrects for the difference. A completion is a function of
seed, episode, prompt and policy here too, up to rounding: vLLM's sums depend on the batch that a row is in.
"""

from __future__ import annotations

import copy
import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.models.adapters import SharedBase
from pipeline.ppo.engine import Completion, Sampling

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


class VllmEngine:
    """An `Engine` (engine.py) that decodes in vLLM, in a process of its own.

    Args:
        shared: has the role that samples.
        model: folder or hub id of the base, for vLLM to load.
        folder: adapters are handed over in it; removed on `close`.
        longest: tokens of the longest prompt and its completion together.
        roles: those that it may sample from, the first one until `of` names another; None: the bare base.
        options: further arguments of vllm.LLM: revision, dtype, quantization, gpu_memory_utilization, ...

    Raises:
        ValueError: when vLLM cannot run the adapter: DoRA, or a rank that is too large.
    """

    def __init__(
        self,
        shared: SharedBase,
        model: str,
        folder: str | Path,
        longest: int,
        roles: Sequence[str | None] = ("policy",),
        **options: Any,
    ) -> None:
        configs = [shared.configs[role] for role in roles if role]
        if any(config.use_dora for config in configs):
            raise ValueError(
                "rollout.engine: vLLM cannot run a DoRA adapter; train one with lora.use_dora=false"
            )
        self.shared, self.role = shared, roles[0]
        self.folder, self.synced, self.numbers = Path(folder), 0, itertools.count(1)
        ranks = [rank for config in configs for rank in (config.r, *config.rank_pattern.values())]
        self.llm = start_llm(
            model,
            shared.device,
            longest,
            max(ranks, default=0),
            max_loras=1,
            max_logprobs=1,
            logprobs_mode="processed_logprobs",  # after the temperature, like the trainer's
            **options,
        )

    def of(self, role: str | None) -> VllmEngine:
        """An engine that decodes in the same process, from another of its roles as that is now."""
        other = copy.copy(self)
        other.role, other.synced = role, 0
        other.sync()
        return other

    def sync(self) -> None:
        """Hand the adapter over under a new number: vLLM caches keys and values of prompts by that number."""
        if self.role is None:
            return
        before, self.synced = self.synced, next(self.numbers)
        self.shared.save(self.role, self.folder / str(self.synced))
        if before:
            shutil.rmtree(self.folder / str(before), ignore_errors=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], episodes: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        name = str(self.synced)
        adapter = LoRARequest(name, self.synced, str(self.folder / name)) if self.role else None
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                min_tokens=sampling.min_new_tokens,  # also bars the model's own eos, which is one of ours
                stop_token_ids=list(sampling.eos),
                ignore_eos=True,  # stop at the ids above and at no others
                seed=seed_of(sampling.seed, episode),
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for episode in episodes
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, lora_request=adapter, use_tqdm=False)
        return [completion_of(output.outputs[0]) for output in outputs]

    def close(self) -> None:
        """End vLLM's process, which frees its memory.

        By a private attribute: vLLM 0.30 has no public way. Remove when it has one:
        https://github.com/vllm-project/vllm/pull/36283.
        """
        self.llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_llm(model: str, device: torch.device | str, longest: int, rank: int, **options: Any) -> Any:
    """A vllm.LLM, in a process of its own.

    Args:
        model: folder or hub id of the base.
        longest: tokens of the longest prompt and its completion together.
        rank: the largest of its adapters; 0: it takes none.
        options: further arguments of vllm.LLM.

    Raises:
        ValueError: for a rank that is too large.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading a base has left: vLLM counts it as taken
    with own_device(device, options.get("tensor_parallel_size", 1)):
        return LLM(
            model,
            enable_lora=rank > 0,
            max_lora_rank=accepted_rank(rank or 1),
            max_model_len=longest,
            generation_config="vllm",  # ignore top-p and temperature of the model's generation config
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **options,
        )


def completion_of(output: Any) -> Completion:
    """A vLLM CompletionOutput as ours; both include the end-of-sequence token."""
    tokens = list(output.token_ids)
    logprobs = [float(by_id[token].logprob) for by_id, token in zip(output.logprobs, tokens, strict=True)]
    return Completion(tokens=tokens, ended=output.finish_reason == "stop", logprobs=logprobs)


def seed_of(seed: int, episode: int) -> int:
    """A seed for one request: 32 bits of a hash of run seed and episode, so that streams are independent."""
    return int(np.random.SeedSequence([seed, episode]).generate_state(1)[0])


def accepted_rank(rank: int) -> int:
    """The smallest maximum rank that vLLM offers for an adapter of this rank. Raises ValueError if it is too large."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks  # undocumented; remove when LLM takes any rank

    ranks = [r for r in sorted(get_args(MaxLoRARanks)) if r >= rank]
    if not ranks:
        raise ValueError(f"rollout.engine: lora.r is {rank}; vLLM takes up to {max(get_args(MaxLoRARanks))}")
    return ranks[0]


@contextmanager
def own_device(device: torch.device, count: int = 1) -> Iterator[None]:
    """Processes started within the block see only this worker's GPUs: Ray Train shows each worker all those of its node.

    Args:
        count: of its GPUs, from `device` on.
    """
    if device.type != "cuda":
        yield
        return
    key, index = "CUDA_VISIBLE_DEVICES", torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get(key)
    every = visible.split(",") if visible else [str(i) for i in range(index + count)]
    os.environ[key] = ",".join(every[index : index + count])
    try:
        yield
    finally:
        if visible is None:
            del os.environ[key]
        else:
            os.environ[key] = visible
