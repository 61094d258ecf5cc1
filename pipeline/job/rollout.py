"""Defines the section `rollout` of a job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from pipeline.job.ranges import Patience, require_value

# arguments of vllm.LLM that a job cannot set in vllm_kwargs
VLLM_FIXED = set(
    """model revision dtype trust_remote_code quantization gpu_memory_utilization enable_lora max_loras max_lora_rank
    max_model_len max_logprobs logprobs_mode generation_config disable_log_stats use_tqdm_on_load tensor_parallel_size""".split()
)


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of sampling: the engine, the rollout workers, and the staleness of the policy."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """The decoding engine. transformers: decodes on the frozen base that is already loaded. vllm (the extra `vllm`): faster for
    large models, but loads a second copy of the base."""
    num_workers: Annotated[int, Ge(0), Le(1000)] = 0
    """Rollout workers: Ray actors that load the frozen base and every frozen role, sample completions and score them.
    0: the training workers sample."""
    staleness: Annotated[int, Ge(0), Le(64)] = 0
    """Age of the sampling policy in updates. 0: sampling and training alternate. 1 or more: rollout workers sample during
    training. Update u, counted from 0, learns from episodes of the policy that update u - staleness started with."""
    use_gpu: bool | None = None
    """Whether a rollout worker has its models on a GPU. The default is `scaling.use_gpu`."""
    resources_per_worker: dict[str, Annotated[float, Ge(0)]] | None = None
    """Resources that each rollout worker requests from Ray. The default is {CPU: 1}, or {GPU: tensor_parallel_size} with
    `use_gpu`."""
    label_selector: dict[str, str] | None = None
    """Labels of the nodes for rollout workers, as in Ray's label_selector, for example {market: spot}."""
    worker_wait_timeout_s: Patience = 600.0
    """Seconds that the trainer waits if there is no rollout worker. Then the trainer samples by itself until a rollout worker
    joins. -1 means no limit."""
    chunk_timeout_s: Annotated[float, Ge(1), Le(365 * 86_400)] = 3600.0
    """Maximum seconds for a chunk, including rewards, before the rollout worker of the chunk is replaced. Loading the models may
    take an hour, or chunk_timeout_s if chunk_timeout_s is longer."""
    tensor_parallel_size: Annotated[int, Ge(1), Le(64)] = 1
    """Number of GPUs over which vLLM splits the base in each rollout worker."""
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1)] | None = None
    """Fraction of the GPU's memory for vLLM's copy of the base and its KV cache. By default, vLLM gets the fraction that both
    need, but at most the free memory."""
    vllm_kwargs: dict[str, Any] | None = None
    """Additional arguments of vllm.LLM, for example {max_num_seqs: 128, enforce_eager: true}."""
    correction: Literal["none", "token", "sequence"] | None = None
    """Off-policy correction: each advantage is multiplied by the probability ratio trainer / sampler of the token or of the
    completion, truncated at `correction_cap`. The default is token for vllm, and none for transformers, because the correction
    made runs with `staleness: 2` worse (docs/rollouts.md)."""
    correction_cap: Annotated[float, Gt(1), Le(10**6)] = 3.0
    """Maximum of the probability ratio in `correction`."""

    def __post_init__(self) -> None:
        require = partial(require_value, self)
        staleness = "0 without rollout workers, because no process samples ahead; set rollout.num_workers=1"
        require("staleness", self.staleness == 0 or self.num_workers > 0, staleness)
        fixed = sorted(VLLM_FIXED & (self.vllm_kwargs or {}).keys())
        require("vllm_kwargs", not fixed, f"no arguments that the sampler sets: {fixed}")
        is_split = self.engine == "vllm" and self.use_gpu is True and self.num_workers > 0
        msg = "1 unless rollout workers (rollout.num_workers) decode with vLLM on GPUs (rollout.use_gpu=true)"
        require("tensor_parallel_size", self.tensor_parallel_size == 1 or is_split, msg)
        for key in ("gpu_memory_utilization", "vllm_kwargs"):
            allowed = self.engine == "vllm" or not getattr(self, key)
            require(key, allowed, "null without rollout.engine=vllm")

    @property
    def corrects(self) -> Literal["token", "sequence"] | None:
        """Returns the importance-sampling correction that applies: "token", "sequence", or None."""
        if self.correction is None:
            return "token" if self.engine == "vllm" else None
        return None if self.correction == "none" else self.correction
