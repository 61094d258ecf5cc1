"""Starts what a replica decodes with: the base, or vLLM (`rollout.engine`)."""

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
    from pipeline.inference.rows import Sampling
    from pipeline.models.adapters import SharedBase

MAX_ADAPTERS = 8  # adapters per vLLM batch; requests for others wait
FREE_GPU_FRACTION = 0.1  # GPU memory that vLLM leaves unused
CACHE_FRACTION = {"cuda": 0.5, "cpu": 0.25}  # share of the free memory for the KV cache


def start(host: Host) -> tuple[SharedBase | None, Batcher]:
    """Returns the base that this process holds, or None, and the batcher. Both are still without roles.

    vLLM has a copy of the base. The replica then needs the base only for reward models.
    """
    job = host.job
    if job.rollout_config.engine == "vllm":
        scores = any(not Ref.parse(source).is_function for source in job.serve.rewards.values())
        return roles.shared_base(host) if scores else None, _vllm(host)
    from pipeline.inference.decoder import PREFILL_TOKENS, SlotDecoder

    shared = roles.shared_base(host)
    decoder = SlotDecoder(
        shared,
        job.args.local_rollout_forward_batch_size,
        host.tokenizer.pad_token_id,
        max_positions=job.serve.cache_tokens or cache_tokens(shared),
        look=1,  # clients see each token as it comes
        graphs=False,  # rows join and leave too often
    )
    decoder.check()
    return shared, Batcher(decoder, job.serve.max_queue, PREFILL_TOKENS[shared.device.type])


def sampling(host: Host) -> Sampling:
    """Returns the sampling of a request that sets nothing."""
    from pipeline.inference.rows import Sampling

    args = host.job.args
    return Sampling(args.response_length, tuple(ends(host)), args.min_new_tokens, args.temperature)


def ends(host: Host) -> list[int]:
    """Returns the ids of the base's vocabulary that end a completion, as loading the base finds them."""
    model, tokenizer = host.job.model, host.tokenizer
    config = base_config(model.name_or_path, model.revision)
    text = config.get("text_config") or config
    generation = base_json(model.name_or_path, "generation_config.json", model.revision)
    if generation is None:  # transformers then makes one of config.json
        generation = {"eos_token_id": text.get("eos_token_id")}
    found = eos_ids(tokenizer, generation)
    return [i for i in found if i < text.get("vocab_size", i + 1)]


def _vllm(host: Host) -> Batcher:
    import torch

    from pipeline.inference.vllm import VllmDecoder, accepted_rank, start_llm

    job, rows = host.job, host.job.args.local_rollout_forward_batch_size
    # One adapter more than policies, because the old version still finishes its completions after an alias has moved.
    options: dict[str, Any] = {
        "max_loras": min(len(job.serve.policies) + 1, MAX_ADAPTERS),
        "max_logprobs": TOP_LOGPROBS,
        **roles.vllm_options(job, rows),
    }
    if host.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        share = job.rollout_config.gpu_memory_utilization or round(free / total - FREE_GPU_FRACTION, 2)
        options["gpu_memory_utilization"] = share
    inputs = [name for name in host.work.inputs if name.startswith("policies.")]
    rank = accepted_rank(max((adapter_files.rank(host.input(name)) for name in inputs), default=1))
    llm = start_llm(job.model.name_or_path, host.device, roles.longest_row(host), rank, **options)
    return Batcher(VllmDecoder(llm, rank, rows), job.serve.max_queue)


def cache_tokens(shared: SharedBase) -> int:
    """Returns the positions of the KV cache that fit into CACHE_FRACTION of the free memory."""
    from pipeline.inference.memory import free_bytes, kv_bytes

    each = kv_bytes(shared.base.config.get_text_config(), shared.base.dtype.itemsize)
    free = free_bytes(shared.device)
    return int(CACHE_FRACTION[shared.device.type] * free / each) if free < float("inf") else 1 << 20
