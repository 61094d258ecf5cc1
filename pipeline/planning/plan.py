"""Estimates the memory of one worker of a job as an itemized list, and the hours of the job on a GPU.

shape.py measures the sizes with the job's own model, so no formula depends on the architecture. For the tensors of TRL's losses,
a factor was fitted to measured peaks. Tests compare the sum of all items with the peak memory of real runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.errors import InputError
from pipeline.input_uri import InputURI
from pipeline.job import schema
from pipeline.job.stages import StageSpec
from pipeline.models import adapter_files
from pipeline.models.gpus import PEAK_TFLOPS
from pipeline.planning.rows import Rows
from pipeline.planning.shape import Shape
from pipeline.settle.inputs import room_for_prompts
from pipeline.settle.work import Sections
from pipeline.writing.memory import MAX_VLLM_ROWS, SAMPLING_BYTES, VLLM_WORKSPACE

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    label: str  # label of nodes with this GPU (ray.io/accelerator-type), from ray.util.accelerators
    memory: float  # GiB that torch can use
    tflops: float  # dense bf16 matrix products
    bandwidth: float  # memory bandwidth in GB/s


GPUS = {
    gpu.label: gpu
    for gpu in (
        Gpu("L4", 22, PEAK_TFLOPS["L4"], 300),
        Gpu("A10G", 22, PEAK_TFLOPS["A10G"], 600),
        Gpu("A100-40G", 39, PEAK_TFLOPS["A100"], 1555),
        Gpu("L40S", 44, PEAK_TFLOPS["L40S"], 864),
        Gpu("A100-80G", 79, PEAK_TFLOPS["A100"], 2039),
        Gpu("H100", 79, PEAK_TFLOPS["H100"], 3350),
        Gpu("H200", 139, PEAK_TFLOPS["H200"], 4800),
    )
}
# A run recomputes activations if storing them would need more than this fraction of the free memory. On a CPU, estimates are
# within 15 % of measured peaks. Estimates have not been compared with measurements on a GPU.
MAX_FILL = 0.9
# Assumed fraction of a GPU's peak FLOP/s and of its memory bandwidth. The plan prints the assumed fraction.
UTILIZATION = 0.35
# memory of Python, torch and Ray, or of CUDA's context and workspaces
RUNTIME = {
    "cpu": 0.75 * GIB,
    "cuda": 0.9 * GIB,
}
# Allocated memory divided by memory in use. glibc's allocator cannot reuse a free block of exactly the right size if the
# block must be aligned, so it allocates twice the memory in use. MALLOC_MMAP_THRESHOLD_=65536 would avoid this waste, but runs
# would take 25 % longer.
SLACK = {"cpu": 2.0, "cuda": 1.1}
# Layers of a sharded base in memory at the same time: the current layer, the next layer, and the shards from which the next
# layer is gathered. The number of layers has not been measured on a GPU.
GATHERED = 3
# Tokens and vocabulary entries of a tile. TRL's losses for sft, dpo and kto compute the logits one tile at a time.
LOGIT_TILE = (4096, 32768)
# Bytes for each entry of a tile. The CPU's value was measured with a vocabulary of 128,256 and up to 8,192 tokens. The GPU's
# value follows from the source of the kernel, which reads the fp32 tile in place.
LOGIT_BYTES = {"cpu": 33, "cuda": 4}


@dataclass(frozen=True)
class Item:
    """A part of a worker's memory, such as the base. Items of different phases are not in memory at the same time."""

    what: str
    size: float  # bytes
    phase: str = "always"  # phase in which the memory is in use: always, rollout, score or update


@dataclass(frozen=True)
class MemorySettings:
    """The settings that determine how much memory a job needs, with the defaults of its stage."""

    rows: int  # rows in one forward and backward
    width: int  # tokens of a row
    bf16: bool  # whether matrix products are in bf16
    checkpointing: bool
    sequences: int  # sequences in a row of the batch: two for preference pairs
    rollout_rows: int = 0
    prompt: int = 0
    completion: int = 0
    scored: int = 0  # tokens in a forward without gradients, in ppo


@dataclass(frozen=True)
class Plan:
    work: Sections
    shape: Shape
    trainable: int
    items: list[Item]
    device: str  # cpu, cuda
    asked: MemorySettings
    tokens: tuple[int, int]  # maximum tokens of (prompt, completion), or (row, 0) in TRL's stages
    in_shards: bool  # whether each worker has only a shard of the base

    @property
    def peak(self) -> float:
        phases = dict.fromkeys(("always", "rollout", "score", "update"), 0.0)
        for item in self.items:
            phases[item.phase] += item.size
        return phases.pop("always") + SLACK[self.device] * max(phases.values())

    @property
    def checkpoint(self) -> float:
        """Returns the bytes of a checkpoint: trained parameters, Adam's moments, and the best parameters if they are kept."""
        # TRL's trainer also saves the adapter of the reference model.
        reference = self.work.spec.trl and _has_reference(self.work)
        kept = 4.0 * reference + 4.0 * self.work.run.load_best_model_at_end
        return (4.0 + _moments(self.work.trainer) + kept) * self.trainable


def memory_settings(work: Sections, context: int) -> MemorySettings:
    """Returns the settings for rows of the maximum length. `context` is the number of tokens in the model's context."""
    spec, args, workers, longest = work.spec, work.args, work.places.workers.fewest, work.data.max_length
    if spec.trl:
        return MemorySettings(
            work.trainer.get("per_device_train_batch_size", 8),
            min(longest or context, context),
            work.bf16,
            work.trainer.get("gradient_checkpointing") is not False,  # TRL's default is True
            spec.sequences,
        )
    completion = args.response_length if spec.writes else 0
    prompt = longest or context - completion
    width = prompt + completion
    if not spec.learns:
        rows = args.local_rollout_forward_batch_size
        return MemorySettings(0, width, work.bf16, False, 1, rows, prompt, completion)
    from pipeline.scoring.forward import FORWARD_TOKENS

    rows, decoded = args.per_device_train_batch_size, args.planned_rows(workers)
    if args.max_tokens_per_micro_batch:
        rows = max(1, args.max_tokens_per_micro_batch // width)
    if work.rollout.engine == "vllm":
        decoded = min(args.decoded(workers), MAX_VLLM_ROWS)
    scored = args.max_tokens_per_micro_batch or FORWARD_TOKENS["cuda" if work.places.on_gpu else "cpu"]
    scored = max(width, min(scored, args.batch_size * width))
    checkpointing = args.gradient_checkpointing is not False  # if None, the run decides later
    rows = min(rows, args.batch_size)
    return MemorySettings(rows, width, work.bf16, checkpointing, 1, decoded, prompt, completion, scored)


Loras = Mapping[str, dict[str, Any]]  # {input, such as `policy`: describe_adapter() of its adapter}


def make_plan(work: Sections, loras: Loras | None = None, learns: bool = True) -> Plan:
    """Returns the plan of one worker.

    Args:
        loras: descriptions of the adapters that the job starts from, by input (`policy`, `reward`). Adapters without a
            description are assumed to have the settings of the job's `lora`.
        learns: False for a rollout worker of a ppo job, which samples and scores, and has no critic.
    """
    spec, args, rollout, model = work.spec, work.args, work.rollout, work.frozen
    device = "cuda" if (work.places.on_gpu if learns else work.places.rollout_on_gpu) else "cpu"
    roles, learning = _roles(work)
    if not learns:
        roles, learning = [role for role in roles if role != "critic"], []
    starts = {"reference": "policy", "critic": "reward"}
    try:
        shape = Shape(model, work.lora, "reward" in (spec.learns, *spec.inputs))
        lora_of = {role: (loras or {}).get(starts.get(role, role), work.lora) for role in roles}
        size = {role: 4.0 * (lora.get("parameters") or shape.adapter(lora)) for role, lora in lora_of.items()}
    except ValueError as error:  # peft found no modules to adapt, or contradictory settings
        why = f"peft rejects it for {model.name_or_path}: {str(error).splitlines()[0]}"
        raise InputError(why, key="lora") from error
    room_for_prompts(work.writes, work.data.max_length, shape.context)
    asked, workers = memory_settings(work, shape.context), work.places.workers.fewest
    trainable = sum(size[role] for role in learning)
    in_shards = learns and model.fsdp and workers > 1  # rollout workers load the full base
    if in_shards:
        at_hand = shape.embedding + GATHERED * shape.layer
        items = [
            Item(
                f"base, {model.dtype}: a shard of {workers}, and the lm head",
                shape.sharded(workers, spec.learns != "reward"),
            ),
            Item("gathered while computing: the embedding and the current layers", at_hand),
        ]
    else:
        items = [Item(f"base, {'nf4' if model.load_in_4bit else model.dtype}, once", shape.weights)]
    head = learns and spec.online and args.uses_critic and not args.has_critic_adapter
    adapters = ", ".join(roles) + "; the critic is a head on the policy" * head
    items.append(Item(f"adapters: {adapters}", sum(size.values())))
    if learning:
        adam = (1 + _moments(work.trainer) / 4) * trainable
        items.append(Item(f"gradients and Adam of {', '.join(learning)}", adam))
    runtime = "Python, torch, Ray" if device == "cpu" else "CUDA context and workspaces"
    items.append(Item(runtime, RUNTIME[device]))
    if learning:
        tokens = asked.rows * asked.sequences * asked.width
        kind = "layer inputs and one layer" if asked.checkpointing else "all layers"
        saved = shape.activations(asked.rows * asked.sequences, asked.width, asked.bf16, asked.checkpointing)
        items.append(Item(f"activations for backward: {tokens:,} tokens, {kind}", saved, "update"))
        items.append(Item("logits and their gradients", _logits(spec, shape, tokens, device), "update"))
    if spec.online and asked.bf16:
        items.append(Item("copies of the trained adapters in bfloat16", trainable / 2, "update"))
    vllm = spec.online and rollout.engine == "vllm"
    if asked.rollout_rows and not (learning and vllm and rollout.num_workers):
        gpus = rollout.tensor_parallel_size if vllm and not learning else 1
        items += _rollout_items(shape, asked, device, vllm, gpus)
    if asked.scored:
        what = f"activations of a forward without gradients: {asked.scored:,} tokens"
        items.append(Item(what, asked.scored * shape.forward(asked.bf16), "score"))
    lengths = (asked.prompt, asked.completion) if asked.rollout_rows else (asked.width, 0)
    return Plan(work, shape, int(trainable / 4), items, device, asked, lengths, in_shards)


def _rollout_items(shape: Shape, asked: MemorySettings, device: str, vllm: bool, gpus: int) -> list[Item]:
    """Returns the memory that sampling needs in addition to the base.

    Args:
        gpus: the number of GPUs over which vLLM splits its base and its KV cache.
    """
    from pipeline.writing.decoder import PREFILL_TOKENS

    rows, width = asked.rollout_rows, asked.width
    cache, size = f"KV cache: {rows} rows of {width} tokens", rows * width * shape.cache(asked.bf16)
    if vllm:
        return [
            Item("vLLM: a second copy of the base in bfloat16", 2.0 * shape.parameters / gpus),
            Item("vLLM: work space", VLLM_WORKSPACE),
            Item(f"vLLM: {cache}", size / gpus),
        ]
    tokens = rows * asked.prompt
    if asked.completion and not shape.keeps_other_state:
        tokens = min(tokens, max(asked.prompt, PREFILL_TOKENS[device]))
    forward = Item("activations of the prompts' forward", tokens * shape.forward(asked.bf16), "rollout")
    if not asked.completion:
        return [forward]
    logits = rows * shape.vocabulary * float(SAMPLING_BYTES)
    return [
        Item(cache, size, "rollout"),
        Item("logits and probabilities of the next token", logits, "rollout"),
        forward,
    ]


def _roles(work: Sections) -> tuple[list[str], list[str]]:
    """Returns the roles that have an adapter in memory, and the subset of these roles that is trained."""
    spec, named = work.spec, work.named
    if spec.learns is None:
        models = [name for name, at in named.items() if at != "base" and InputURI.parse(at).is_model]
        return list(dict.fromkeys(name.split(".")[0] for name in models)), []
    learning = [spec.learns]
    roles = learning + ["reference"] * _has_reference(work)
    if spec.trl:
        return roles, learning
    rewards = [
        name for name, at in named.items() if name.startswith("reward.") and InputURI.parse(at).is_model
    ]
    roles += [f"reward_{i}" if i else "reward" for i in range(len(rewards))]
    roles += ["teacher"] * (named.get("teacher") not in (None, "base"))
    # Without an adapter, the critic is only a head, which needs almost no memory.
    critic = ["critic"] * work.args.has_critic_adapter
    return roles + critic, learning + critic


def _moments(trainer: dict[str, Any]) -> float:
    """Returns the bytes of Adam's two moments for one parameter."""
    return 2.0 if "8bit" in str(trainer.get("optim")) else 8.0


def _has_reference(work: Sections) -> bool:
    """Returns whether the reference is an adapter. A reference without an adapter is the base, which needs no more memory."""
    start = work.named.get("reference") or work.named.get("policy")
    return work.spec.keeps_reference and start not in (None, "base")


def _logits(spec: StageSpec, shape: Shape, tokens: int, device: str) -> float:
    if spec.learns == "reward":  # a reward model has no logits
        return 0.0
    if not spec.trl:
        from pipeline.models.logprobs import LOGIT_CHUNK

        return 4.0 * 4 * LOGIT_CHUNK[device]  # the logits and the softmax of a chunk, and their gradients
    tile = min(tokens, LOGIT_TILE[0]) * min(shape.vocabulary, LOGIT_TILE[1])
    hidden = 8.0 * tokens * shape.hidden  # hidden states at the positions in the loss, and their gradients
    return float(tile * LOGIT_BYTES[device]) + hidden


# ------------------------------------------------------------------------------------------------ GPUs and hours


def gpus_called(label: str) -> list[str]:
    """Returns the GPUs that match Ray's accelerator type, or [] if it is unknown. For example, an "A100" has 40 or 80 GB."""
    return [name for name in GPUS if label in (name, name.partition("-")[0])]


def memory_of(label: str) -> float | None:
    """Returns the GiB of a GPU of the accelerator type (the smallest if the type has several sizes), or None if it is unknown."""
    return min((GPUS[name].memory for name in gpus_called(label)), default=None)


def fitting_gpus(plan: Plan) -> list[str]:
    """Returns the GPUs on which the job fits, smallest first."""
    return [name for name, gpu in GPUS.items() if plan.peak <= gpu.memory * GIB]


def fit_into(work: Sections, memory: float, loras: Loras | None = None) -> tuple[list[str], Plan]:
    """Returns the least disruptive overrides with which a worker fits into `memory` bytes, and the resulting plan.

    If all overrides together are not enough, returns all of them.
    """
    made: dict[str, Any] = {}
    for key, value in _changes(work, loras):
        made[key] = value
        if key == "model.load_in_4bit":  # a sharded base cannot be quantized
            made["model.fsdp"] = False
        if make_plan(_with(work, made), loras).peak <= memory:
            break
    made = {key: value for key, value in made.items() if _with(work, {key: value}) != work}
    # A later change may make an earlier change unnecessary.
    for key in [key for key in made if key != "model.fsdp"]:
        fewer = {k: v for k, v in made.items() if k != key}
        if make_plan(_with(work, fewer), loras).peak <= memory:
            made = fewer
    overrides = [f"{key}={str(value).lower()}" for key, value in made.items()]
    return overrides, make_plan(_with(work, made), loras)


def _changes(work: Sections, loras: Loras | None = None) -> list[tuple[str, Any]]:
    """Returns overrides that reduce the memory, least disruptive first. The last override, NF4, changes the result of the run."""
    asked, spec, workers = memory_settings(work, 1 << 20), work.spec, work.places.workers.fewest
    # Considers only divisors of the current size, so that the batch remains divisible.
    fewer = [n for n in range(asked.rows - 1, spec.fewest_rows - 1, -1) if asked.rows % n == 0]
    changes: list[tuple[str, Any]] = []
    now = work.args.planned_rows(workers) if spec.online else asked.rollout_rows
    changes += [("trainer.local_rollout_forward_batch_size", now >> i) for i in (1, 2, 3, 4) if now >> i]
    if spec.online:
        training = asked.rows * asked.width  # tokens of a micro-batch
        if work.args.max_tokens_per_micro_batch is None and training < asked.scored:
            changes.append(("trainer.max_tokens_per_micro_batch", training))
    changes += [("trainer.per_device_train_batch_size", n) for n in fewer[:2]]
    if spec.learns:
        changes.append(("trainer.gradient_checkpointing", True))
    changes += [("trainer.per_device_train_batch_size", n) for n in fewer[2:]]
    if work.places.on_gpu:
        changes += [("trainer.bf16", True), ("model.dtype", "bfloat16")]
    dora = any(one.get("use_dora") for one in (work.lora, *(loras or {}).values()))
    vllm = work.rollout.engine == "vllm"  # vLLM loads the full base
    if workers > 1 and not ("model.fsdp" in spec.unused or work.model.load_in_4bit or dora or vllm):
        changes.append(("model.fsdp", True))
    changes.append(("model.load_in_4bit", True))
    return [(key, value) for key, value in changes if _with(work, {key: value}) != work]


def _with(work: Sections, changes: dict[str, Any]) -> Sections:
    """Returns a copy of `work` with changed values in the sections `trainer` and `model`."""
    for key, value in changes.items():
        section, name = key.split(".")
        if section == "trainer":
            trainer = {**work.trainer, name: value}
            args = None if work.spec.trl else type(work.args)(**trainer)
            bf16 = bool(value) if name == "bf16" else work.bf16
            work = replace(work, trainer=trainer, args=args, bf16=bf16)
        else:
            work = replace(work, model=replace(work.model, **{name: value}))
    return work


def estimate_hours(plan: Plan, name: str, rows: Rows) -> float:
    """Returns the estimated hours of a run on GPUs of one type, which reach the fraction UTILIZATION of their peak speed.

    The estimate assumes that completions have their maximum length. A decoding step is assumed to take as long as reading the
    weights and the KV cache, which is half full on average. The estimate does not include the time to gather a sharded base.

    Args:
        name: a key of GPUS.
        rows: number and mean length of the training rows of an epoch.
    """
    gpu, work, asked, spec = GPUS[name], plan.work, plan.asked, plan.work.spec
    workers, (longest, completion) = work.places.workers.most, plan.tokens
    row, read = min(rows.tokens, longest), 0.0
    if spec.online:
        args = work.args
        episodes = args.total_updates(rows.count) * args.batch_size
        tokens = episodes * (row + completion)
        models = 1 + args.has_critic_adapter
        # Forward, backward and (with gradient checkpointing) recomputation are assumed to take equally long.
        learning = 2 if args.gradient_checkpointing is False else 3
        # Forwards for the reward, the reference, old log-probs and old values, then forwards and backwards of all epochs.
        passes = 2 + models * (1 + args.num_ppo_epochs * learning)
        at_once = args.decoded(workers)
        filled = at_once * (row + completion / 2) * plan.shape.cache(asked.bf16)
        read = math.ceil(episodes / at_once) * completion * (plan.shape.moved + filled)
    else:
        # Forwards of the reference, and other forwards of the stage without gradients, have no backward.
        passes = (3 if asked.checkpointing else 2) + spec.keeps_reference + spec.further_forwards
        steps = work.trainer.get("max_steps", 0)
        if steps and steps > 0:  # packed rows have the maximum length, other rows the mean length
            width = longest if work.trainer.get("packing") else row
            tokens = steps * (work.data.batch_size or 8 * workers) * width
        else:
            tokens = rows.count * row * work.trainer.get("num_train_epochs", 3.0)
        tokens *= spec.sequences
    products = passes * tokens * 2.0 * plan.shape.parameters
    seconds = products / (gpu.tflops * 1e12) + read / (gpu.bandwidth * 1e9)
    return seconds / UTILIZATION / workers / 3600


def recomputes_activations(worker: Any) -> bool:
    """Returns whether the workers recompute activations: `trainer.gradient_checkpointing`, or the plan's decision if it is null.

    All ranks return the same value. Rank 0 prints the plan's reason. Call this function before the base is loaded.
    """
    import torch

    from pipeline.writing.memory import free_bytes

    work = worker.work
    default = schema.keys(work.spec.trainer)["gradient_checkpointing"].get("default")
    given = work.trainer.get("gradient_checkpointing", default)
    if given is not None:
        return bool(given)
    adapters = [name for name, one in work.inputs.items() if one.kind == "adapter"]
    loras = {name.split(".")[0]: adapter_files.describe_adapter(worker.input(name)) for name in adapters}
    peak = make_plan(_with(work, {"trainer.gradient_checkpointing": False}), loras).peak
    memory = free_bytes(torch.device(worker.device))
    why = f"storing all activations needs {peak / GIB:.1f} GiB, and {memory / GIB:.1f} GiB are free"
    needed, why = max(worker.gather((peak > MAX_FILL * memory, why)))  # True if any worker needs to recompute
    if worker.rank == 0:
        kept = "recomputed" if needed else "kept"
        print(f"activations are {kept} (gradient_checkpointing: null): {why}", flush=True)
    return needed
