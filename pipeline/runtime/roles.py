"""From a job's inputs to roles on one base: which adapter plays the policy, the reference, the rewards and the critic."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline.models import hub
from pipeline.references import Ref
from pipeline.registry import lineage
from pipeline.runtime.host import Host
from pipeline.runtime.inputs import check_function
from pipeline.runtime.worker import Worker

if TYPE_CHECKING:
    from pipeline.config import Job
    from pipeline.models.adapters import SharedBase
    from pipeline.ppo.config import PPOConfig
    from pipeline.ppo.engine import Engine
    from pipeline.ppo.rewards import Reward
    from pipeline.ppo.vllm_engine import VllmEngine


def shared_base(worker: Host) -> SharedBase:
    """The job's frozen base on this process's device, with no role yet."""
    import torch

    from pipeline.models import lockstep
    from pipeline.models.adapters import SharedBase

    autocast = torch.bfloat16 if worker.job.bf16 else None
    shared = SharedBase(worker.load_base(), autocast=autocast)
    if (step := lockstep.current()) is not None:
        step.shared = shared
    return shared


def add_rewards(worker: Host, shared: SharedBase) -> list[Reward]:
    """The job's rewards, in order; a reward adapter becomes the role `reward` (`reward_1`, ... if there are several)."""
    return [
        reward(worker, shared, f"reward.{index}", _reward_role(index), weight)
        for index, (_, weight) in enumerate(worker.job.rewards)
    ]


def reward(worker: Host, shared: SharedBase | None, name: str, role: str, weight: float = 1.0) -> Reward:
    """The reward of one input of the job: an adapter, which becomes a role on the base, another model, or a Python function.

    Args:
        shared: None only where the reward is a function.
    """
    from pipeline.ppo.rewards import AdapterReward, FunctionReward, ModelReward

    source = worker.work.inputs[name]
    args = worker.job.args
    # A training job's forwards are cut by tokens alone; the other verbs also have a limit on rows, their batch size.
    by_tokens = worker.job.stage == "ppo"
    limits = (
        {"tokens": args.micro_batch_tokens} if by_tokens else {"rows": args.local_rollout_forward_batch_size}
    )
    if Ref.parse(source).is_function:
        function = check_function(source)
        return FunctionReward(function, args.reward_timeout_s, args.reward_threads, weight=weight, name=role)
    folder = worker.input(name)
    if lineage.is_adapter(folder):
        assert shared is not None
        shared.add(role, folder=folder, head=True)
        constants = lineage.read(folder, source).get("reward") or {"mean": 0.0, "std": 1.0}
        return AdapterReward(shared, role, **limits, weight=weight, **constants)
    model, tokenizer = _other_model(worker, folder)
    control = worker.job.data.special_tokens == "control"
    return ModelReward(model, tokenizer, **limits, weight=weight, name=role, control=control)


def _other_model(worker: Host, where: str) -> tuple[Any, Any]:
    """A reward model that is no adapter on this base, and its tokenizer: it is held in memory in full, beside the base."""
    from dataclasses import replace

    from pipeline.models.base import load_base
    from pipeline.models.tokenizer import load_tokenizer, tokenizer_digest

    name, revision = hub.split(where)
    settings = replace(worker.job.model, name_or_path=name, revision=revision, load_in_4bit=False)
    tokenizer = load_tokenizer(name, revision, trust_remote_code=settings.trust_remote_code)
    same = tokenizer_digest(tokenizer) == tokenizer_digest(worker.tokenizer)
    return load_base(settings, tokenizer, worker.device), None if same else tokenizer


def judge(worker: Host, shared: SharedBase) -> Reward | None:
    """The job's judge (a Python function or a second reward model, never trained on); None if it names none."""
    return reward(worker, shared, "judge", "judge") if worker.job.judge else None


def add_frozen(worker: Host, shared: SharedBase, name: str, role: str) -> str | None:
    """A frozen role from the input `name` of the job; None, the bare base, where the job names no adapter."""
    if name not in worker.work.inputs:
        return None
    shared.add(role, folder=worker.input(name))
    return role


def add_policy(worker: Host, shared: SharedBase, args: PPOConfig) -> str | None:
    """The role `policy`, trainable, and its reference: the frozen sft adapter that it starts from.

    Returns:
        The role of the reference; None, the bare base, where there is no sft adapter.
    """
    if "policy" not in worker.work.inputs:
        shared.add("policy", lora=worker.job.lora, trainable=True)
        if args.sync_ref_model:  # a reference that moves has to be an adapter
            shared.add("reference", copy_of="policy")
            return "reference"
        return None
    folder = worker.input("policy")
    shared.add("policy", folder=folder, trainable=True)
    if args.sync_ref_model:  # it moves, so it cannot share the adapter of a frozen role with the same folder
        shared.add("reference", copy_of="policy")
    else:
        shared.add("reference", folder=folder)
    return "reference"


def start(worker: Host, shared: SharedBase, reference: str | None) -> str | None:
    """The role that the policy began as, which it is compared with: the reference, unless that follows the policy."""
    if reference is None or not worker.job.args.sync_ref_model:
        return reference
    return add_frozen(worker, shared, "policy", "start")


def add_critic(worker: Host, shared: SharedBase, args: PPOConfig) -> str | None:
    """Adds the role `critic`, trainable: a head on the policy; or an adapter, a copy of the first reward's with its head if any.

    Returns:
        The role of the reward that was copied, or None.
    """
    if args.critic == "head":
        shared.add("critic", head_on="policy", trainable=True)
    elif copied := next(iter(_reward_adapters(worker, shared)), None):
        shared.add("critic", copy_of=copied, head=True, trainable=True)
        return copied
    else:
        shared.add("critic", lora=worker.job.lora, head=True, trainable=True)
    return None


def _reward_adapters(worker: Host, shared: SharedBase) -> dict[str, str]:
    """{role: input of the job} of the rewards that are adapters on the base, in the job's order."""
    named = {_reward_role(index): f"reward.{index}" for index in range(len(worker.job.rewards))}
    return {role: name for role, name in named.items() if role in shared.roles}


def _reward_role(index: int) -> str:
    return f"reward_{index}" if index else "reward"


@contextmanager
def sampler(worker: Worker, shared: SharedBase, args: PPOConfig) -> Iterator[Engine | None]:
    """The engine of a training worker for the block: vLLM if the job asks for it and no rollout workers have it; None, the
    base itself, if not."""
    rollout = worker.job.rollout_config
    if rollout.engine != "vllm" or rollout.workers[1]:
        yield None
        return
    longest = max(map(len, worker.rows("train")["input_ids"])) + args.response_length
    folder = os.path.join(worker.scratch, f"vllm-{worker.rank}")
    with vllm(worker, shared, folder, longest, math.ceil(args.batch_size / worker.world)) as engine:
        yield engine


def engines(host: Host, shared: SharedBase, wanted: Sequence[str | None]) -> Callable[[str | None], Engine]:
    """What decodes for each of some frozen roles (None: the bare base), by the role: `rollout.engine` of a job that does not
    train. vLLM ends with this process.
    """
    from pipeline.ppo.engine import TransformersEngine

    rows = host.job.args.local_rollout_forward_batch_size
    if host.job.rollout_config.engine != "vllm":
        return lambda role: TransformersEngine(shared, role, rows=rows, pad=host.tokenizer.pad_token_id)
    context = host.work.base["context_length"] or 1 << 20
    longest = min(context, (host.job.data.max_length or context) + host.job.args.response_length)
    folder = tempfile.mkdtemp(prefix="vllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    engine = _start_vllm(host, shared, folder, longest, rows, wanted)
    return {role: engine.of(role) for role in wanted}.__getitem__


@contextmanager
def vllm(host: Host, shared: SharedBase, folder: str, longest: int, rows: int) -> Iterator[Engine]:
    """vLLM beside the base of this process, for the policy and the block.

    Args:
        folder: adapters are handed over in it.
        longest: tokens of the longest prompt and its completion.
        rows: completions of an update that this process samples.
    """
    engine = _start_vllm(host, shared, folder, longest, rows, ["policy"])
    try:
        yield engine
    finally:
        engine.close()


def _start_vllm(
    host: Host, shared: SharedBase, folder: str, longest: int, rows: int, wanted: Sequence[str | None]
) -> VllmEngine:
    from pipeline.ppo.vllm_engine import VllmEngine
    from pipeline.ppo.vllm_memory import MOST_ROWS

    options = vllm_options(host.job, min(rows, MOST_ROWS))
    if shared.device.type == "cuda":
        share = host.job.rollout_config.gpu_memory_utilization or vllm_share(shared, rows, longest)
        options["gpu_memory_utilization"] = share
        print(f"vLLM takes {share} of the GPU's memory", flush=True)
    return VllmEngine(shared, host.job.model.name_or_path, folder, longest=longest, roles=wanted, **options)


def vllm_options(job: Job, rows: int) -> dict[str, Any]:
    """Returns the arguments of vllm.LLM that follow from a job, except for its share of the memory.

    vLLM's own limits on a batch grow with the GPU; `memory_share` counts with these.

    Args:
        rows: completions that it decodes at the same time.
    """
    from pipeline.ppo.vllm_memory import BATCHED_TOKENS

    model, rollout = job.model, job.rollout_config
    options: dict[str, Any] = {"quantization": "bitsandbytes"} if model.load_in_4bit else {}
    if rollout.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = rollout.tensor_parallel_size
        # It shares buffers by IPC, which cannot share the expandable segments that our workers use (on_ray/session.py):
        # https://github.com/vllm-project/vllm/issues/42609
        options["disable_custom_all_reduce"] = True
    options |= {
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(BATCHED_TOKENS, rows),
        "revision": model.revision,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
    }
    return options | (rollout.vllm_kwargs or {})


def vllm_share(shared: SharedBase, rows: int, longest: int) -> float:
    """vLLM's share of this GPU for `rows` completions of an update; see ppo.vllm_memory."""
    import torch

    from pipeline.ppo.decode_memory import kv_bytes
    from pipeline.ppo.vllm_memory import memory_share

    cache = kv_bytes(shared.base.config.get_text_config(), shared.base.dtype.itemsize)
    named = shared.base.named_parameters()
    weights = sum(p.numel() * p.element_size() for name, p in named if "lora_" not in name)
    total = torch.cuda.get_device_properties(shared.device).total_memory
    return memory_share(total, weights, cache, rows, longest)


def folders(worker: Host, shared: SharedBase) -> dict[str, str]:
    """role -> the folder of the adapter that it started as."""
    sources: dict[str, str] = {}
    if "policy" in worker.work.inputs:
        sources |= dict.fromkeys(("policy", "reference"), worker.input("policy"))
    for role, name in _reward_adapters(worker, shared).items():
        sources[role] = worker.input(name)
        if "critic" in shared.roles and not shared.is_head("critic"):
            sources.setdefault("critic", sources[role])
    return {role: folder for role, folder in sources.items() if role in shared.roles}


def save_policy(worker: Host, shared: SharedBase, folder: str) -> None:
    """Write the trained policy and its probes."""
    from pipeline.models import probes

    shared.save("policy", folder)
    rows = probes.sequences(shared.vocab_size, worker.tokenizer.pad_token_id)
    probes.write(folder, rows, lambda ids: shared.mean_logprob("policy", ids))


def verify_reload(shared: SharedBase, folder: str, rows: list[list[int]]) -> None:
    """Check that the saved policy, loaded back onto the same base, gives the same hidden states, to the bit.

    Args:
        rows: token ids of a few sequences to compare on.

    Raises:
        RuntimeError: when they differ.
    """
    import torch

    shared.add("reloaded", folder=folder)
    with torch.no_grad():
        for row, ids in enumerate(rows):
            batch = torch.tensor([ids], device=shared.device)
            trained, reloaded = (shared.hidden(role, batch) for role in ("policy", "reloaded"))
            if not torch.equal(trained, reloaded):
                raise RuntimeError(
                    f"the saved policy does not reload as it was: row {row} differs by "
                    f"{(trained - reloaded).abs().max().item():.3g}; nothing was registered"
                )
