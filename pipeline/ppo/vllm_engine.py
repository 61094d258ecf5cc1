"""Rollouts by vLLM, beside the trainer on the same device: `trainer.use_vllm`. The extra `vllm` brings it.

It is the one thing that costs a second copy of the base, and pays where decoding is most of an update: large models, long
completions. Only the policy's adapter travels to it, after each update; the base does not change.

vLLM computes by other kernels than the trainer, so its log-probs are a little off. Old log-probs are the trainer's all the
same (the first ratio stays 1), and what is left is weighed (functional.importance_weights). A completion is a function of
seed, episode and prompt here too, but for rounding: vLLM's sums depend on the batch that a row is in.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.models.adapters import SharedBase
from pipeline.ppo.rollout import Completion, Sampling

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


class VllmEngine:
    """An `Engine` (rollout.py) that decodes in vLLM, in a process of its own.

    Args:
        shared: holds the role that samples.
        model: folder or hub id of the base, as vLLM is to load it.
        folder: where adapters lie on their way to it.
        longest: tokens of the longest prompt and its completion together.
        role: whose adapter samples.
        options: further arguments of vllm.LLM: revision, dtype, quantization, gpu_memory_utilization, ...
    """

    def __init__(
        self,
        shared: SharedBase,
        model: str,
        folder: str | Path,
        longest: int,
        role: str = "policy",
        **options: Any,
    ) -> None:
        config = shared.configs[role]
        if config.use_dora:
            raise ValueError(
                "trainer.use_vllm: vLLM cannot run a DoRA adapter; train one with lora.use_dora=false"
            )
        self.shared, self.role = shared, role
        self.folder, self.synced = Path(folder), 0
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        with own_device(shared.device):
            self.llm = LLM(
                model,
                enable_lora=True,
                max_loras=1,
                max_lora_rank=accepted_rank(max(config.r, *config.rank_pattern.values(), 1)),
                max_model_len=longest,
                max_logprobs=1,
                logprobs_mode="processed_logprobs",  # with the temperature, as the trainer's
                generation_config="vllm",  # not the model's own top-p and temperature
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )

    def sync(self) -> None:
        """Hands the adapter over, under a new number: vLLM keeps keys and values of prompts by it."""
        self.synced += 1
        self.shared.save(self.role, self.folder / str(self.synced))
        shutil.rmtree(self.folder / str(self.synced - 1), ignore_errors=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], episodes: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(str(self.synced), self.synced, str(self.folder / str(self.synced)))
        asked = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                min_tokens=sampling.min_new_tokens,  # bars the model's own ends too: the trainer's ends hold them
                stop_token_ids=list(sampling.eos),
                ignore_eos=True,  # the ends are those above and no other
                seed=seed_of(sampling.seed, episode),
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for episode in episodes
        ]
        texts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(texts, asked, lora_request=adapter, use_tqdm=False)
        return [completion_of(output.outputs[0]) for output in outputs]

    def close(self) -> None:
        """Ends vLLM's process, which gives its memory back.

        vLLM 0.30 has no public way. Remove the private one when it has: https://github.com/vllm-project/vllm/pull/36283.
        """
        self.llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def completion_of(output: Any) -> Completion:
    """From vLLM's CompletionOutput: it holds the end token, as ours does."""
    tokens = list(output.token_ids)
    logprobs = [float(at[token].logprob) for at, token in zip(output.logprobs, tokens, strict=True)]
    return Completion(tokens=tokens, ended=output.finish_reason == "stop", logprobs=logprobs)


def seed_of(seed: int, episode: int) -> int:
    """A request's own stream of random numbers: 32 bits of a hash of both, so that neighbours have nothing in common."""
    return int(np.random.SeedSequence([seed, episode]).generate_state(1)[0])


def accepted_rank(rank: int) -> int:
    """The smallest rank that vLLM makes room for and that holds `rank`."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks  # undocumented; remove when LLM takes any rank

    ranks = [r for r in sorted(get_args(MaxLoRARanks)) if r >= rank]
    if not ranks:
        raise ValueError(
            f"trainer.use_vllm: lora.r is {rank}; vLLM takes up to {max(get_args(MaxLoRARanks))}"
        )
    return ranks[0]


@contextmanager
def own_device(device: torch.device) -> Iterator[None]:
    """Within it, a new process sees only this worker's GPU: Ray Train shows each worker all of its node's."""
    if device.type != "cuda":
        yield
        return
    key, index = "CUDA_VISIBLE_DEVICES", torch.cuda.current_device() if device.index is None else device.index
    before = os.environ.get(key)
    os.environ[key] = before.split(",")[index] if before else str(index)
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
