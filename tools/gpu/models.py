"""Random models in the shapes of Llama 3, a PPO trainer on them, and measurements of time and memory.

PRETEND=1 uses tiny sizes on a pretended GPU (tools/gpu/pretend), so that the code runs on a CPU within seconds.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from pipeline.models.adapters import SharedBase
from pipeline.ppo.config import PPOConfig
from pipeline.ppo.episodes import Prompts
from pipeline.ppo.sampler import Roles, Sampler
from pipeline.ppo.trainer import PPOTrainer
from pipeline.scoring.rewards import AdapterReward
from tools.gpu.record import Skipped

PRETEND = bool(os.environ.get("PRETEND"))
DEVICE = torch.device("cuda", 0)
PRECISIONS = ("fp32", "bf16", "nf4")
GIB = 2**30
PAD, FIRST = 3, 5  # prompts contain no ids below FIRST
VOCABULARY = 1024 if PRETEND else 128256
TINY = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
# sizes of a layer of Llama 3, by model size
LAYER = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8),
    "70b": dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8),
}
LAYERS = {"8b": 32, "70b": 80}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
REWARD_LORA = {**LORA, "r": 8}
ROLES: dict[str, dict[str, Any]] = {
    "policy": dict(lora=LORA, trainable=True),
    "reward": dict(lora=REWARD_LORA, head=True),
    "reference": dict(copy_of="policy"),
    "critic": dict(copy_of="reward", head=True, trainable=True),
}


def small(full: int, tiny: int) -> int:
    """Returns the size `full` on a real GPU, or `tiny` on a pretended one."""
    return tiny if PRETEND else full


def config(shape: str = "8b", layers: int | None = None) -> LlamaConfig:
    """Returns the configuration of a model with all of its layers, or with `layers` of them."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        num_hidden_layers=2 if PRETEND else layers or LAYERS[shape],
        pad_token_id=PAD,
        eos_token_id=VOCABULARY - 1,
        attn_implementation="sdpa",
        **(TINY if PRETEND else LAYER[shape]),
    )


def base(shape: str = "8b", precision: str = "bf16", layers: int | None = None, device: Any = None) -> Any:
    """Returns a random causal language model. The weights are created on the device, without a copy from the CPU."""
    torch.manual_seed(0)
    device, dtype = device or DEVICE, torch.float32 if precision == "fp32" else torch.bfloat16
    made = config(shape, layers)
    if precision == "nf4":
        model = _quantized(made, dtype, device)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.5)  # gives logits a standard deviation of about 3, as in a trained model
        model.lm_head.weight[-1].zero_()  # makes EOS rare, so that completions have full length
    return model.eval()


def _quantized(made: LlamaConfig, dtype: torch.dtype, device: Any) -> Any:
    """Returns the model in NF4, like `load_base`. Quantizes random matrices one by one, so that 70B fits on one GPU."""
    need("bitsandbytes")
    import bitsandbytes as bnb
    from transformers.integrations import replace_with_bnb_linear

    from pipeline.models.base import KEPT_OUT_OF_NF4, _nf4, _one_nf4_path

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made, dtype=dtype)
    model = replace_with_bnb_linear(model, KEPT_OUT_OF_NF4, _nf4(dtype))
    for module in model.modules():
        quantized = isinstance(module, bnb.nn.Linear4bit)
        for name, parameter in module.named_parameters(recurse=False):
            shape = (module.out_features, module.in_features) if quantized else parameter.shape
            new = torch.ones(shape, dtype=dtype, device=device)
            if len(shape) > 1:  # excludes the weights of norms, which have one dimension
                new.normal_(std=made.initializer_range)
            if quantized:
                kind = dict(quant_type="nf4", compress_statistics=True, module=module)
                module.weight = bnb.nn.Params4bit(new, requires_grad=False, **kind).to(device)
            else:
                setattr(module, name, torch.nn.Parameter(new, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(made).to(device)
    model.is_quantized = model.is_loaded_in_4bit = True
    _one_nf4_path(model)
    return model


def shared_base(
    shape: str = "8b",
    precision: str = "bf16",
    layers: int | None = None,
    device: Any = None,
    roles: Iterable[str] = ROLES,
    spread: float = 2e-3,
) -> SharedBase:
    """Returns one base with all or some of PPO's four roles.

    Args:
        spread: standard deviation of the adapters' B matrices. peft sets B to 0, and an adapter that changes nothing would
            hide faults.
    """
    autocast = None if precision == "fp32" else torch.bfloat16
    shared = SharedBase(base(shape, precision, layers, device), autocast=autocast)
    for role in roles:
        shared.add(role, **ROLES[role])
        if role in ("policy", "reward"):
            for key, parameter in shared._adapter(role).items():
                if "lora_B" in key:
                    parameter.data.normal_(std=spread)
            if role == "reward":
                shared.heads[role].weight.data.normal_(std=0.02)
    return shared


def prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Returns random prompts as token ids, with lengths between `shortest` and `longest`."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return [torch.randint(FIRST, VOCABULARY // 2, (n,), generator=draw).tolist() for n in lengths]


def trainer(
    shared: SharedBase,
    episodes: int,
    prompt: tuple[int, int],
    completion: int,
    full_length: bool = False,
    **settings: Any,
) -> PPOTrainer:
    """Returns a PPO trainer with `episodes` completions per update, by default for one epoch of one minibatch.

    Args:
        prompt: lengths of the shortest and the longest prompt.
        completion: maximum tokens of a completion.
        full_length: whether completions have the maximum length. If False, one token in 256 ends a completion.
    """
    given = dict(
        total_episodes=episodes * 8,
        batch_size=episodes,
        num_ppo_epochs=1,
        num_mini_batches=1,
        response_length=completion,
        bf16=shared.autocast is not None,
        lr_scheduler_type="constant",
        learning_rate=1e-5,
        per_device_train_batch_size=4,
    )
    args = PPOConfig(**{**given, **settings})
    rows = [{"input_ids": ids, "row": '{"prompt": "random"}'} for ids in prompts(episodes * 8, *prompt)]
    ends = range(VOCABULARY - (1 if full_length else max(4, VOCABULARY // 256)), VOCABULARY)
    ids = {"pad_token_id": PAD, "eos_token_id": VOCABULARY - 1, "generation_eos": ends}
    tokenizer = SimpleNamespace(**ids, chat_template=None, get_added_vocab=dict)
    return PPOTrainer(Sampler(Roles(shared, [AdapterReward(shared)]), tokenizer, args), Prompts(rows))


def need(*packages: str) -> None:
    """Skips the experiment unless all of these packages are installed."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise Skipped(f"{', '.join(missing)}: not installed")


def timed(work: Callable[[], object], rounds: int = 3, warm_up: int = 1) -> float:
    """Returns the mean seconds of a call, after warmup calls."""
    for _ in range(warm_up):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def fresh() -> None:
    """Frees unused GPU memory and resets the record of peak memory."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def occupied() -> float:
    """Returns this process's peak GPU memory since `fresh` in GiB: torch's blocks and CUDA's context."""
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()  # no other process uses this GPU
    return (context + torch.cuda.max_memory_reserved()) / GIB
