"""`RolloutConfig`: who samples a PPO run's completions, with which engine, how many updates behind. No torch import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pipeline.intervals import table
from pipeline.ppo.settings import Settings

RANGES = table(
    {
        "[0, 64]": "staleness",
        "whole [1, 64]": "tensor_parallel_size",
        "(0, 1)": "gpu_memory_utilization",
        "(0, 1000000]": "correction_cap",
        "-1 or [0, 31536000]": "patience_s",
        "[1, 31536000]": "chunk_timeout_s heartbeat_timeout_s",
    }
)
MOST_WORKERS = 10_000
# Arguments of vllm.LLM that follow from the job.
VLLM_FIXED = set(
    """model revision dtype trust_remote_code quantization gpu_memory_utilization enable_lora max_loras max_lora_rank
    max_model_len max_logprobs logprobs_mode generation_config disable_log_stats use_tqdm_on_load tensor_parallel_size""".split()
)


@dataclass
class RolloutConfig(Settings):
    """The `rollout` section of a PPO job. A wrong value raises SettingError with the key, the value and what is expected."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """What decodes. transformers: the frozen base that the process holds anyway. vllm (the extra `vllm`): faster for large
    models, at the cost of a second copy of the base."""
    num_workers: int | list[Any] = 0
    """Rollout workers: Ray actors that hold the frozen base and every frozen role, sample completions and score them.
    [min, max]: up to `max`, which come and go; the run waits until `min` have resources. 0: the training workers sample."""
    staleness: int = 0
    """How many updates old the policy is that samples: the one after update u - staleness samples the episodes of update u,
    and the initial policy the first ones. 0: sampling and learning take turns. 1 or more: rollout workers sample while the
    trainer learns."""
    use_gpu: bool | None = None
    """Whether a rollout worker holds its models on a GPU. By default as the trainer's workers, `scaling.use_gpu`."""
    resources_per_worker: Annotated[dict[str, float] | None, "[0, inf)"] = None
    """What each rollout worker requests from Ray. By default {CPU: 1}, or {GPU: tensor_parallel_size} with `use_gpu`."""
    label_selector: dict[str, str] | None = None
    """Labels of the nodes that rollout workers are placed on, as Ray's label_selector: for example {market: spot}."""
    patience_s: float = 600.0
    """Seconds that the trainer waits if there is no rollout worker. Then it samples by itself, until a rollout worker comes.
    -1: no limit."""
    heartbeat_timeout_s: float = 60.0
    """Seconds without a heartbeat after which a rollout worker is replaced and another worker gets its chunk."""
    chunk_timeout_s: float = 3600.0
    """Seconds that a chunk may take, its rewards included, before its rollout worker is replaced. Loading the models may take
    an hour, or this long if it is more."""
    tensor_parallel_size: int = 1
    """GPUs over which vLLM splits the base in each rollout worker."""
    gpu_memory_utilization: float | None = None
    """Fraction of the GPU's memory for vLLM's copy of the base and its KV cache, in (0, 1). By default what they need."""
    vllm_kwargs: dict[str, Any] | None = None
    """Other arguments of vllm.LLM, for example {max_num_seqs: 128, enforce_eager: true}."""
    correction: Literal["none", "token", "sequence"] | None = None
    """Off-policy correction: each advantage is multiplied by the probability ratio trainer / sampler, of its token or of its
    completion, truncated at `correction_cap`. By default token for vllm, else none, because the correction made runs with
    `staleness: 2` worse (docs/rollouts.md)."""
    correction_cap: float = 3.0
    """Largest ratio, above 1."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges(RANGES)
        low, high = self.workers
        self._require(
            "num_workers",
            all(type(n) is int for n in (low, high))
            and 0 <= low <= high <= MOST_WORKERS
            and (high or low == 0),
            f"0 to {MOST_WORKERS}, or [min, max] with 0 <= min <= max",
        )
        self._require("correction_cap", self.correction_cap > 1, "above 1")
        self._require(
            "staleness",
            self.staleness == 0 or high > 0,
            "0 without rollout workers: no process samples ahead; set rollout.num_workers=1",
        )
        overruled = sorted(VLLM_FIXED & (self.vllm_kwargs or {}).keys())
        self._require("vllm_kwargs", not overruled, f"none of what the sampler sets itself: {overruled}")
        for key in ("gpu_memory_utilization", "vllm_kwargs"):
            self._require(
                key, not getattr(self, key) or self.engine == "vllm", "null without rollout.engine=vllm"
            )
        self._require(
            "tensor_parallel_size",
            self.tensor_parallel_size == 1 or (self.engine == "vllm" and self.use_gpu is True and high > 0),
            "1 unless rollout workers (rollout.num_workers) decode with vLLM on GPUs (rollout.use_gpu=true)",
        )

    @property
    def workers(self) -> tuple[Any, Any]:
        """Returns (fewest, most) rollout workers."""
        count = self.num_workers
        if not isinstance(count, list):
            return count, count
        return (count[0], count[1]) if len(count) == 2 else (-1, -1)

    @property
    def corrects(self) -> Literal["token", "sequence"] | None:
        """Returns `correction` (its default if it is None), or None for "none"."""
        if self.correction is None:
            return "token" if self.engine == "vllm" else None
        return None if self.correction == "none" else self.correction
