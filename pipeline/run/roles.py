"""Loads the inputs of a job as roles on one base: policy, reference, rewards and critic."""

import atexit
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from pipeline.job import Model
from pipeline.job.rollout import RolloutConfig
from pipeline.models import fsdp_sync, probes
from pipeline.models.adapters import SharedBase
from pipeline.models.base import load_base
from pipeline.models.tokenizer import load_tokenizer, tokenizer_digest
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.selfcheck.definitions import precision_of_base
from pipeline.run.model_host import ModelHost
from pipeline.run.worker import Worker
from pipeline.scoring.judges.reward import JudgeReward
from pipeline.scoring.rewards import AdapterReward, FunctionReward, ModelReward, Reward
from pipeline.system import hub
from pipeline.system.functions import import_function
from pipeline.writing import memory
from pipeline.writing.decoder import SlotDecoder
from pipeline.writing.rows import Decoder
from pipeline.writing.vllm import VllmDecoder, largest_lora_rank, start_llm


def shared_base(worker: ModelHost) -> SharedBase:
    """Returns the frozen base on the device of this process, without roles."""
    shared = SharedBase(worker.load_base(), autocast=torch.bfloat16 if worker.work.bf16 else None)
    if fsdp_sync.current is not None:
        fsdp_sync.current.shared = shared
    return shared


def add_rewards(worker: ModelHost, shared: SharedBase) -> list[Reward]:
    """Returns the rewards of the job, in order. Each reward adapter becomes a role: `reward`, `reward_1`, ..."""
    return [
        load_reward(worker, shared, name, _reward_role(index))
        for index, name in enumerate(worker.work.rewards)
    ]


def load_reward(worker: ModelHost, shared: SharedBase | None, name: str, role: str) -> Reward:
    """Returns the reward of the input `name`. If the input is an adapter, it becomes the role `role` of `shared`."""
    entry, args = worker.work.inputs[name], worker.args
    weight = entry.weight
    if entry.kind == "function":
        return FunctionReward(import_function(entry.version), args.reward_timeout_s, weight=weight, name=role)
    if entry.kind == "judge":
        assert entry.definition is not None
        run, timeout_s = worker.work.identity, args.reward_timeout_s
        return JudgeReward(entry.definition, run.storage_path, run.name, timeout_s, weight=weight, name=role)
    # In training, the number of tokens limits a forward pass. In other subcommands, a maximum number of rows does.
    by_tokens = bool(worker.work.spec.learns)
    limits = (
        {"tokens": args.max_tokens_per_micro_batch}
        if by_tokens
        else {"rows": args.local_rollout_forward_batch_size}
    )
    folder = worker.input(name)
    if entry.kind == "adapter":
        assert shared is not None
        shared.add(role, folder=folder, head=True)
        constants = entry.lineage.get("reward") or {"mean": 0.0, "std": 1.0}
        return AdapterReward(shared, role, **limits, weight=weight, **constants)
    # The input is a full model, which is loaded in addition to the base.
    model_name, revision = hub.split_revision(folder)
    settings = replace(worker.work.model, name_or_path=model_name, revision=revision, load_in_4bit=False)
    tokenizer = load_tokenizer(model_name, revision, trust_remote_code=settings.trust_remote_code)
    model = load_base(settings, tokenizer, worker.device)
    same_tokenizer = tokenizer_digest(tokenizer) == tokenizer_digest(worker.tokenizer)
    control = worker.work.data.parse_special_tokens
    return ModelReward(
        model, None if same_tokenizer else tokenizer, **limits, weight=weight, name=role, control=control
    )


def load_judge(worker: ModelHost, shared: SharedBase) -> Reward | None:
    """Returns the judge of the job, or None if the job has none. A judge is a function, an endpoint or a second reward model."""
    return load_reward(worker, shared, "judge", "judge") if "judge" in worker.work.inputs else None


def add_frozen(worker: ModelHost, shared: SharedBase, name: str, role: str) -> str | None:
    """Adds the input `name` as a frozen role. Returns the role, or None (the bare base) if the job has no such input."""
    if name not in worker.work.inputs:
        return None
    shared.add(role, folder=worker.input(name))
    return role


def add_policy(worker: ModelHost, shared: SharedBase, args: PPOConfig) -> str | None:
    """Adds the trainable role `policy`. Adds the adapter that the policy starts from as its frozen reference.

    Returns the role of the reference, or None (the bare base) if the job names no adapter.
    """
    folder = worker.input("policy") if "policy" in worker.work.inputs else None
    if folder:
        shared.add("policy", folder=folder, trainable=True)
    else:
        shared.add("policy", lora=worker.work.lora, trainable=True)
    if args.sync_ref_model:  # training changes the reference, so the reference needs its own adapter
        shared.add("reference", copy_of="policy")
    elif folder:
        shared.add("reference", folder=folder)
    else:
        return None
    return "reference"


def start_role(worker: ModelHost, shared: SharedBase, reference: str | None) -> str | None:
    """Returns a role that equals the policy at the start: the reference, or a new role if training changes the reference."""
    if reference is None or not worker.args.sync_ref_model:
        return reference
    return add_frozen(worker, shared, "policy", "start")


def add_critic(worker: ModelHost, shared: SharedBase, args: PPOConfig) -> str | None:
    """Adds the trainable role `critic`: a head on the policy, a copy of the first reward adapter, or a new adapter.

    Returns the role of the reward that was copied, or None.
    """
    if args.critic == "head":
        shared.add("critic", head_on="policy", trainable=True)
        return None
    rewards = map(_reward_role, range(len(worker.work.rewards)))
    reward_role = next((role for role in rewards if role in shared.roles), None)
    lora = None if reward_role else worker.work.lora
    shared.add("critic", lora=lora, copy_of=reward_role, head=True, trainable=True)
    return reward_role


def _reward_role(index: int) -> str:
    return f"reward_{index}" if index else "reward"


@contextmanager
def trainers_decoder(worker: Worker, shared: SharedBase, args: PPOConfig) -> Iterator[Decoder | None]:
    """Yields the vLLM decoder of a training worker, or None if the base itself samples, or if only rollout workers sample."""
    rollout = worker.work.rollout
    if rollout.engine != "vllm" or rollout.num_workers:
        yield None
        return
    longest = max(map(len, worker.rows("train")["input_ids"])) + args.response_length
    rows = math.ceil(args.batch_size / worker.world)
    with vllm_decoder(worker, shared, ["policy"], longest, rows, worker.scratch) as decoder:
        yield decoder


def make_decoder(host: ModelHost, shared: SharedBase, roles: Sequence[str | None]) -> Decoder:
    """Returns the decoder that `rollout.engine` names, for a job that does not train. A vLLM decoder stops with this process.

    Args:
        roles: frozen roles that the decoder may sample from, with None for the bare base.
    """
    rows = host.args.local_rollout_forward_batch_size
    if host.work.rollout.engine != "vllm":
        return SlotDecoder(shared, rows, host.tokenizer.pad_token_id)
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(vllm_decoder(host, shared, roles, longest_row(host), rows))


def longest_row(host: ModelHost) -> int:
    """Returns the maximum tokens of a prompt and its completion together."""
    context, longest = host.work.context, host.work.data.max_length
    return min(context, (longest or context) + host.args.response_length)


@contextmanager
def vllm_decoder(
    host: ModelHost,
    shared: SharedBase,
    roles: Sequence[str | None],
    longest: int,
    rows: int,
    scratch: str | None = None,
) -> Iterator[Decoder]:
    """Starts vLLM in addition to this process's base, and stops vLLM when the block ends.

    Args:
        roles: roles that vLLM may sample from.
        longest: maximum tokens of a prompt and its completion together.
        rows: completions of an update that this process samples.
        scratch: folder in which adapters are passed to vLLM, or None for a temporary one.
    """
    options = vllm_options(host.work.model, host.work.rollout, min(rows, memory.MAX_VLLM_ROWS))
    if shared.device.type == "cuda":
        cache = memory.kv_bytes(shared.base.config.get_text_config(), shared.base.dtype.itemsize)
        parameters = shared.base.named_parameters()
        weights = sum(p.numel() * p.element_size() for name, p in parameters if "lora_" not in name)
        total = torch.cuda.get_device_properties(shared.device).total_memory
        free_memory = memory.free_bytes(shared.device)
        share = memory.memory_share(total, free_memory, weights, cache, rows, longest)
        options["gpu_memory_utilization"] = host.work.rollout.gpu_memory_utilization or share
        print(f"vLLM takes {options['gpu_memory_utilization']} of the GPU's memory", flush=True)
    # Log-probs include the temperature, as in the trainer.
    options |= {"max_loras": 1, "max_logprobs": 1, "logprobs_mode": "processed_logprobs"}
    rank = largest_lora_rank(shared, roles)
    llm = start_llm(host.work.model.name_or_path, shared.device, longest, rank, **options)
    decoder = VllmDecoder(llm, rank, shared=shared, folder=tempfile.mkdtemp(prefix="vllm-", dir=scratch))
    try:
        for role in roles:
            decoder.changed(role)
        yield decoder
    finally:
        decoder.close()


def vllm_options(model: Model, rollout: RolloutConfig, rows: int) -> dict[str, Any]:
    """Returns the arguments of vllm.LLM for the sections `model` and `rollout` of a job.

    vLLM's default batch limits grow with the GPU's memory, but `memory_share` assumes the limits that this function sets.

    Args:
        rows: number of completions that vLLM decodes at the same time.
    """
    options: dict[str, Any] = {
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(memory.MAX_VLLM_TOKENS, rows),
        "revision": model.revision,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
    }
    if model.load_in_4bit:
        options["quantization"] = "bitsandbytes"
    if rollout.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = rollout.tensor_parallel_size
        # The custom all-reduce shares buffers by IPC, which fails with expandable segments (session.ENVIRONMENT):
        # https://github.com/vllm-project/vllm/issues/42609
        options["disable_custom_all_reduce"] = True
    return options | (rollout.vllm_kwargs or {})


def folders_of_roles(worker: ModelHost, shared: SharedBase) -> dict[str, str]:
    """Returns {role: folder of the adapter whose weights the role had at the start}."""
    inputs = dict.fromkeys(("policy", "reference"), "policy") if "policy" in worker.work.inputs else {}
    rewards = {_reward_role(index): f"reward.{index}" for index in range(len(worker.work.rewards))}
    # Only a reward that is an adapter on the base is a role.
    rewards = {role: name for role, name in rewards.items() if role in shared.roles}
    inputs |= rewards
    inputs |= {"teacher": "teacher"} if "teacher" in worker.work.inputs else {}
    if rewards and not shared.is_head("critic"):
        inputs["critic"] = next(iter(rewards.values()))
    return {role: worker.input(name) for role, name in inputs.items() if role in shared.roles}


def save_policy(worker: ModelHost, shared: SharedBase, folder: str) -> dict[str, Any]:
    """Writes the policy and its probes. Returns the digest of the policy's tensors."""
    digest = shared.save("policy", folder)
    pad = worker.tokenizer.pad_token_id
    precision = precision_of_base(shared)
    probes.write_probes(
        folder, shared.vocab_size, pad, lambda ids: shared.mean_logprob("policy", ids), precision
    )
    return digest


def policy_outputs(
    shared: SharedBase, rows: list[list[int]], folder: str | None = None
) -> list[torch.Tensor]:
    """Returns the policy's hidden states of rows of token ids. If `folder` is set, uses the adapter in `folder` instead."""
    role = "reloaded" if folder else "policy"
    if folder:
        shared.add(role, folder=folder)
    with torch.no_grad():
        return [shared.hidden(role, torch.tensor([ids], device=shared.device)) for ids in rows]
