"""The config.json of two gated models, so that a plan needs neither their license nor a network."""

from typing import Any

from pipeline.config import Model
from pipeline.errors import InputError
from pipeline.models.hub import base_config

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-05,
}
_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
SHAPES: dict[str, dict[str, Any]] = {
    f"meta-llama/Llama-3.1-{size}{kind}": {**_LLAMA_3, **shape}
    for size, shape in (("8B", _8B), ("70B", _70B))
    for kind in ("", "-Instruct")
}


def config_of(model: Model) -> tuple[dict[str, Any], str | None]:
    """Returns (the base's config.json, None), or for a base of SHAPES (numbers from here, why it cannot be read).

    Raises:
        InputError: if it cannot be read and is not in SHAPES.
    """
    try:
        return base_config(model.name_or_path, model.revision), None
    except InputError as error:
        if model.name_or_path not in SHAPES:
            raise
        return SHAPES[model.name_or_path], error.message
