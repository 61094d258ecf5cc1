"""Starts what a replica writes with: the base and the batching loop on it, or vLLM (`rollout.engine`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import adapter_files
from pipeline.models.hub import base_config, base_json
from pipeline.models.tokenizer import eos_ids
from pipeline.references import Ref
from pipeline.runtime import roles
from pipeline.runtime.host import Host
from pipeline.serving.batching import Batcher
from pipeline.serving.protocol import TOP_LOGPROBS

if TYPE_CHECKING:
    from pipeline.models.adapters import SharedBase

MOST_ADAPTERS = 8  # that vLLM runs in one batch; requests for further ones wait for the next
LEFT_FREE = 0.1  # of a GPU's memory beside vLLM


def start(host: Host) -> tuple[SharedBase | None, Batcher]:
    """The base that this process holds, if it needs one, and the batcher; it has no role yet.

    vLLM has a base of its own; the replica then holds another one only if there are reward models.
    """
    job = host.job
    limits: dict[str, Any] = {
        "rows": job.args.local_rollout_forward_batch_size,
        "queue": job.serve.max_queue,
        "min_new_tokens": job.args.min_new_tokens,
    }
    if job.rollout_config.engine == "vllm":
        scores = any(not Ref.parse(source).is_function for source in job.serve.rewards.values())
        shared = roles.shared_base(host) if scores else None
        return shared, _vllm(host, limits)
    from pipeline.serving.transformers_batcher import TransformersBatcher

    shared = roles.shared_base(host)
    limits |= {
        "positions": job.serve.cache_tokens or cache_tokens(shared),
        "pad": host.tokenizer.pad_token_id,
    }
    return shared, TransformersBatcher(shared, eos=ends(host), **limits)


def ends(host: Host) -> list[int]:
    """Ids of the base's vocabulary that end a completion, as loading the base finds them."""
    model, tokenizer = host.job.model, host.tokenizer
    config = base_config(model.name_or_path, model.revision)
    text = config.get("text_config") or config
    generation = base_json(model.name_or_path, "generation_config.json", model.revision)
    if generation is None:  # transformers then makes one of config.json
        generation = {"eos_token_id": text.get("eos_token_id")}
    found = eos_ids(tokenizer, generation)
    return [i for i in found if i < text.get("vocab_size", i + 1)]


def _vllm(host: Host, limits: dict[str, Any]) -> Batcher:
    import torch

    from pipeline.ppo.vllm_engine import accepted_rank, start_llm
    from pipeline.serving.vllm_batcher import VllmBatcher

    job, context = host.job, host.work.base["context_length"] or 1 << 20
    serve, options = job.serve, roles.vllm_options(job, limits["rows"])
    if host.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        share = job.rollout_config.gpu_memory_utilization or round(free / total - LEFT_FREE, 2)
        options["gpu_memory_utilization"] = share
    # With room for one that an alias moves to while rows of the one before are written.
    options = {
        "max_loras": min(len(serve.policies) + 1, MOST_ADAPTERS),
        "max_logprobs": TOP_LOGPROBS,
        **options,
    }
    inputs = [name for name in host.work.inputs if name.startswith("policies.")]
    rank = accepted_rank(max((adapter_files.rank(host.input(name)) for name in inputs), default=1))
    longest = min(context, (job.data.max_length or context) + job.args.response_length)
    llm = start_llm(job.model.name_or_path, host.device, longest, rank, **options)
    return VllmBatcher(llm, rank, eos=ends(host), **limits)


def cache_tokens(shared: SharedBase) -> int:
    """Positions of the KV cache for which there is room: half of a GPU's free memory, on a CPU a quarter."""
    from pipeline.ppo.decode_memory import free_bytes, kv_bytes

    share = 0.5 if shared.device.type == "cuda" else 0.25
    each = kv_bytes(shared.base.config.get_text_config(), shared.base.dtype.itemsize)
    free = free_bytes(shared.device)
    return int(share * free / each) if free < float("inf") else 1 << 20
