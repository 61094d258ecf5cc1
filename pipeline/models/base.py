"""Identifies a base model (`base_identity`, without importing torch) and loads it (`load_base`).

A base is a folder or a Hugging Face Hub id. Only adapters are trained, so `load_base` freezes the base and turns off dropout.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, blame_key, in_brief
from pipeline.models.compatibility import Base, safetensors_files, shapes_in
from pipeline.system.hub import HEAD_NAMES, KEY, base_config, base_file, local, source, weight_files

if TYPE_CHECKING:
    import torch

    from pipeline.job.job import Model

WHOLE_FILE_BYTES = 1 << 30  # weight files of up to 1 GiB are hashed in full
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # in larger files, the header and 64 pieces of 64 KiB are hashed
# Keys of config.json that the digest excludes.
VOLATILE_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
# Keys of config.json that contain the maximum number of positions.
CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length",
)  # fmt: skip
# Two rows of an lm head are treated as equal if their distance, relative to the norm of a row, is at most this value. The
# relative distance of trained rows is about 1.
MIN_DISTANCE = 0.01
KEPT_OUT_OF_NF4 = ["lm_head", "embed_out", *HEAD_NAMES]  # layers that stay unquantized


# ------------------------------------------------------------------------------------------------- identity


def base_identity(name_or_path: str, revision: str | None = None) -> dict[str, Any]:
    """Returns a base's identity: `name_or_path`, `revision`, `digest`, `context_length` (tokens, or None), `architecture`.

    The digest of a Hub id is its commit. The digest of a folder is a SHA-256 of its configuration and weights. For a weight
    file over 1 GiB, the digest includes only the header and 64 evenly spaced pieces.
    """
    config = base_config(name_or_path, revision)
    folder = local(name_or_path)
    if os.path.isdir(folder):
        settings = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
        hasher = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for weights in weight_files(folder):
            hasher.update(weights.name.encode() + _file_digest(weights))
        digest = f"sha256:{hasher.hexdigest()}"
    else:
        path = base_file(name_or_path, "config.json", revision)
        assert path is not None
        revision = path.parent.name  # the Hub's cache stores files in snapshots/<commit>/
        digest = f"commit:{revision}"
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    return {
        "name_or_path": name_or_path,
        "revision": revision,
        "digest": digest,
        "context_length": context_length(config),
        "architecture": str(architectures[0]),
    }


def context_length(config: dict[str, Any]) -> int | None:
    """Returns the number of positions in config.json, or None if config.json has no limit."""
    for part in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def _file_digest(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256(str(size).encode())
        for index in range(SAMPLES + 1):  # evenly spaced from the start to the end of the file
            file.seek(index * (size - SAMPLE_BYTES) // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


# -------------------------------------------------------------------------------------------------- loading


def load_base(model: Model, scorer_tokenizer: Any = None, device: str | torch.device | None = None) -> Any:
    """Loads the base of a job in eval mode, with frozen weights and every dropout set to 0.

    Raises InputError if the base is missing or damaged, or if transformers has no class for it.

    Args:
        model: the job's `model` section. `load_in_4bit` quantizes to NF4 with double quantization, on a CPU too.
        scorer_tokenizer: the tokenizer of a reward model, or None. With a tokenizer, loads an AutoModelForSequenceClassification
            with one label and an untrained head in fp32. Without a tokenizer, loads an AutoModelForCausalLM.
        device: the device on which the base is loaded and quantized, or None for the CPU, on which quantizing 70B parameters
            takes half an hour.
    """
    import torch

    from pipeline.system.progress import Bar, loading_shown

    scorer = scorer_tokenizer is not None
    config, auto = base_configuration(model, scorer_tokenizer)
    dtype = getattr(torch, model.dtype)
    options: dict[str, Any] = {
        "config": config,
        "revision": model.revision,
        "dtype": dtype,
        "use_safetensors": None if model.allow_pickle else True,
        "trust_remote_code": model.trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # the check of `info` below rejects mismatched weights
        "tqdm_class": Bar,
        "device_map": None if device is None else {"": device},
    }
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    if model.load_in_4bit:
        options["quantization_config"] = _nf4(dtype)
    path = source(model.name_or_path)
    with without_load_report(), loading_shown(), errors_of_files(model):
        base, info = auto.from_pretrained(path, **options)
    # If weights are missing, transformers only prints a warning and initializes these weights randomly.
    problems = {f"{key} (another shape)" for key, *_ in info["mismatched_keys"]}
    problems |= {key for key in info["missing_keys"] if not (scorer and key.startswith(HEAD_NAMES))}
    if problems:
        raise InputError(
            f"the weight files of {path!r} do not match config.json: {len(problems)} tensors are missing or have another shape, for "
            f"example {min(problems)}; fetch or save the model again",
            KEY,
        )
    freeze(base)
    if model.load_in_4bit:
        _one_nf4_path(base)
    if scorer:
        fp32_head(base)
    return base


def check_base(model: Model, scorer: bool = False, weights: bool = True) -> Base:
    """Returns a description of a base, read from its files.

    Raises InputError if a file is missing or damaged, or if the weights are pickles and `allow_pickle` is off.

    Args:
        scorer: whether the base is a full reward model, which must have a scalar head.
        weights: whether to read the weight files in addition to config.json.
    """
    config = base_config(model.name_or_path, model.revision)
    with blame_key(KEY):
        files = safetensors_files(model, fetch=False) if weights else []
        base = Base(model, config, {name: shape for file in files for name, shape in shapes_in(file).items()})
    heads = [shape for name, shape in base.shapes.items() if name.startswith(HEAD_NAMES)]
    if scorer and base.shapes and not any(head[:1] == (1,) for head in heads):
        raise InputError(  # transformers would initialize a random head
            f"the weight files of {model.name_or_path!r} have no classification head with one output, such as score.weight of shape (1, hidden size); "
            "use a trained reward model",
            KEY,
        )
    return base


def base_configuration(model: Model, scorer_tokenizer: Any) -> tuple[Any, Any]:
    """Returns the transformers configuration of a base, without dropout, and the Auto class that loads the base.

    Args:
        scorer_tokenizer: as for `load_base`. The configuration of a reward model has one label and the tokenizer's pad token.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    with without_load_report(), errors_of_files(model):
        config = AutoConfig.from_pretrained(
            source(model.name_or_path), revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    # Attention reads its dropout from the configuration, so freeze() cannot turn it off.
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
                setattr(part, key, 0.0)
    if scorer_tokenizer is None:
        return config, AutoModelForCausalLM
    config.num_labels = 1
    config.get_text_config().pad_token_id = scorer_tokenizer.pad_token_id
    return config, AutoModelForSequenceClassification


@contextmanager
def errors_of_files(model: Model) -> Iterator[None]:
    """Turns errors that transformers raises about a model's files or its attention into an InputError."""
    import torch

    try:
        yield
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        attention = model.attn_implementation not in (None, "eager", "sdpa")
        remedy = (
            "fix its files, or fetch the model again; custom Python code needs model.trust_remote_code=true"
        )
        raise InputError(
            f"transformers cannot load {model.name_or_path!r} ({in_brief(error)}); "
            + ("remove the key, or set model.attn_implementation=sdpa" if attention else remedy),
            key="model.attn_implementation" if attention else KEY,
        ) from error


def freeze(model: torch.nn.Module) -> None:
    """Turns off gradients and dropout. Sets the rate of each dropout to 0, so that train() does not turn dropout on again."""
    import torch

    model.eval()
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _nf4(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=KEPT_OUT_OF_NF4,
    )


def _one_nf4_path(model: torch.nn.Module) -> None:
    """Prevents bitsandbytes 0.50 from repacking NF4 weights at the first inference on a CPU with avx512_bf16.

    Products with packed weights are rounded differently from products in training, and bitsandbytes never unpacks the weights.
    The flag that this function sets is private. Remove this function when packed and unpacked weights give the same products
    (https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1804).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


@contextmanager
def without_load_report() -> Iterator[None]:
    """Turns off transformers' warnings within the block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def check_ends(model: torch.nn.Module, tokenizer: Any, ends: set[int]) -> None:
    """Raises InputError if the frozen lm head has the same row for an end token as for other tokens.

    Two tokens with equal rows always have equal logits. Tokens that never occurred in pre-training often have equal rows.

    Args:
        ends: ids of the tokens that end training rows.
    """
    import torch

    head = model.get_output_embeddings()
    weight = head.weight if head.bias is None else torch.cat([head.weight, head.bias[:, None]], dim=1)
    for end in sorted(ends):
        row = weight[end].float()
        distances = torch.cat([(part.float() - row).norm(dim=1) for part in weight.split(4096)])
        others = set((distances <= MIN_DISTANCE * row.norm()).nonzero().flatten().tolist()) - ends
        if others:
            token = tokenizer.convert_ids_to_tokens(end)
            raise InputError(
                f"the lm head has the same row for {token!r}, which ends the training rows, as for {len(others)} other tokens. "
                "So this token was never trained, and no completion would end, because the lm head stays frozen. Use a base whose "
                "end token was trained (an instruct version), or end the rows with a trained token (eos_token in "
                "tokenizer_config.json, or model.chat_template)",
                KEY,
            )


def score_head(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the scalar head of a sequence-classification model. Raises InputError if the model has no scalar head."""
    for name in HEAD_NAMES:
        if hasattr(model, name):
            return getattr(model, name)
    raise InputError(f"{type(model).__name__} has no scalar head called {', '.join(HEAD_NAMES)}")


def fp32_head(model: torch.nn.Module) -> None:
    """Makes the scalar head of a sequence-classification model compute in fp32, even in a half-precision model."""
    head = score_head(model).float()
    kind = type(head)
    # Change the class and not the `forward` attribute of the module, because peft trains a copy of the module.
    head.__class__ = type(kind.__name__, (_InFp32, kind), {})


class _InFp32:
    """A scalar head that computes in fp32, because bf16 would round scores, for example 15.13 to 15.125."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.autocast(hidden.device.type, enabled=False):
            return super().forward(hidden.float())  # type: ignore[misc]
